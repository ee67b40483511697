"""Streams that nobody marked, where H200s would gain by a loop."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost._call import program as call_program
from jhost.lowering.cost.candidates import Evaluation
from jhost.lowering.cost.choose_schedule import ChooseSchedule, WholePrograms
from jhost.lowering.cost.evaluator import Evaluator
from jhost.lowering.cost.find_streams import FindStreams
from jhost.lowering.cost.rates import Rates, rates_of
from jhost.lowering.cost.sections import Sections
from jhost.lowering.cost.simulate import predict
from jhost.lowering.cost.stream_bounds import StreamBounds
from jhost.lowering.explain import count_loops
from jhost.lowering.ir.bodies import all_marks, all_remarks, programs
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LeftStream, Prediction, Search, StreamReport
from jhost.lowering.ir.requests import StreamDefaults, stream_choices
from jhost.lowering.ir.statements import Communicate, Compute, Scan, UnitEqn, walk
from jhost.lowering.pipeline import Passes, passes, run_passes
from jhost.runtime.devices import devices_of
from jhost.testing import mesh_of
from tests import budget, finding
from tests.lowering.rules.reference_attention import as_with_cudnn
from tests.lowering.traced import built, loops

ROWS, HIDDEN, FFN = 8192, 4096, 14336


def mlp(mark: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Rows over tp outside, features over tp inside."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        x, up = jhost.shard(x, P("tp", None)), jhost.shard(up, P(None, "tp"))
        down = jhost.shard(down, P("tp", None))
        h = jhost.shard(jnp.tanh(mark(x @ up)), P(None, "tp"))
        return jhost.shard(mark(h @ down), P("tp", None))

    return f


def unmarked(x: jax.Array) -> jax.Array:
    return x


def marked(x: jax.Array) -> jax.Array:
    return jhost.stream(x, axis=0)


def types(rows: int = ROWS, hidden: int = HIDDEN, ffn: int = FFN) -> list[Any]:
    shapes = ((rows, hidden), (hidden, ffn), (ffn, hidden))
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def every(rates: Rates | None, **settings: Any) -> Passes:
    return passes(settings=StreamDefaults(**settings), streams=4, rates=rates)


def lowered(
    f: Callable[..., Any], args: Any, kind: str = "NVIDIA H200", **settings: Any
) -> Program:
    program = built(f, *args, tp=2)
    return run_passes(program, every(rates_of(kind), **settings).all)


def h200() -> Rates:
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    return rates


def test_a_block_gets_the_loops_that_it_has_with_marks() -> None:
    found, asked = (lowered(mlp(mark), types()) for mark in (unmarked, marked))
    assert count_loops(found) == count_loops(asked) > 0
    seconds = [predict(program, h200()).total for program in (found, asked)]
    assert seconds[0] <= 1.02 * seconds[1]


def test_a_sum_stands_beside_both_gradients_if_one_is_transposed() -> None:
    """JAX writes the gradients of weights so."""

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.shard(x @ w, P(None, None))

    def f(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> Any:
        x, w = jhost.shard(x, P(None, "tp")), jhost.shard(w, P("tp", None))
        made, pull = jax.vjp(product, x, w)
        return made, pull(cotangent)

    shapes = ((ROWS, FFN), (FFN, HIDDEN), (ROWS, HIDDEN))
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = built(f, *args, tp=4)
    found, plain = (
        predict(run_passes(program, every(h200(), **how).all), h200()).total
        for how in ({}, {"pipeline": "off"})
    )
    assert found < 0.85 * plain


def test_what_was_found_is_said_with_its_lines_and_predictions() -> None:
    reports = [
        remark
        for remark in all_remarks(lowered(mlp(unmarked), types()))
        if isinstance(remark, StreamReport)
    ]
    assert reports
    assert all(report.found and report.predicted for report in reports)
    assert "test_find_streams.py" in reports[0].where


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("marks alone", {"finds": False}),
        ("off", {"pipeline": "off"}),
    ],
)
def test_nothing_is_found_where_it_is_not_to_be(
    how: str, settings: dict[str, Any]
) -> None:
    assert not count_loops(lowered(mlp(unmarked), types(), **settings)), how


@pytest.mark.parametrize("kind", ["cpu", "an unknown kind"])
def test_where_nothing_can_be_hidden_the_program_is_not_looked_at(kind: str) -> None:
    finding = every(rates_of(kind)).finding
    program = built(mlp(unmarked), *types(), tp=2)
    assert finding.apply(program) is program
    assert finding.rates is None


def test_small_products_stay_as_they_are() -> None:
    program = lowered(mlp(unmarked), types(64, 32, 128))
    assert str(program) == str(lowered(mlp(unmarked), types(64, 32, 128), finds=False))


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("cpu", ROWS), ("an unknown kind", ROWS), ("NVIDIA H200", 64)],
)
def test_where_nothing_gains_programs_are_those_without_finding(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, and no candidate is lowered."""
    devices = dataclasses.replace(devices_of(None), kind=kind, count=2)
    monkeypatch.setattr(call_program, "devices_of", lambda mesh: devices)
    evaluate = mock.Mock(side_effect=AssertionError("a candidate is lowered"))
    monkeypatch.setattr(Evaluation, "evaluate", evaluate)

    def text(streams: Any) -> str:
        f = jhost.jit(gradients(unmarked), mesh=mesh_of({"tp": 2}), streams=streams)
        return f.lower(*types(rows, 32, 128)).as_text()

    assert text("auto") == text("marked")


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sizes", [(64, 32, 128), (512, 512, 2048)])
def test_no_candidate_is_lowered_where_the_host_could_not_launch_a_loop(
    sizes: tuple[int, int, int], tp: int
) -> None:
    """Permutes keep the host longer than the devices have work."""
    program = built(gradients(unmarked), *types(*sizes), tp=tp)
    finding, counted = every(h200()).finding, mock.Mock(wraps=FindStreams.laid_out)
    with (
        mock.patch.object(Evaluation, "evaluate") as evaluate,
        mock.patch.object(FindStreams, "laid_out", lambda *args: counted(*args)),
    ):
        finding.apply(program)
    assert not evaluate.called
    assert counted.call_count == 1  # and these layouts are those of the program


def test_a_function_with_a_mark_keeps_to_it() -> None:
    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        x = jhost.stream(x, axis=0, pipeline="off")
        return mlp(unmarked)(x, up, down)

    assert not count_loops(lowered(f, types()))


@pytest.mark.parametrize(("rows", "left"), [(512, 1), (ROWS, 0)])
def test_streams_that_do_not_gain_are_counted(rows: int, left: int) -> None:
    program = lowered(mlp(unmarked), types(rows))
    (search,) = (r for r in all_remarks(program) if isinstance(r, Search))
    assert len(search.left) == left
    assert search.text.startswith(f"{left} more stream")
    assert count_loops(program) == (not left)
    lines = [line for each in search.left for line in each.lines]
    assert all("test_find_streams.py" in line for line in lines)


# --- The same numbers --------------------------------------------------------------- #


def integers(*shape: int) -> np.ndarray:
    generator = np.random.default_rng(sum(shape))
    return generator.integers(-3, 4, shape).astype(np.float32)


def layers(x: jax.Array, weights: Any) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        up, down = w
        return x + jnp.abs(x @ up) @ down, None

    return lax.scan(jax.checkpoint(layer), x, weights)[0]


@budget.first_is_quick("rows", [P(), P("tp"), P(None, "tp")])
def test_found_loops_give_what_the_plain_function_gives(rows: P) -> None:
    def loss(x: jax.Array, weights: Any) -> jax.Array:
        return jnp.sum(layers(x, weights))

    x = integers(8, 4)
    weights = integers(2, 4, 8), integers(2, 8, 4)
    specs = (rows, (P(None, None, "tp"), P(None, "tp", None)))
    plain = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    found = jhost.jit(
        jax.value_and_grad(loss, argnums=(0, 1)),
        mesh=mesh_of({"tp": 2}),
        in_shardings=specs,
    )
    with finding.everywhere():
        assert any(s.found for s in found.lower(x, weights).explain().streams)
        given = found(x, weights)
    jax.tree.map(np.testing.assert_array_equal, given, plain(x, weights))


def test_marks_of_found_streams_stand_in_no_finished_program() -> None:
    finished = lowered(mlp(unmarked), types())
    assert not any(isinstance(mark, StreamChoice) for mark in all_marks(finished))


# --- As good as marks, and never slower than without ----------------------------- #


def gradients(mark: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """A block with one product in the middle, forward and backward."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            y = x + mlp(mark)(x, up, down)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(x, up, down)

    return f


@pytest.mark.parametrize("hidden", [HIDDEN, 2 * HIDDEN])
@pytest.mark.parametrize("rows", [1024, 2 * ROWS])
def test_gradients_are_as_good_as_marked_and_no_slower_than_plain(
    rows: int, hidden: int
) -> None:
    shapes = types(rows, hidden, 3 * hidden)
    programs = (
        lowered(gradients(unmarked), shapes),
        lowered(gradients(marked), shapes),
        lowered(gradients(unmarked), shapes, finds=False),
    )
    found, asked, plain = (predict(program, h200()).total for program in programs)
    assert found <= 1.02 * asked
    assert found <= plain


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=budget.examples(6), deadline=None)
def test_no_found_program_is_predicted_slower_than_the_one_without(data: Any) -> None:
    """The whole program: layers that differ, in a scan or not, and their gradients."""
    draw = data.draw
    rows, hidden = draw(st.sampled_from([512, 4096, 16384])), 2048
    tp, dp = draw(st.sampled_from([(2, 1), (4, 1), (2, 2)]))
    ffns = draw(st.lists(st.sampled_from([512, 4096, 16384]), min_size=1, max_size=3))
    outer = draw(st.sampled_from([P(("dp", "tp")), P("dp"), P("dp", "tp")]))
    stacked = draw(st.sampled_from([1, 4]))
    sharded = draw(st.booleans())

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        up, down = weights
        h = jhost.shard(jnp.tanh(x @ up), P("dp", "tp"))
        return jhost.shard(x + h @ down, outer), None

    def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
        over = "dp" if sharded else None
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            up = jhost.shard(up, P(None, over, "tp"))
            down = jhost.shard(down, P(None, "tp", over))
            x = lax.scan(block, x, (up, down))[0]
        return jnp.sum(x.astype(jnp.float32) ** 2)

    pairs = [((stacked, hidden, n), (stacked, n, hidden)) for n in ffns]
    shapes = [(rows, hidden), *(shape for pair in pairs for shape in pair)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    every_gradient = jax.grad(loss, argnums=tuple(range(len(args))))
    f = draw(st.sampled_from([loss, every_gradient]))
    program = built(f, *args, dp=dp, tp=tp)
    settings: tuple[dict[str, Any], ...] = {}, {"finds": False}, {"pipeline": "off"}
    made = [every(h200(), **how) for how in settings]
    found, plain, written = (
        predict(run_passes(program, each.all), h200()).total for each in made
    )
    assert made[1].finding.whole.at_least(program) <= plain
    assert found <= plain
    # At most a program in order is kept that takes 0.5 % more than as in `jax.jit`.
    assert plain <= written / 0.995


def test_rows_move_in_chunks_where_fewer_bytes_of_a_weight_would_move() -> None:
    """As of nvFuser's gathered product, whose weight has fewer bytes than its rows."""

    def product(mark: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
        def f(x: jax.Array, w: jax.Array) -> jax.Array:
            y = mark(jhost.shard(x, P("tp", None)) @ jhost.shard(w, P(None, "tp")))
            return jhost.shard(y, P(None, "tp"))

        return f

    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in [(32768, 32768), (32768, 8192)]
    ]
    found, asked = (
        predict(lowered(product(mark), shapes), h200()).total
        for mark in (unmarked, marked)
    )
    assert found <= 1.02 * asked


# --- Layers that are written out --------------------------------------------------- #


def written(
    mark: Callable[[jax.Array], jax.Array], backward: bool
) -> Callable[..., Any]:
    """Three layers, and a wide product behind them."""

    def loss(x: jax.Array, up: jax.Array, down: jax.Array, wide: jax.Array) -> Any:
        for _ in range(3):
            x = x + mlp(mark)(x, up, down)
        wide = jhost.shard(wide, P(None, "tp"))
        logits = jhost.shard(mark(x @ wide), P(None, "tp"))
        return jnp.sum(logits.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2, 3)) if backward else loss


def written_types() -> list[Any]:
    wide = jax.ShapeDtypeStruct((HIDDEN, 4 * FFN), jnp.bfloat16)
    return [*types(2 * ROWS), wide]


def convolutions(x: jax.Array, *kernels: jax.Array) -> Any:
    """The gradients of 3x3 convolutions and norms, as a U-Net has them.

    No two have the same channels, so there is no row of layers.
    """

    def norm(x: jax.Array) -> jax.Array:
        groups = x.reshape(*x.shape[:3], 32, -1)
        groups -= groups.mean((1, 2, 4), keepdims=True)
        groups *= lax.rsqrt(groups.var((1, 2, 4), keepdims=True) + 1e-5)
        return jax.nn.silu(groups.reshape(x.shape))

    def loss(kernels: Any) -> jax.Array:
        y = jhost.shard(x, P("data"))
        for kernel in kernels:
            kernel = jhost.shard(kernel, P(None, None, None, "tp"))
            y = lax.conv_general_dilated(
                norm(y), kernel, (1, 1), "SAME", dimension_numbers=NHWC
            )
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(loss)(kernels)


NHWC = ("NHWC", "HWIO", "NHWC")


def loops_lowered(count: int) -> int:
    """How many loops are weighed for so many convolutions."""
    channels = [1280 + 64 * n for n in range(count + 1)]
    shapes = [(16, 32, 32, 1280), *((3, 3, *io) for io in itertools.pairwise(channels))]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program, seen = built(convolutions, *args, data=2, tp=2), list[StreamChoice]()
    evaluate = Evaluator.evaluate

    def counted(self: Evaluator, candidate: StreamChoice) -> Any:
        seen.append(candidate)
        return evaluate(self, candidate)

    with mock.patch.object(Evaluator, "evaluate", counted):
        every(h200()).finding.apply(program)
    return sum(not candidate.unpipelined for candidate in seen)


def test_as_many_loops_are_lowered_for_twice_the_layers() -> None:
    """Each is lowered with the whole program around it."""
    assert 0 < loops_lowered(6) <= loops_lowered(3)


@pytest.mark.parametrize("backward", [False, True])
def test_layers_written_out_are_weighed_apart_from_what_is_around_them(
    backward: bool,
) -> None:
    program = built(written(unmarked, backward), *written_types(), tp=2)
    finding = every(h200()).finding
    bounds = StreamBounds(h200(), finding.transfers.can_hide)
    (streams,) = bounds.streams(finding.laid_out(program))
    counts = [sorted({len(group) for group in s.marks}) for s in streams]
    # Rows of the layers forward, and of those backward; the wide product is by itself.
    assert counts == [[3]] * (1 + backward) + [[1]]


@pytest.mark.parametrize("backward", [False, True])
def test_layers_written_out_are_as_good_as_marked(backward: bool) -> None:
    shapes = written_types()
    programs = (
        lowered(written(unmarked, backward), shapes),
        lowered(written(marked, backward), shapes),
        lowered(written(unmarked, backward), shapes, finds=False),
    )
    found, asked, plain = (predict(program, h200()).total for program in programs)
    assert found <= 1.02 * asked
    assert found <= plain


@pytest.mark.parametrize(
    ("mark", "backward"), [(marked, False), (unmarked, False), (unmarked, True)]
)
def test_no_loop_is_without_a_contraction(
    mark: Callable[[jax.Array], jax.Array], backward: bool
) -> None:
    """As over the largest logits, which the loop would write once more."""

    def loss(x: jax.Array, up: jax.Array, down: jax.Array, wide: jax.Array) -> Any:
        x = x + mlp(mark)(x, up, down)
        logits = jhost.shard(mark(x @ wide).astype(jnp.float32), P(None, "tp"))
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1))

    f = jax.grad(loss, argnums=(0, 1, 2, 3)) if backward else loss
    looped = loops(lowered(f, written_types()))
    assert looped
    assert all(any(map(has_contraction, loop.body)) for loop in looped)


def test_a_layer_of_a_program_that_is_laid_out_begins_behind_the_one_before() -> None:
    """Also where each layer has transfers and waits for them."""
    program = built(written(unmarked, backward=False), *written_types(), tp=2)
    finding = every(h200()).finding
    laid_out = finding.laid_out(program)
    ((row, _),) = StreamBounds(h200(), finding.transfers.can_hide).streams(laid_out)
    alike, count = row.marks[0], len(laid_out.marks)
    numbers, marks = range(count, count + 3), (*laid_out.marks, *alike)
    sections = Sections(dataclasses.replace(laid_out, marks=marks), [numbers])
    section = sections.holding(numbers, marks).program
    contractions = [stmt for stmt in section.body if has_contraction(stmt)]
    made = [stmt.outs[0].name for stmt in contractions if isinstance(stmt, Compute)]
    assert len(made) == 2
    assert made[-1] == alike[1].buffer


def test_streams_that_lose_in_the_whole_program_are_left() -> None:
    """As where other work hides the same transfers, of which a layer knows nothing."""
    program = built(gradients(unmarked), *types(2 * ROWS), tp=2)
    searching = every(h200()).finding
    assert any(map(stream_choices, programs(searching.apply(program))))
    slower = [Prediction(total=2e-3), Prediction(total=1e-3)]
    with (
        mock.patch.object(WholePrograms, "predicted", side_effect=slower),
        mock.patch.object(ChooseSchedule, "at_least", return_value=0.0),
    ):
        left = every(h200()).finding.apply(program)
    assert dataclasses.replace(left, remarks=program.remarks) == program
    (search,) = (r for r in left.remarks if isinstance(r, Search))
    assert search.left
    assert all(times[0] < times[1] for times in map(_seconds_of, search.left))


def test_a_clear_gain_needs_no_order_for_the_program_without() -> None:
    program = built(gradients(unmarked), *types(2 * ROWS), tp=2)
    predicted = mock.Mock(return_value=Prediction(total=1e-6))
    with mock.patch.object(WholePrograms, "predicted", predicted):
        found = every(h200()).finding.apply(program)
    assert any(map(stream_choices, programs(found)))
    assert predicted.call_count == 1  # of the program with loops


def test_layers_written_out_need_no_order_for_the_program_without() -> None:
    """What their transfers wait for says enough of how long the layers take."""
    program = built(written(unmarked, backward=False), *written_types(), tp=2)
    predicted = mock.patch.object(
        WholePrograms, "predicted", autospec=True, side_effect=WholePrograms.predicted
    )
    with predicted as each:
        found = every(h200()).finding.apply(program)
    assert any(map(stream_choices, programs(found)))
    assert each.call_count == 1


def _seconds_of(stream: LeftStream) -> list[float]:
    return [seconds for _, seconds in stream.predicted]


def weights_ahead(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Each layer's weight is sharded, and long there before it is read."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jhost.shard(jnp.tanh(x @ w), P("tp", None)), None

    x = jhost.shard(x, P("tp", None))
    return lax.scan(layer, x, jhost.shard(weights, P(None, "tp", None)))[0]


def attending(causal: bool) -> Callable[..., jax.Array]:
    """Heads over tp; rows over tp before and behind."""

    def f(x: jax.Array, *weights: jax.Array) -> jax.Array:
        x, *into = jhost.shard(x, P(None, "tp", None)), *weights[:3]
        out = jhost.shard(weights[3], P("tp", None))

        def heads(weight: jax.Array) -> jax.Array:
            laid = jhost.shard(x @ jhost.shard(weight, P(None, "tp")), features)
            return jnp.reshape(laid, (*x.shape[:2], -1, 128))

        features = P(None, None, "tp")
        queries, keys, values = map(heads, into)
        mixed = jax.nn.dot_product_attention(
            queries, keys, values, is_causal=causal, implementation="cudnn"
        )
        mixed = jnp.reshape(mixed, (*x.shape[:2], -1))
        return jhost.shard(mixed @ out, P(None, "tp", None))

    return f


@pytest.mark.parametrize("causal", [False, True])
def test_causal_attention_stays_whole_between_found_loops(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_with_cudnn(monkeypatch)
    shapes = (8, 2048, HIDDEN), *[(HIDDEN, HIDDEN)] * 4
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = lowered(attending(causal), types)
    assert count_loops(program)
    kernels = [
        stmt
        for stmt in walk(program.body)
        if isinstance(stmt, Compute) and any(map(_attends, stmt.unit.eqns))
    ]
    assert all((stmt.chunk is None) == causal for stmt in kernels)


def ring(mark: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Causal attention of a sequence over tp, between products of whole weights."""

    def f(x: jax.Array, *weights: jax.Array) -> jax.Array:
        x = jhost.shard(x, P(None, "tp", None))
        *into, out = (jhost.shard(weight, P(None, None)) for weight in weights)

        def heads(weight: jax.Array) -> jax.Array:
            return jnp.reshape(x @ weight, (*x.shape[:2], -1, 128))

        queries, keys, values = map(heads, into)
        mixed = jax.nn.dot_product_attention(
            queries, mark(keys), values, is_causal=True, implementation="cudnn"
        )
        mixed = jnp.reshape(mixed, x.shape)
        return jhost.shard(x + mixed @ out, P(None, "tp", None))

    return f


def test_keys_of_a_sequence_over_an_axis_go_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their gathers have work beside them; the last device has most of the mask's."""
    as_with_cudnn(monkeypatch)
    shared, whole = (HIDDEN, HIDDEN // 4), (HIDDEN, HIDDEN)
    shapes = (1, 65536, HIDDEN), whole, shared, shared, whole
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    found, asked, off = (
        predict(lowered(ring(mark), types, **how), h200()).total
        for mark, how in (
            (unmarked, {}),
            (lambda keys: jhost.stream(keys, axis=1), {}),
            (unmarked, {"pipeline": "off"}),
        )
    )
    assert found <= 1.02 * asked
    assert found < 0.9 * off


def _attends(unit_eqn: UnitEqn) -> bool:
    return "attention" in unit_eqn.eqn.primitive.name


def test_weights_that_can_be_gathered_ahead_are_in_no_stream() -> None:
    shapes = ((4 * ROWS, HIDDEN), (4, HIDDEN, HIDDEN))
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = built(weights_ahead, *args, tp=2)
    passes = every(h200())
    laid_out = passes.finding.laid_out(program)
    (body,) = (stmt.body for stmt in laid_out.body if isinstance(stmt, Scan))
    assert any(isinstance(stmt, Communicate) for stmt in body.body)
    found = passes.finding.apply(program)
    assert dataclasses.replace(found, remarks=program.remarks) == program
