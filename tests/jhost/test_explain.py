"""`jhost.explain` says what was pipelined, what it moves, and what was not and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost import errors, testing
from jhost._call.around import calls_in
from jhost._call.once_a_line import warned_lines
from jhost.lowering.ir.fingerprint import fingerprint
from jhost.runtime import compiler_options
from tests import finding, sums

MakeMesh = Callable[[Sequence[int], Sequence[str]], Mesh]

X, UP, DOWN = jnp.ones((32, 16)), jnp.ones((16, 256)), jnp.ones((256, 16))
BLOCK_SPECS: dict[str, Any] = {
    "in_shardings": (P("tp"), P(None, "tp"), P("tp")),
    "out_shardings": P("tp"),
}


@pytest.fixture
def mesh(make_mesh: MakeMesh) -> Mesh:
    return make_mesh((4,), ("tp",))


@pytest.fixture(autouse=True)
def nothing_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of other tests may have the names of these."""
    monkeypatch.setattr(compiler_options, "_missed", {})


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Gathers rows, multiplies twice and reduce-scatters."""
    return jhost.stream((x @ up) @ down, axis=0)


def without_lines(explanation: jhost.Explanation) -> str:
    """The text, with `test_explain.py:12` as `test_explain.py`."""
    words = str(explanation).split("test_explain.py:")
    return "test_explain.py".join(
        [words[0], *(w.lstrip("0123456789") for w in words[1:])]
    )


def test_a_pipelined_block_reads_well(mesh: Mesh, golden: Callable[..., None]) -> None:
    f = jhost.jit(block, mesh=mesh, chunks=2, pipeline="collective", **BLOCK_SPECS)
    golden(without_lines(jhost.explain(f, X, UP, DOWN)))


def test_all_of_a_pipelined_block_reads_well(
    mesh: Mesh, golden: Callable[..., None]
) -> None:
    f = jhost.jit(block, mesh=mesh, chunks=2, pipeline="collective", **BLOCK_SPECS)
    explanation = jhost.explain(f, X, UP, DOWN, detail=True)
    golden(without_lines(explanation))
    assert str(explanation) == explanation.text == jhost.explain(f, X, UP, DOWN).text


def test_what_was_not_pipelined_reads_well(
    mesh: Mesh, golden: Callable[..., None]
) -> None:
    @jhost.jit(mesh=mesh, in_shardings=P(None, "tp"), out_shardings=P(None, "tp"))
    def model(x: jax.Array) -> jax.Array:
        off = jhost.stream(jnp.sin(x), axis=0, pipeline="off")
        columns = jhost.stream(jnp.sort(off, axis=0) + 1, axis=1, chunks=2)
        return jnp.cumsum(jhost.serial(columns), axis=1)

    golden(without_lines(jhost.explain(model, X, detail=True)))


@pytest.mark.parametrize(
    ("function", "mark"),
    [
        ({"pipeline": "off"}, {"pipeline": "auto"}),
        ({"pipeline": "p2p"}, {"pipeline": "auto"}),
        ({"chunks": 4}, {"chunks": "auto"}),
    ],
    ids=str,
)
def test_a_mark_s_auto_is_not_told_as_the_function_s(
    mesh: Mesh, function: dict[str, Any], mark: dict[str, Any]
) -> None:
    def rows(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream((x @ up) @ down, axis=0, **mark)

    f = jhost.jit(rows, mesh=mesh, **function, **BLOCK_SPECS)
    (stream,) = jhost.explain(f, X, UP, DOWN).streams
    assert (stream.pipeline, stream.chunks) == ("off", 1)
    assert stream.reason.startswith("auto: on cpu devices no transfer runs beside")


def test_the_fields_are_for_tools(mesh: Mesh) -> None:
    f = jhost.jit(block, mesh=mesh, chunks=2, pipeline="collective", **BLOCK_SPECS)
    explanation = jhost.explain(f, X, UP, DOWN)
    assert (explanation.name, explanation.loops) == ("block", 1)
    (stream,) = explanation.streams
    assert (stream.axis, stream.chunks, stream.pipeline) == (0, 2, "collective")
    assert stream.extent == 8  # rows of a shard
    assert stream.where.startswith("test_explain.py:")
    assert [(c.kind, c.axes, c.chunks) for c in explanation.communications] == [
        ("AllGather", ("tp",), 2),
        ("ReduceScatter", ("tp",), 2),
    ]
    assert explanation.notes == ()
    gathered, scattered = explanation.layouts
    assert (gathered.value, gathered.before) == ("x", "P('tp', None)")
    assert gathered.bytes == explanation.communications[0].bytes
    assert (scattered.after, scattered.reason) == ("P('tp', None)", "as constrained")
    assert gathered.where.startswith("test_explain.py:")
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.loops = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_types_are_enough(mesh: Mesh) -> None:
    f = jhost.jit(block, mesh=mesh, chunks=2, **BLOCK_SPECS)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, UP, DOWN)]
    assert jhost.explain(f, *types) == jhost.explain(f, X, UP, DOWN)


# --- Bytes ------------------------------------------------------------------------ #


def total(explanation: jhost.Explanation, kind: str) -> int:
    return sum(c.bytes for c in explanation.communications if c.kind == kind)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("chunks", [None, 2], ids=["whole", "chunks"])
def test_a_device_receives_what_a_ring_moves(
    make_mesh: MakeMesh, devices: int, dtype: Any, chunks: int | None
) -> None:
    mesh = make_mesh((devices,), ("tp",))
    how: dict[str, Any] = {"chunks": chunks} if chunks else {"pipeline": "off"}
    f = jhost.jit(block, mesh=mesh, **BLOCK_SPECS, **how)
    explanation = jhost.explain(f, *(a.astype(dtype) for a in (X, UP, DOWN)))
    rows = X.size * jnp.dtype(dtype).itemsize
    received = rows * (devices - 1) // devices
    assert total(explanation, "AllGather") == received
    assert total(explanation, "ReduceScatter") == received

    @jhost.jit(mesh=mesh, in_shardings=P(None, "tp"), out_shardings=P(), **how)
    def reduced(w: jax.Array) -> jax.Array:
        return jhost.stream(w @ w.T, axis=0)

    explanation = jhost.explain(reduced, UP.astype(dtype))
    square = 16 * 16 * jnp.dtype(dtype).itemsize
    assert total(explanation, "AllReduce") == 2 * square * (devices - 1) // devices


def test_a_ragged_last_chunk_counts_as_what_it_is(mesh: Mesh) -> None:
    f = jhost.jit(block, mesh=mesh, chunks=3, **BLOCK_SPECS)
    explanation = jhost.explain(f, X, UP, DOWN)
    assert explanation.streams[0].chunks == 3
    assert total(explanation, "AllGather") == X.nbytes * 3 // 4


def test_one_device_moves_nothing(make_mesh: MakeMesh) -> None:
    one = make_mesh((1,), ("tp",))
    for f in (
        jhost.jit(block, chunks=2),
        jhost.jit(block, mesh=one, chunks=2, **BLOCK_SPECS),
    ):
        explanation = jhost.explain(f, X, UP, DOWN)
        assert explanation.communications == ()
        assert explanation.loops == 1


# --- Why not ------------------------------------------------------------------------ #


def test_a_stream_that_is_off_says_who_turned_it_off(mesh: Mesh) -> None:
    everywhere = jhost.jit(block, mesh=mesh, pipeline="off", **BLOCK_SPECS)
    there = jhost.jit(lambda x: jhost.stream(x + 1, axis=0, pipeline="off"), chunks=2)
    for explanation in (
        jhost.explain(everywhere, X, UP, DOWN),
        jhost.explain(there, X),
    ):
        (stream,) = explanation.streams
        assert (stream.pipeline, stream.chunks) == ("off", 1)
        assert "as asked" in stream.reason
        assert explanation.loops == 0


def test_a_stream_that_nobody_asked_for_by_name_says_what_was_chosen(
    mesh: Mesh,
) -> None:
    f = jhost.jit(block, mesh=mesh, **BLOCK_SPECS)
    (stream,) = jhost.explain(f, X, UP, DOWN).streams
    assert (stream.chunks > 1) == (stream.pipeline != "off")
    assert stream.reason


def test_a_function_without_streams_says_so() -> None:
    explanation = jhost.explain(jhost.jit(lambda x: x + 1), X)
    assert str(explanation) == "<lambda>: 0 loops"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"pipeline": "p2p", "chunks": 4},
            "pipeline='p2p' and chunks=4 only apply to values",
        ),
        ({"chunks": 2}, "chunks=2 only applies to values"),
        ({}, None),
    ],
    ids=str,
)
def test_settings_for_streams_where_nothing_is_marked_are_noted(
    settings: Any, said: str | None, mesh: Mesh
) -> None:
    f = jhost.jit(lambda x: x @ x.T, mesh=mesh, in_shardings=P("tp"), **settings)
    notes = [n for n in jhost.explain(f, X).notes if "nothing is marked" in n]
    assert len(notes) == (said is not None)
    assert all(str(said) in note for note in notes)


def test_a_count_of_chunks_that_found_streams_do_not_follow_is_noted(
    mesh: Mesh,
) -> None:
    f = jhost.jit(
        lambda x, up, down: (x @ up) @ down, mesh=mesh, chunks=2, **BLOCK_SPECS
    )
    with finding.everywhere():
        explanation = jhost.explain(f, X, UP, DOWN)
    assert explanation.loops
    assert any("chunks=2 only applies to values" in n for n in explanation.notes)


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ({}, True),
        ({"streams": "marked"}, False),
        ({"pipeline": "off"}, False),
        ({"pipeline": "p2p"}, False),
    ],
)
def test_settings_say_whether_streams_are_found(
    mesh: Mesh, how: dict[str, Any], found: bool
) -> None:
    f = jhost.jit(lambda x, up, down: (x @ up) @ down, mesh=mesh, **BLOCK_SPECS, **how)
    with finding.everywhere():
        assert bool(jhost.explain(f, X, UP, DOWN).loops) == found
        if found:
            testing.assert_pipelined(f, X, UP, DOWN)


def test_serial_ends_a_stream_that_was_found(mesh: Mesh) -> None:
    def model(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.serial(x @ up) @ down

    f = jhost.jit(model, mesh=mesh, **BLOCK_SPECS)
    with finding.everywhere():
        explanation = jhost.explain(f, X, UP, DOWN)
    assert explanation.loops == 2  # without `serial` it is one
    assert any("jhost.serial keeps it whole" in note for note in explanation.notes)


def test_serial_stops_a_stream_and_is_named() -> None:
    @jhost.jit(chunks=2)
    def model(x: jax.Array) -> jax.Array:
        return jhost.stream(jhost.serial(jnp.sin(x)) + 1, axis=0)

    explanation = jhost.explain(model, X)
    assert explanation.loops == 1
    assert len(explanation.streams) == 1


def test_a_stream_stops_before_a_whole_dim_and_says_which() -> None:
    @jhost.jit(chunks=2)
    def model(x: jax.Array) -> jax.Array:
        return jnp.sort(jhost.stream(jnp.sin(x), axis=0), axis=0)

    (note,) = jhost.explain(model, X).notes
    assert "streams stop before result: sort needs dim 0 whole" in note


def test_an_opaque_primitive_is_noted_with_its_line(mesh: Mesh) -> None:
    @jhost.jit(mesh=mesh, in_shardings=P("tp"))
    def model(x: jax.Array) -> jax.Array:
        return jax.pure_callback(lambda x: x, x, x)

    (note,) = jhost.explain(model, X).notes
    assert note.startswith("pure_callback works on whole arrays: ")
    assert "[test_explain.py:" in note
    assert note.endswith("model)]")


def test_a_mark_whose_result_nothing_reads_is_noted(mesh: Mesh) -> None:
    def lost(x: jax.Array) -> jax.Array:
        jhost.stream(x, axis=0)
        return x + 1

    def in_a_body(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (lost(x), None), x, length=2)[0]

    over_a_mesh: dict[str, Any] = {"mesh": mesh, "in_shardings": P("tp")}
    marked = (lost, {}), (in_a_body, {}), (lost, over_a_mesh)
    for f, settings in marked:
        warned_lines().clear()
        with pytest.warns(errors.StreamWarning, match="marks nothing"):
            (note,) = jhost.explain(jhost.jit(f, **settings), X).notes
        assert note.startswith("jhost.stream at test_explain.py:")
        assert "marks nothing, because nothing reads its result" in note


@pytest.mark.parametrize("wrap", [jax.grad, jax.value_and_grad, jax.checkpoint])
def test_marks_that_a_gradient_does_not_need_are_not_lost(wrap: Any) -> None:
    """Of a sum's gradient the marked value itself is no part."""

    def total(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sin(x), axis=0).sum()

    explanation = jhost.explain(jhost.jit(wrap(total)), X)
    assert not [note for note in explanation.notes if "marks nothing" in note]


def _marked(x: jax.Array) -> jax.Array:
    return jhost.stream(jnp.sin(x), axis=0)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.vjp(_marked, x)[1](x)[0],
        lambda x: jax.jvp(_marked, (x,), (x,))[1],
        lambda x: jax.hessian(lambda x: _marked(x).sum())(x[0]),
        lambda x: jax.lax.cond(x.sum() > 0, _marked, jnp.cos, x),
        lambda x: (jax.jit(_marked)(x), x)[1],
    ],
    ids=["vjp", "jvp", "hessian", "cond", "a helper's result"],
)
def test_a_mark_of_which_jax_needs_a_part_is_not_warned_of(
    f: Callable[..., Any],
) -> None:
    """Warnings are errors here."""
    warned_lines().clear()
    given: Callable[..., Any] = jhost.jit(f)
    given(X)


@pytest.mark.parametrize("chunks", [3, 5])
def test_a_count_that_a_dim_does_not_allow_says_what_is_possible(chunks: int) -> None:
    f = jhost.jit(lambda x: jhost.stream(x + 1, axis=0), chunks=chunks)
    warned_lines().clear()
    with pytest.warns(errors.StreamWarning, match=f"not the {chunks} asked for"):
        (stream,) = jhost.explain(f, jnp.ones((2 * chunks - 2, 3))).streams
    made, more = (2, 4) if chunks == 3 else (4, 8)
    assert stream.chunks == made
    assert stream.reason == (
        f"{made} chunks, not the {chunks} asked for: {2 * chunks - 2} steps can be cut "
        f"into {made} or {more} chunks"
    )


def test_transfers_of_a_while_stay_in_their_iteration(mesh: Mesh) -> None:
    @jhost.jit(mesh=mesh, **BLOCK_SPECS, pipeline="p2p")
    def model(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 1e9, lambda x: (x @ up) @ down, x)

    shapes = (1024, 2048), (2048, 8192), (8192, 2048)
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    (note,) = (n for n in jhost.explain(model, *types).notes if "while loop" in n)
    assert "stay in their iteration: nothing says whether another" in note


def test_what_depends_on_the_iteration_before_cannot_come_early(mesh: Mesh) -> None:
    """Activations over tp do; weights over fsdp would not."""

    @jhost.jit(mesh=mesh, **BLOCK_SPECS, pipeline="p2p")
    def model(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jhost.shard((x @ up) @ down, P("tp")), None

        return jax.lax.scan(layer, x, length=3)[0]

    shapes = (1024, 2048), (2048, 8192), (8192, 2048)
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    notes = jhost.explain(model, *types).notes
    (note,) = (note for note in notes if note.startswith("in the scan of 3: "))
    assert "stay in their iteration: each iteration waits for the one before" in note


# --- Functions around jhost functions ----------------------------------------------- #


@jhost.jit
def doubled(x: jax.Array) -> jax.Array:
    return jhost.stream(jnp.sin(x) * 2, axis=0, chunks=2)


def loss(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(doubled(x)) ** 2)


def in_layers(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (doubled(x), None), x, length=3)[0].sum()


AHEAD, BACK, AGAIN = (f"doubled ({n})" for n in ("forward", "backward", "recomputed"))


@pytest.mark.parametrize(
    ("f", "names"),
    [
        (loss, ["doubled"]),
        (jax.jit(loss), ["doubled"]),
        (in_layers, ["doubled"]),
        (lambda x: doubled(x) + doubled(x), ["doubled"]),
        (jax.grad(loss), [AHEAD, BACK]),
        (jax.jit(jax.value_and_grad(jax.jit(loss))), [AHEAD, BACK]),
        (jax.grad(in_layers), [AHEAD, BACK]),
        (jax.grad(jax.checkpoint(loss)), [AHEAD, AGAIN, BACK]),
        (lambda x: jax.linearize(doubled, x)[1](x), [AHEAD, "doubled (tangents)"]),
        (jax.vmap(doubled), ["doubled (batched)"]),
        (
            lambda x: jax.vmap(jax.grad(loss))(x.reshape(4, 8, 16)),
            ["doubled (batched, forward)", "doubled (batched, backward)"],
        ),
    ],
    ids=[
        "called",
        "in a jit",
        "in a scan",
        "twice",
        "grad",
        "grad of a jit",
        "grad of a scan",
        "checkpoint",
        "linearize",
        "vmap",
        "vmap of grad",
    ],
)
def test_each_program_is_named_by_what_jax_derived(f: Any, names: list[str]) -> None:
    explanation = jhost.explain(f, X)
    assert [each.name for each in explanation.programs] == names


def test_a_step_reads_well(mesh: Mesh, golden: Callable[..., None]) -> None:
    model = jhost.jit(block, mesh=mesh, chunks=2, pipeline="collective", **BLOCK_SPECS)

    @jax.jit
    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        return jax.grad(lambda up, down: model(x, up, down).sum(), (0, 1))(up, down)

    explanation = jhost.explain(step, X, UP, DOWN, detail=True)
    golden(without_lines(explanation))
    forward, backward = explanation.programs
    assert explanation.streams == (*forward.streams, *backward.streams)
    assert explanation.loops == forward.loops + backward.loops
    assert len(explanation.communications) == 2 + len(backward.communications)


def test_a_program_says_how_often_it_is_run() -> None:
    twice = jhost.explain(lambda x: in_layers(x) + doubled(x).sum(), X)
    assert [each.calls for each in twice.programs] == [4]
    assert "\n  doubled, run 4 times: 1 loop\n" in twice.text
    assert [each.calls for each in jhost.explain(jax.grad(in_layers), X).programs] == [
        3,
        3,
    ]


def test_arguments_of_a_step_may_be_no_arrays() -> None:
    def step(x: jax.Array, how: str, *, train: bool) -> jax.Array:
        return doubled(x) if train and how == "twice" else x

    static = jax.jit(step, static_argnums=1, static_argnames="train")
    for f in (step, static):
        assert jhost.explain(f, X, "twice", train=True).loops == 1
        types = jax.ShapeDtypeStruct(X.shape, X.dtype)
        assert jhost.explain(f, types, "twice", train=True).loops == 1


def left_whole(x: jax.Array) -> jax.Array:
    return jax.freeze(jax.new_ref(jnp.sin(x)))


def test_a_function_that_stays_whole_is_one_that_is_called() -> None:
    whole = jhost.jit(left_whole)

    def outer(x: jax.Array) -> jax.Array:
        return whole(x) + 1

    jitted = jax.jit(outer)
    jitted(X)  # JAX has traced it then, and traces nothing anew
    for f in (outer, jax.jit(outer), jitted):
        (first, *_) = jhost.explain(f, X).notes
        assert first.startswith("left_whole is compiled by jax.jit as a whole")


@pytest.mark.parametrize("f", [jnp.sin, "f"], ids=["a function", "no function"])
def test_what_calls_no_jhost_function_is_refused(f: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"jhost\.explain"):
        jhost.explain(f, X)


# --- Bodies ------------------------------------------------------------------------- #


def layers(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A block, three in a scan, and one in a branch."""

    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return block(x, up, down), None

    x = jax.lax.scan(layer, block(x, up, down), length=3)[0]
    return jax.lax.cond(x[0, 0] > 0, lambda x: block(x, up, down), jnp.negative, x)


def test_what_is_in_bodies_stands_below_their_heads(
    mesh: Mesh, golden: Callable[..., None]
) -> None:
    f = jhost.jit(layers, mesh=mesh, chunks=2, pipeline="collective", **BLOCK_SPECS)
    explanation = jhost.explain(f, X, UP, DOWN, detail=True)
    golden(without_lines(explanation))
    assert len(explanation.streams) == explanation.loops == 3
    scan, *_ = explanation.bodies
    assert scan.name.startswith("in a scan of 3 iterations [test_explain.py:")
    assert len(scan.streams) == scan.loops == 1
    assert [row.times for row in scan.communications] == [3]
    assert set(scan.communications) <= set(explanation.communications)
    assert str(explanation).count("s0 on axis 0") == 3  # each where it is, alone


# --- Names of values ---------------------------------------------------------------- #


def model(state: dict[str, Any], x: jax.Array) -> jax.Array:
    """Each value has a name, but the sum in the last line."""
    h = x @ state["params"]["up"]
    hidden = jnp.tanh(h)
    (a, b) = hidden @ state["params"]["down"], hidden.sum()
    y = jnp.cumsum(
        a,
    )
    return jhost.stream(hidden @ state["params"]["down"], axis=0) + y[0] + b


def step_of(mesh: Mesh) -> tuple[Callable[..., Any], dict[str, Any]]:
    specs = {"params": {"up": P(None, "tp"), "down": P("tp")}}
    f = jhost.jit(
        model, mesh=mesh, in_shardings=(specs, P("tp")), out_shardings=P("tp")
    )
    state = {"params": {"up": UP, "down": DOWN}}
    return lambda state, x: jax.grad(lambda s: f(s, x).sum())(state), state


@pytest.mark.usefixtures("combined_as_on_gpus")
def test_values_of_a_step_have_the_user_s_names(
    mesh: Mesh, golden: Callable[..., None]
) -> None:
    step, state = step_of(mesh)
    golden(without_lines(jhost.explain(step, state, X, detail=True)))


NUMBERED = re.compile(r"\bv(_\d+)+\b|\b[xy]_?\d+\b|_partial|_gathered|_i\b")


def test_no_line_has_the_name_of_a_buffer(mesh: Mesh) -> None:
    step, state = step_of(mesh)
    f = jhost.jit(model, mesh=mesh, in_shardings=(None, P("tp")))
    texts = [jhost.explain(step, state, X), jhost.explain(f, state, X)]

    def scanned(state: Any, x: jax.Array) -> Any:
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state)
        body = jax.checkpoint(lambda x, state: (f(state, x), None))
        return jax.lax.scan(body, x, stacked)[0].sum()

    texts += [jhost.explain(jax.grad(scanned, 1), state, X)]
    texts += [jhost.explain(jax.vmap(step, (None, 0)), state, X[None])]
    for text in texts:
        assert not NUMBERED.search(str(text)), text


def test_dumped_programs_bear_what_jax_derived_in_their_names(mesh: Mesh) -> None:
    step, state = step_of(mesh)
    names = [call.program().name for call in calls_in(step, (state, X), {})]
    assert names == ["model_forward", "model_backward"]
    batched = jax.vmap(step, (None, 0))
    names = [call.program().name for call in calls_in(batched, (state, X[None]), {})]
    assert names == ["model_batched_forward", "model_batched_backward"]


def test_a_jit_with_options_for_the_compiler_is_explained(mesh: Mesh) -> None:
    """JAX traces it by itself alone."""
    step, state = step_of(mesh)
    told = jax.jit(step, compiler_options={"xla_cpu_enable_fast_math": False})
    assert jhost.explain(told, state, X) == jhost.explain(jax.jit(step), state, X)


def test_names_for_messages_are_in_no_text_and_no_fingerprint(mesh: Mesh) -> None:
    step, state = step_of(mesh)
    for call in calls_in(step, (state, X), {}):
        program = call.program()
        other = dataclasses.replace(program, display_names={})
        assert program.display_names
        assert program == other
        assert str(program) == str(other)
        assert fingerprint(program) == fingerprint(other)


def test_what_is_issued_ahead_says_beside_how_much(mesh: Mesh) -> None:
    def layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = jhost.shard(x @ w, P("tp"))
        return jhost.shard(x @ v, P("tp"))

    specs = (P("tp"),) * 3
    f = jhost.jit(layers, mesh=mesh, in_shardings=specs, out_shardings=P("tp"))
    square = jnp.ones((16, 16))
    with sums.moving("collective"):
        first, second = jhost.explain(f, X, square, square).communications
    assert (first.beside, second.beside) == (0, 1)
    assert str(first).endswith("a device, not in a loop")
    assert str(second).endswith("a device, beside 1 matmul")
