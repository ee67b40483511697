"""P2P pipelines of all-to-alls: a part goes while the one before it is worked on.

Tokens `[g, e, c, m]` that are sharded along g go to experts that are sharded along e,
and come back.  All numbers are small integers, so everything is equal exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import jhost
from jhost.errors import ChunksError, JhostError, PipelineError
from jhost.lowering.ir.index import Index, LoopIndex, Rank, evaluate
from jhost.lowering.ir.remarks import Note, StreamReport
from jhost.lowering.ir.statements import Communicate, Select
from tests import budget
from tests.jhost.derived import backward, vjp
from tests.lowering.on_mesh import (
    calls,
    communications,
    every_size,
    exact,
    on,
    on_streams,
    program_of,
    tp,
)
from tests.lowering.traced import array, loops, remarks, work

Golden = Callable[..., None]
Array = jax.Array

SPECS = (P("tp"),) * 3, P("tp")
PERMUTE = "CollectivePermute"


def exchanged(x: Array) -> Array:
    return jhost.shard(x, P(None, "tp"))


def experts(x: Array, up: Array, down: Array, *, chunks: int | None = None) -> Array:
    """Tokens `[g, e, c, m]`; experts `[e, m, f]`, and `[e, f, m]`."""
    h = jnp.maximum(jnp.einsum("gecm,emf->gecf", exchanged(x), up), 0)
    y = jnp.einsum("gecf,efm->gecm", h, down)
    return jhost.stream(y, 0, pipeline="p2p", chunks=chunks)


def tokens(groups: int, of: int = 8, dtype: Any = jnp.float32) -> tuple[Array, ...]:
    """Tokens in so many groups, and the weights of so many experts."""
    shapes = (groups, of, 2, 3), (of, 3, 16), (of, 16, 3)
    made = [array(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return tuple(each.astype(dtype) for each in made)


# --- What moves, and where ---------------------------------------------------------- #


@pytest.mark.parametrize("chunks", [4, 8])
def test_tokens_go_to_experts_and_back(chunks: int, golden: Golden) -> None:
    """The device's own part first, and the first half of it before the loop."""
    program = exact(experts, *tokens(8), **tp(4, *SPECS, chunks=chunks))
    assert communications(program) == [f"{PERMUTE} tp"] * 2
    golden(str(program))


@every_size
def test_at_step_k_the_part_for_rank_r_plus_k_is_worked_on(devices: int) -> None:
    """Who sends to whom, and which experts: the receiver's, and then the sender's."""
    program = program_of(experts, *tokens(devices), **tp(devices, *SPECS))
    (loop,) = loops(program)
    there, back = [s for s in loop.body if isinstance(s, Communicate)]
    parts = [s for s in loop.body if isinstance(s, Select) and s.dim == 1]
    sent, placed = (part.index for part in parts)
    assert there.shift is not None
    assert back.shift is not None
    each = 8 // devices
    for i in range(loop.extent):
        for rank in range(devices):
            at: dict[Index, int] = {LoopIndex(loop.index): i, Rank("tp"): rank}
            receiver = (rank + evaluate(there.shift, at)) % devices
            assert (receiver + i + 1) % devices == rank
            assert evaluate(sent, at) == receiver * each
            sender = (rank - evaluate(back.shift, at)) % devices
            assert (sender + i + 1) % devices == rank
            assert evaluate(placed, at) == sender * each


@every_size
def test_as_many_bytes_move_as_by_all_to_alls(devices: int) -> None:
    """To each of the others its part, there and back: nothing is sent twice."""
    program = program_of(experts, *tokens(2 * devices), **tp(devices, *SPECS))
    part = f"ppermute 2x{8 // devices}x2x3"
    assert calls(program, "ppermute") == {part: 2 * (devices - 1)}


def test_nothing_is_added() -> None:
    program = program_of(experts, *tokens(8), **tp(4, *SPECS))
    assert "add" not in work(program.body)
    assert "terms" not in str(program)


# --- Equal to the plain function ---------------------------------------------------- #


@pytest.mark.parametrize(
    ("devices", "groups", "pieces"),
    [(4, 1, 1), (4, 5, 3), (2, 5, 1), (2, 5, 3), (8, 5, 3)],
)
def test_groups_in_pieces(devices: int, groups: int, pieces: int) -> None:
    """So many groups a device; the last piece may be smaller."""
    how = tp(devices, *SPECS, chunks=pieces * devices)
    program = exact(experts, *tokens(groups * devices), **how)
    (loop,) = [loop for loop in loops(program) if PERMUTE in work(loop.body)]
    assert loop.extent == (devices - 1) * -(-groups // -(-groups // pieces))


@pytest.mark.parametrize("groups", [5, 7])
def test_groups_that_the_devices_do_not_divide(groups: int) -> None:
    def f(x: Array, up: Array, down: Array) -> Array:
        return jhost.shard(experts(jhost.shard(x, P("tp")), up, down), P("tp"))

    specs = (P(), P("tp"), P("tp")), P()
    program = exact(f, *tokens(groups), **tp(4, *specs))
    assert communications(program)[:2] == [f"{PERMUTE} tp"] * 2


@budget.first_is_quick("dtype", [jnp.int32, jnp.bfloat16, jnp.float16])
def test_other_types(dtype: Any) -> None:
    args = tokens(8, dtype=dtype)
    exact(experts, *map(np.sign, args), **tp(4, *SPECS))


def test_no_number_reaches_only_its_own_group_and_expert() -> None:
    """A slot that nobody wrote, or one that two wrote, would show."""
    x, *weights = tokens(8)
    x[3, 5] = np.nan
    given = jhost.jit(experts, **tp(4, *SPECS))(x, weights[0], weights[1])
    lost = np.isnan(np.asarray(given)).any((2, 3))
    assert lost[3, 5]
    assert lost.sum() == 1


def test_no_tokens() -> None:
    """Experts without room; JAX 0.10 cannot read an empty array that is sharded."""
    x, up, down = tokens(8)
    given = jhost.jit(experts, **tp(4, *SPECS))(x[:, :, :0], up, down)
    assert (given.shape, given.dtype) == ((8, 8, 0, 3), x.dtype)


# --- One way only ------------------------------------------------------------------- #


def test_there_alone() -> None:
    """The own part comes first, where what comes is worked on."""

    def f(x: Array, up: Array) -> Array:
        y = jnp.einsum("gecm,emf->gecf", exchanged(x), up)
        return jhost.stream(y, 0, pipeline="p2p")

    x, up, _ = tokens(8)
    program = exact(f, x, up, **tp(4, (P("tp"), P("tp")), P(None, "tp")))
    assert work(program.body)[0] == "Set"
    (loop,) = loops(program)
    assert work(loop.body) == [PERMUTE, "dot_general", "transpose"]


def test_back_alone() -> None:
    """The own part comes last, where it hides the last send."""

    def f(h: Array, down: Array) -> Array:
        y = jnp.einsum("gecf,efm->gecm", h, down)
        return jhost.stream(y, 0, pipeline="p2p")

    specs = (P(None, "tp"), P("tp")), P("tp")
    program = exact(f, array(8, 8, 2, 16), tokens(8)[2], **tp(4, *specs))
    assert work(program.body) == [
        f"loop(dot_general, transpose, {PERMUTE})",
        *["dot_general", "transpose", "Set"],
    ]


@pytest.mark.parametrize("axis", [0, 1])
def test_either_of_the_dims_may_be_streamed(axis: int) -> None:
    """Along the groups for what follows, along the experts for what comes before."""

    def f(x: Array) -> Array:
        return jhost.stream(exchanged(x * 2), axis, pipeline="p2p") + 1

    program = exact(f, tokens(8)[0], **tp(4, P("tp"), P(None, "tp")))
    (loop,) = loops(program)
    first, *_, last = work(loop.body)
    assert (first if axis == 0 else last) == PERMUTE


def test_an_exchange_alone_is_a_loop_where_it_is_asked_for() -> None:
    settings = tp(4, P("tp"), P(None, "tp"))
    program = exact(
        lambda x: jhost.stream(x, 0, pipeline="p2p"), array(8, 8), **settings
    )
    (loop,) = loops(program)
    assert work(loop.body) == [PERMUTE]


# --- Beside other moves ------------------------------------------------------------- #


@pytest.mark.parametrize("chunks", [4, 8])
def test_what_came_back_is_gathered_piece_by_piece(chunks: int) -> None:
    def f(x: Array, up: Array, down: Array) -> Array:
        return jhost.shard(jhost.shard(experts(x, up, down), P("tp")), P())

    program = exact(f, *tokens(8), **tp(4, SPECS[0], P(), chunks=chunks))
    assert set(communications(program)) == {f"{PERMUTE} tp"}


@budget.first_is_quick("chunks", [4, 8])
def test_sums_go_on_to_experts(chunks: int) -> None:
    """Reduced and scattered over the groups, and then exchanged."""

    def f(x: Array, w: Array, up: Array) -> Array:
        y = jhost.shard(jnp.einsum("gecm,mn->gecn", x, w), P("tp"))
        y = jhost.stream(y, 0, pipeline="p2p")
        return jnp.einsum("gecm,emf->gecf", exchanged(y), up)

    x, up, _ = tokens(8)
    w, specs = array(8, 3, seed=5), (P(None, None, None, "tp"), P("tp"), P("tp"))
    x = np.concatenate([x, x, x[..., :2]], axis=3)
    program = exact(f, x, w, up, **tp(4, specs, P(None, "tp"), chunks=chunks))
    assert set(communications(program)) == {f"{PERMUTE} tp"}


@pytest.mark.parametrize(
    ("groups", "expert"), [("ep", "ep"), (("dp", "ep"), "ep"), ("dp", ("dp", "ep"))]
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_two_axes(groups: Any, expert: Any, pieces: int) -> None:
    """Experts along one axis or both, beside groups of data parallelism."""

    def f(x: Array, up: Array, down: Array) -> Array:
        there = jhost.shard(x, P("dp" if groups == ("dp", "ep") else None, expert))
        h = jnp.maximum(jnp.einsum("gecm,emf->gecf", there, up), 0)
        y = jnp.einsum("gecf,efm->gecm", h, down)
        return jhost.stream(y, 0, pipeline="p2p", chunks=2 * pieces)

    specs = (P(groups), P(expert), P(expert)), P(groups)
    program = exact(f, *tokens(8), **on({"dp": 2, "ep": 2}, *specs))
    assert any(PERMUTE in work(loop.body) for loop in loops(program))


# --- Backward ----------------------------------------------------------------------- #


@pytest.mark.parametrize(("devices", "pieces"), [(4, 1), (4, 2), (2, 2), (8, 1)])
def test_the_backward_is_pipelined_as_well(devices: int, pieces: int) -> None:
    """The cotangent goes to the experts and that of the tokens comes back, in a loop.

    In it are the gradients of the weights, each a sum over the groups.
    """
    args = tokens(2 * devices)
    settings = tp(devices, *SPECS, chunks=pieces * devices)
    f = jhost.jit(experts, **settings)
    results = vjp(f)(args[0], *args)
    chex.assert_trees_all_equal(results, jax.jit(vjp(experts))(args[0], *args))
    forward, back = backward(f, *args)
    assert communications(forward) == [f"{PERMUTE} tp"] * 2
    assert set(communications(back)) == {f"{PERMUTE} tp"}
    (loop,) = [loop for loop in loops(back) if PERMUTE in work(loop.body)]
    done = work(loop.body)
    assert done.count("dot_general") >= 4
    # The tokens' cotangent goes back beside the sums for the weights.
    assert done[-3:] == [PERMUTE, "dot_general", "dot_general"]


@every_size
def test_gradients_of_bfloat16_weights_add_in_float32(devices: int) -> None:
    """1 and 2**-8 each: a bfloat16 sum would stay at 1."""
    groups = 2 * devices
    x: Any = np.full((groups, 8, 1, 2), 2.0**-8, jnp.bfloat16)
    x[0] = 1
    up: Any = np.ones((8, 2, 16), x.dtype)
    down: Any = np.ones((8, 16, 2), x.dtype)

    def loss(up: Array) -> Array:
        return jnp.sum(jhost.jit(experts, **tp(devices, *SPECS))(x, up, down))

    wanted = 2 * (1 + (groups - 1) * 2.0**-8)
    given = np.asarray(jax.grad(loss)(up))
    np.testing.assert_array_equal(given, np.full_like(given, wanted))


@budget.first_is_quick("how", ["checkpoint", "vmap", "scan", "twice"])
def test_transforms(how: str) -> None:
    x, up, down = tokens(4, of=4)
    jitted = jhost.jit(experts, **tp(4, *SPECS, compiler_options=None))

    def loss(f: Any, x: Array) -> Array:
        match how:
            case "checkpoint":
                return jnp.sum(jax.checkpoint(f)(x, up, down) ** 2)
            case "scan":
                return jnp.sum(
                    jax.lax.scan(lambda c, _: (f(c, up, down), None), x, length=2)[0]
                )
            case _:
                return jnp.sum(f(x, up, down) ** 2)

    def derived(f: Any) -> Any:
        gradient = jax.grad(lambda x: loss(f, x))
        match how:
            case "vmap":
                return jax.vmap(gradient)(np.stack([x, x + 1]))
            case "twice":
                return jax.grad(lambda x: jnp.sum(gradient(x)[..., :1]))(x)
            case _:
                return gradient(x)

    wanted = jax.jit(lambda: derived(experts))()
    np.testing.assert_array_equal(derived(jitted), wanted)


# --- Any shapes --------------------------------------------------------------------- #


@st.composite
def drawn_exchanges(draw: st.DrawFn) -> dict[str, Any]:
    """Two dims that trade places among others, one of them streamed, in pieces."""
    devices = draw(st.sampled_from([2, 4]))
    rank = draw(st.integers(2, 4))
    here, there = draw(st.permutations(range(rank)))[:2]
    shape = [draw(st.integers(1, 3)) for _ in range(rank)]
    for dim in (here, there):
        shape[dim] = devices * draw(st.integers(1, 5))
    axis = draw(st.sampled_from([here, there]))
    return {
        "devices": devices,
        "shape": shape,
        "dims": (here, there),
        "axis": axis,
        "pieces": draw(st.integers(1, shape[axis] // devices)),
        "back": draw(st.booleans()),
        "streams": draw(st.integers(1, 5)),
    }


@settings(max_examples=budget.examples(6))  # each is compiled twice
@given(drawn_exchanges())
def test_any_shapes(drawn: dict[str, Any]) -> None:
    rank, (here, there) = len(drawn["shape"]), drawn["dims"]
    along = [
        P(*("tp" if dim == d else None for d in range(rank))) for dim in (here, there)
    ]

    def f(x: Array) -> Array:
        count = jnp.arange(x.shape[drawn["axis"]], dtype=x.dtype)
        shape = [1] * rank
        shape[drawn["axis"]] = -1
        y = jhost.shard(x * 2, along[0]) + count.reshape(shape)
        y = jhost.stream(jhost.shard(y, along[1]) * 3, drawn["axis"])
        return y - 1

    chunks = drawn["pieces"] * drawn["devices"]
    how = {"pipeline": "p2p", "chunks": chunks}
    out = along[0] if drawn["back"] else along[1]
    x = array(*drawn["shape"]).astype(jnp.int32)
    with on_streams(drawn["streams"]):
        program = exact(f, x, **tp(drawn["devices"], along[0], out, **how))
    assert "AllToAll" not in str(program)


# --- What is refused ---------------------------------------------------------------- #


def refused(fun: Callable[..., Array], *args: Any, **settings: Any) -> JhostError:
    with pytest.raises(JhostError) as error:
        program_of(fun, *args, **settings)
    assert "test_p2p_all_to_all.py" in str(error.value)
    return error.value


def test_a_dim_that_the_exchange_leaves_alone_is_refused() -> None:
    def f(x: Array) -> Array:
        return jhost.stream(exchanged(x * 2), 2, pipeline="p2p") + 1

    error = refused(f, array(8, 8, 8), **tp(4, P("tp"), P(None, "tp")))
    assert isinstance(error, PipelineError)
    assert "no gather, reduce-scatter or all-to-all moves the dim" in str(error)


@pytest.mark.parametrize("chunks", [2, 6])
def test_a_count_that_is_no_multiple_of_the_devices_is_refused(chunks: int) -> None:
    cut = functools.partial(experts, chunks=chunks)
    error = refused(cut, *tokens(8), **tp(4, *SPECS))
    assert isinstance(error, ChunksError)
    assert "needs a multiple of 4 chunks: " in str(error)


def test_more_pieces_than_groups_of_a_device_are_a_wish_that_is_not_met() -> None:
    program = program_of(experts, *tokens(8), **tp(4, *SPECS, chunks=16))
    said = [note.text for note in remarks(program, Note)]
    assert any("where a device has 2 steps" in text for text in said)
    (report,) = remarks(program, StreamReport)
    assert (report.pipeline, report.chunks) == ("p2p", 4)


def test_an_exchange_over_two_axes_is_one_pipeline() -> None:
    """Groups over two axes that both go to experts."""
    axes = ("dp", "ep")
    specs = P(axes), P(None, axes)
    program = exact(
        lambda x: jhost.stream(x * 2, 0, pipeline="p2p") + 1,
        array(8, 8),
        **on({"dp": 2, "ep": 2}, *specs),
    )
    assert {text.split()[0] for text in communications(program)} == {PERMUTE}
