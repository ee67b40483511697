"""Loops whose chunks have fewer rows behind a window than before it, or more."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.errors import ChunksError, PipelineError
from jhost.lowering.explain import count_loops
from tests import budget
from tests.jhost.derived import backward
from tests.lowering.loops.any_way import INS, Way, ways
from tests.lowering.loops.test_edges import (
    Array,
    Mix,
    causal,
    convolution,
    operands,
    tame,
)
from tests.lowering.on_mesh import every_size, exact, tp
from tests.lowering.traced import loops, notes, work


@dataclasses.dataclass(frozen=True)
class Strided:
    """A window of `taps` rows, `stride` rows on for each row of the result.

    Rows stand `gaps` places apart.  A row sees so many places `before` it.  The result
    has a row for each `stride` places, or some `more` or fewer.
    """

    taps: int = 3
    stride: int = 1
    gaps: int = 1
    before: int = 1
    more: int = 0

    def pads(self, rows: int) -> tuple[int, int]:
        made = rows * self.gaps // self.stride + self.more
        read = (made - 1) * self.stride + self.taps
        return self.before, read - self.before - (rows - 1) * self.gaps - 1

    def convolution(self, x: Array, taps: Array) -> Array:
        return self.over(x[None], taps, [self.pads(len(x))])

    def padded(self, x: Array, taps: Array) -> Array:
        """The same, of rows that are padded first, as Flax does for causal ones."""
        widths = [(0, 0, 0), (*self.pads(len(x)), 0), (0, 0, 0)]
        x = lax.pad(x[None], 0.0, widths)
        return self.over(x, taps, [(0, 0)])

    def over(self, x: Array, taps: Array, padding: list[tuple[int, int]]) -> Array:
        return lax.conv_general_dilated(
            x,
            taps[: self.taps, None],
            window_strides=(self.stride,),
            padding=padding,
            lhs_dilation=(self.gaps,),
            dimension_numbers=("NHC", "HIO", "NHC"),
            feature_group_count=x.shape[-1],
        )[0]

    def pooling(self, x: Array, taps: Array) -> Array:
        low, high = self.pads(len(x))
        x = lax.pad(x, 0.0, [(min(low, 0), min(high, 0), 0), (0, 0, 0)])
        return lax.reduce_window(
            x,
            -jnp.inf,
            lax.max,
            window_dimensions=(self.taps, 1),
            window_strides=(self.stride, 1),
            padding=[(max(low, 0), max(high, 0)), (0, 0)],
            base_dilation=(self.gaps, 1),
        )

    def slices(self, x: Array, taps: Array) -> Array:
        """Each tap by itself, of what is padded once."""
        low, high = self.pads(len(x))
        x = lax.pad(x, 0.0, [(low, high, self.gaps - 1), (0, 0, 0)])
        end = len(x) - self.taps + 1
        each = (x[n : end + n : self.stride] * taps[n] for n in range(self.taps))
        return functools.reduce(jnp.add, each)


halved = Strided(stride=2)
doubled = Strided(gaps=2)
widened = Strided(stride=2, gaps=3, taps=4)


def pairs(x: Array, taps: Array) -> Array:
    """The larger row of each two, two times."""
    return jnp.repeat(Strided(2, 2, 1, 0).pooling(x, taps), 2, axis=0)


def block(mix: Mix, held: bool = True, **mark: Any) -> Callable[..., Array]:
    """A product, a mix of neighbouring rows, and a product."""

    def whole(x: Array) -> Array:
        return jhost.shard(x, P(None, "tp")) if held else x

    def f(x: Array, up: Array, taps: Array, down: Array) -> Array:
        mixed = tame(whole(mix(whole(x @ up), taps)))
        return jhost.stream(mixed @ down, 0, **mark)

    return f


def gradients(f: Callable[..., Array]) -> Callable[..., Any]:
    """Of a loss whose cotangents differ from row to row."""

    def loss(*args: Array) -> Array:
        y = f(*args)
        return jnp.sum(y * (lax.iota(y.dtype, len(y)) % 3)[:, None])

    return jax.grad(loss, (0, 1, 2, 3))


MIXES = {
    "fewer": halved.convolution,
    "more": doubled.convolution,
    "both": widened.convolution,
    "padded": Strided(before=2).padded,
    "padded, fewer": halved.padded,
    "pooled": halved.pooling,
    "every": lambda x, taps: x[1::2],
    "back": lambda x, taps: doubled.convolution(halved.convolution(x, taps), taps),
    "twice": lambda x, taps: halved.pooling(halved.convolution(x, taps), taps),
    "beside": lambda x, taps: halved.pooling(causal(x, taps), taps),
    "repeated": lambda x, taps: causal(pairs(x, taps), taps),
}
each_mix = pytest.mark.parametrize("mix", [*MIXES.values()], ids=[*MIXES])


@each_mix
@every_size
@pytest.mark.parametrize("pieces", [1, 2])
def test_all_strides_are_in_the_loop_of_both_products(
    devices: int, mix: Mix, pieces: int
) -> None:
    f = block(mix, pipeline="p2p", chunks=devices * pieces)
    program = exact(f, *operands(24 * devices), **tp(devices, INS, P("tp")))
    assert count_loops(program) == 1
    assert not notes(program, "streams stop")
    in_loops = [word for loop in loops(program) for word in work(loop.body)]
    assert in_loops.count("dot_general") >= 2
    outside = [stmt for stmt in program.body if type(stmt).__name__ == "Communicate"]
    assert not outside


@each_mix
def test_a_backward_has_them_in_its_loops(mix: Mix) -> None:
    """What a stride left out has gaps there, and the other way round."""
    f, args = block(mix, pipeline="p2p"), operands(96)
    exact(gradients(f), *args, **tp(4, INS, INS))
    exact(gradients(jax.checkpoint(f)), *args, **tp(4, INS, INS))
    forward, back = backward(jhost.jit(f, **tp(4, INS, P("tp"))), *args)
    for program, products in (forward, 2), (back, 4):
        each = [work(loop.body).count("dot_general") for loop in loops(program)]
        assert count_loops(program) == 1
        assert max(each) == products
        stops = notes(program, "streams stop")
        # The gradient of the taps is a sum over all rows, and JAX hands on what the
        # forward padded.
        reasons = "reduces over all of them", "makes 100 of 96 elements"
        assert all(stop.endswith(reasons) for stop in stops)


@pytest.mark.parametrize(
    ("mix", "why"),
    [
        (dataclasses.replace(halved, more=-8).convolution, "and makes 40 of 96 elem"),
        (Strided(28, 2, before=26).convolution, "not only of those beside it"),
        (Strided(1, 2, 2, before=-1).convolution, "and its steps read gaps alone"),
    ],
    ids=["fewer", "wide", "gaps"],
)
def test_a_stream_ends_at_strides_that_no_chunk_has(mix: Mix, why: str) -> None:
    program = exact(
        block(mix, pipeline="p2p"), *operands(96, 40), **tp(4, INS, P("tp"))
    )
    assert any(f"other chunks, {why}" in each for each in notes(program, "streams"))


def test_each_piece_has_a_row_behind_all_strides() -> None:
    """One row in four is left and makes four again, so of 32 a device has two."""

    def mix(x: Array, taps: Array) -> Array:
        return jnp.repeat(MIXES["twice"](x, taps), 4, axis=0)

    f = block(mix, pipeline="p2p", chunks=16)
    with pytest.raises(ChunksError, match="4 on a device, where a device has 2 steps"):
        exact(f, *operands(32), **tp(4, INS, P("tp")))


def test_no_collective_pipeline_has_strides() -> None:
    f = block(MIXES["pooled"], pipeline="collective", chunks=2)
    program = exact(f, *operands(32), **tp(4, INS, P("tp")))
    (stop,) = notes(program, "streams stop")
    assert "other chunks, and a collective pipeline has none" in stop


# --- All is exact ------------------------------------------------------------------- #


@st.composite
def mixes(draw: st.DrawFn) -> Mix:
    taps = draw(st.integers(1, 4))
    window = Strided(
        taps=taps,
        stride=draw(st.sampled_from([1, 2, 2, 3, 4])),
        gaps=draw(st.sampled_from([1, 1, 1, 2, 3])),
        before=draw(st.integers(0, taps - 1)),
        more=draw(st.sampled_from([0, 0, 0, 0, -1, 1])),
    )
    names = "convolution", "padded", "pooling", "slices", "every", "even"
    made = draw(st.sampled_from(names))
    first, every = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    if made == "every":
        return lambda x, taps: x[first::every]
    if made == "even":
        before = draw(st.integers(0, 2))
        return convolution(before, taps - 1)
    return getattr(window, made)


@st.composite
def chains(draw: st.DrawFn) -> Mix:
    made = draw(st.lists(mixes(), min_size=1, max_size=3))

    def mix(x: Array, taps: Array) -> Array:
        for each in made:
            if len(x) > 8:  # enough for any window and stride
                x = tame(each(x, taps))
        return x

    return mix


@given(rows=st.integers(4, 24), mix=chains(), held=st.booleans(), way=ways)
@settings(max_examples=budget.examples(12))
def test_strides_of_chunks_are_exact(rows: int, mix: Mix, held: bool, way: Way) -> None:
    """Of any number of rows, also where chunks cannot have equally many."""
    args = operands(way.devices * rows, 9, 2 * way.devices)
    refused = ChunksError, PipelineError
    way.check(block(mix, held, **way.mark), gradients, *args, refused=refused)
