"""Loops whose chunks read a few elements of the chunks beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.errors import PipelineError
from jhost.lowering.explain import count_loops
from jhost.lowering.ir.statements import Communicate
from tests import budget, finding
from tests.jhost.derived import backward
from tests.lowering.loops.any_way import INS, Way, ways
from tests.lowering.on_mesh import every_size, exact, on, program_of, tp
from tests.lowering.traced import array, loops, notes, work

Array: TypeAlias = jax.Array
Mix: TypeAlias = Callable[[Array, Array], Array]

SPECS = INS, P("tp")


def convolution(before: int, after: int, dilation: int = 1) -> Mix:
    """Each feature by itself: a row sees so many rows before it, and after it."""

    def mix(x: Array, taps: Array) -> Array:
        return lax.conv_general_dilated(
            x[None],
            taps[: (before + after) // dilation + 1, None],
            window_strides=(1,),
            padding=[(before, after)],
            rhs_dilation=(dilation,),
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=x.shape[1],
        )[0]

    return mix


def joined(before: int, after: int) -> Mix:
    """A convolution of rows with zeros before them, and behind them."""

    def mix(x: Array, taps: Array) -> Array:
        ends = (jnp.zeros((1, count, x.shape[1])) for count in (before, after))
        wide = jnp.concatenate([next(ends), x[None], next(ends)], 1)
        return lax.conv_general_dilated(
            wide,
            taps[: before + after + 1, None],
            window_strides=(1,),
            padding="VALID",
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=x.shape[1],
        )[0]

    return mix


def shifts(before: int, after: int) -> Mix:
    """A convolution written out, with a shift of all rows for each tap."""

    def mix(x: Array, taps: Array) -> Array:
        def shifted(n: int) -> Array:
            return jnp.pad(x, ((before, after), (0, 0)))[n : n + len(x)]

        each = (tap * shifted(n) for n, tap in enumerate(taps[: before + after + 1]))
        return sum(each, jnp.zeros_like(x))

    return mix


def slices(before: int, after: int) -> Mix:
    """A convolution written out, of slices of what is padded once."""

    def mix(x: Array, taps: Array) -> Array:
        padded = jnp.pad(x, ((before, after), (0, 0)))
        rows = [padded[n : n + len(x)] for n in range(before + after + 1)]
        each = (tap * row for tap, row in zip(taps, rows, strict=False))
        return sum(each, jnp.zeros_like(x))

    return mix


def pooling(before: int, after: int) -> Mix:
    def mix(x: Array, taps: Array) -> Array:
        window, pads = (before + after + 1, 1), [(before, after), (0, 0)]
        return lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 1), pads) * taps[0]

    return mix


causal = convolution(2, 0)


def block(mix: Mix, **mark: Any) -> Callable[..., Array]:
    """A product, a mix of neighbouring rows, a gate, and a product."""

    def f(x: Array, up: Array, taps: Array, down: Array) -> Array:
        hidden = x @ up
        return jhost.stream(mix(hidden, taps) * hidden @ down, 0, **mark)

    return f


def operands(rows: int, taps: int = 9, width: int = 8) -> tuple[Array, ...]:
    shapes = (rows, 4), (4, width), (taps, width), (width, 4)
    return tuple(array(*shape, seed=seed) for seed, shape in enumerate(shapes))


def weighted(f: Callable[..., Array]) -> Callable[..., Array]:
    """A loss whose cotangents differ from row to row, and are small integers."""

    def loss(x: Array, *weights: Array) -> Array:
        y = f(x, *weights)
        return jnp.sum(y * jhost.shard(x[:, :1] % 3, P("tp")))

    return loss


def gradients(f: Callable[..., Array]) -> Callable[..., Any]:
    return jax.grad(weighted(f), (0, 1, 2, 3))


# --- What is in one loop ------------------------------------------------------------ #


@every_size
@pytest.mark.parametrize(
    "mix",
    [causal, convolution(0, 2), shifts(2, 0), joined(2, 0)],
    ids=["before", "after", "shifts", "joined"],
)
def test_a_window_to_one_side_is_in_the_loop_of_both_products(
    devices: int, mix: Mix
) -> None:
    program = exact(
        block(mix, pipeline="p2p"), *operands(8 * devices), **tp(devices, *SPECS)
    )
    (loop,) = loops(program)
    words = work(loop.body)
    assert words[0] == words[-1] == "CollectivePermute"
    assert words.count("dot_general") == 2
    assert {"conv_general_dilated", "pad"} & {*words}
    assert not notes(program, "streams stop")


@pytest.mark.parametrize("mix", [causal, shifts(2, 0)], ids=["convolution", "shifts"])
def test_a_backward_takes_the_steps_the_other_way_round(mix: Mix) -> None:
    """A row's cotangent comes of the rows behind it."""
    f, args = block(mix, pipeline="p2p"), operands(32)
    exact(gradients(f), *args, **tp(4, INS, INS))
    forward, back = backward(jhost.jit(f, **tp(4, *SPECS)), *args)
    for program, products in (forward, 2), (back, 4):
        (loop,) = loops(program)
        assert work(loop.body).count("dot_general") == products
        assert "window" in work(loop.body)


def twice(x: Array, taps: Array) -> Array:
    return causal(causal(x, taps), taps)


def differences(x: Array, taps: Array) -> Array:
    """A window of windows of it: what is shorter is padded again.

    One row less is still sharded as all rows are, with one of padding.
    """
    return jnp.pad(x[1:] - x[:-1], ((1, 0), (0, 0))) * taps[0]


@every_size
@pytest.mark.parametrize(
    "mix",
    [convolution(1, 1), twice, differences],
    ids=["both sides", "twice", "differences"],
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_all_windows_are_in_the_loop_of_both_products(
    devices: int, mix: Mix, pieces: int
) -> None:
    """Its first and last turns, with less to do, stand around the others."""
    f = block(mix, pipeline="p2p", chunks=devices * pieces)
    program = exact(f, *operands(12 * devices), **tp(devices, *SPECS))
    assert count_loops(program) == 1
    assert not notes(program, "streams stop")
    in_loops = [word for loop in loops(program) for word in work(loop.body)]
    assert "CollectivePermute" in in_loops
    outside = [stmt for stmt in program.body if isinstance(stmt, Communicate)]
    assert not outside


def test_windows_of_a_remat_backward_are_in_one_loop() -> None:
    """The forward's windows read one way, and those of cotangents the other."""
    f, args = jax.checkpoint(block(causal, pipeline="p2p")), operands(32)
    exact(gradients(f), *args, **tp(4, INS, INS))
    _, back = backward(jhost.jit(f, **tp(4, *SPECS)), *args)
    assert count_loops(back) == 1


@pytest.mark.parametrize(
    ("mix", "rows", "chunks", "why"),
    [
        (convolution(5, 0), 16, None, "not only of those beside it"),
        (causal, 32, 16, None),
        (convolution(3, 0), 32, 16, "not only of those beside it"),
        (causal, 28, 8, "and pieces of a shard differ in size"),
        (lambda x, taps: x[::-1] * taps[0], 32, None, "in reverse"),
        (lambda x, taps: x.at[1:].add(x[:-1]), 32, None, "and makes 31 of 32 elements"),
    ],
    ids=["wide", "small", "wider", "uneven", "reversed", "shorter"],
)
def test_a_stream_ends_at_windows_that_no_chunk_has(
    mix: Mix, rows: int, chunks: int | None, why: str | None
) -> None:
    f = block(mix, pipeline="p2p", chunks=chunks)
    program = exact(f, *operands(rows), **tp(4, *SPECS))
    stops = notes(program, "streams stop")
    assert any(f"other chunks, {why}" in each for each in stops) == (why is not None)
    assert count_loops(program) == (1 if why is None else 2)


@pytest.mark.parametrize("mix", [causal, twice], ids=["one", "twice"])
def test_sums_that_go_back_in_pieces_have_no_windows_before_them(mix: Mix) -> None:
    """Their loop takes a piece through all steps, and neighbours are other pieces."""
    f = block(mix, pipeline="p2p", chunks=8)
    program = exact(f, *operands(32), **tp(4, INS, P()))
    assert all("sums of it go back" in each for each in notes(program, "streams stop"))
    assert count_loops(program) == 2
    whole = exact(block(mix, pipeline="p2p"), *operands(32), **tp(4, INS, P()))
    assert not notes(whole, "streams stop")


def test_a_sum_goes_back_in_pieces_if_no_chunk_has_what_its_reader_needs() -> None:
    """Without that reader nothing hides the gather but other pieces."""

    def f(x: Array, *weights: Array) -> Array:
        *before, kernel = weights
        rows = tame(jhost.shard(block(causal)(x, *before), P(None, None)))
        # A row reads six rows before it, and a piece has four.
        numbers = lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))
        read = lax.conv_general_dilated(
            rows[None], kernel, (1,), [(6, 0)], dimension_numbers=numbers
        )[0]
        return jhost.stream(read, 0, pipeline="p2p", chunks=8)

    args, specs = (*operands(32), array(7, 4, 8)), (*INS, P(None, None, "tp"))
    program = exact(f, *args, **tp(4, specs, P(None, "tp")))
    stops = notes(program, "streams stop")
    assert len(stops) == 2
    assert all("sums of it go back in pieces" in stop for stop in stops)


def test_no_collective_pipeline_has_windows() -> None:
    f = block(causal, pipeline="collective", chunks=2)
    program = exact(f, *operands(32), **tp(4, *SPECS))
    assert len(notes(program, "streams stop")) == 1

    def alone(x: Array) -> Array:
        x = lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), [(2, 0), (0, 0)])
        return jhost.stream(x, 0, chunks=2)

    with pytest.raises(PipelineError, match="reads elements of other chunks"):
        program_of(alone, array(8, 4), **tp(1, P(), P()))


def test_streams_that_nobody_marked_go_through_windows() -> None:
    def f(x: Array, up: Array, taps: Array, down: Array) -> Array:
        hidden = x @ up
        return causal(hidden, taps) * hidden @ down

    with finding.everywhere():
        program = exact(f, *operands(32), **tp(4, *SPECS))
    (loop,) = loops(program)
    assert "conv_general_dilated" in work(loop.body)


# --- All is exact ------------------------------------------------------------------- #


def tame(x: Array) -> Array:
    """Small integers again, so that sums of products of them stay exact."""
    return jnp.where(jnp.abs(x) < 9, x, 1)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[Mix, int]:
    """A mix of neighbouring rows, and the taps that it has."""
    before, after = draw(st.integers(0, 4)), draw(st.sampled_from([0, 0, 1, 3]))
    if draw(st.booleans()):
        before, after = after, before
    made = draw(st.sampled_from([convolution, joined, shifts, slices, pooling]))
    if made is convolution and draw(st.booleans()):
        return convolution(2 * before, 2 * after, 2), before + after + 1
    return made(before, after), before + after + 1


@st.composite
def chains(draw: st.DrawFn) -> tuple[Mix, int]:
    """Mixes one after another, some of them added to what they read."""
    made = draw(st.lists(st.tuples(mixes(), st.booleans()), min_size=1, max_size=3))

    def mix(x: Array, taps: Array) -> Array:
        for (each, _), adds in made:
            x = tame(each(x, taps) + x if adds else each(x, taps))
        return x

    return mix, max(count for (_, count), _ in made)


@given(rows=st.integers(1, 12), mix=chains(), way=ways)
@settings(max_examples=budget.examples(12))
def test_windows_of_chunks_are_exact(rows: int, mix: tuple[Mix, int], way: Way) -> None:
    """Of any reach, also wider than a chunk, and with rows that do not divide."""
    made, taps = mix
    args = operands(way.devices * rows, taps, 2 * way.devices)
    way.check(block(made, **way.mark), gradients, *args)


@pytest.mark.parametrize(
    "mix", [causal, convolution(1, 1), twice], ids=["before", "both sides", "twice"]
)
def test_in_a_loop_whose_iterations_overlap(mix: Mix) -> None:
    """Each goes a stage ahead of the next, and hides a gather along another axis."""

    def f(x: Array, up: Array, taps: Array, down: Array) -> Array:
        hidden = jnp.abs(jhost.shard(x @ up, P(None, "dp")))
        mixed = mix(jhost.shard(hidden, P(None, None)), taps)
        return jhost.stream(mixed @ down, 0, pipeline="p2p")

    specs = (P("tp"), P(None, "dp"), P(), P(None, "dp")), P(None, "dp")
    program = exact(f, *operands(32), **on({"tp": 4, "dp": 2}, *specs))
    assert count_loops(program) == 1
    assert any(loop.order for loop in loops(program))


def test_in_a_scan_over_layers() -> None:
    def f(x: Array, *weights: Array) -> Array:
        def layer(x: Array, each: tuple[Array, ...]) -> tuple[Array, None]:
            y = block(causal, pipeline="p2p")(x, *each)
            return jhost.shard(jnp.where(jnp.abs(y) < 9, y, 1), P("tp")), None

        return lax.scan(layer, x, weights)[0]

    x, *each = operands(32, 3)
    stacked = [jnp.stack([w, w + 1]) for w in each]
    specs = P("tp"), *(P(None, *spec) for spec in INS[1:])
    exact(gradients(f), x, *stacked, **tp(4, specs, specs))
    exact(
        jax.vmap(f, (0, None, None, None)),
        x[None],
        *stacked,
        **tp(4, (None, *specs[1:]), None),
    )
