"""Windows of dims as rules map them, and as devices hold them.

A part that reads windows gets the elements of its own window, with any values where
the whole has no element.  These functions write there what the whole has, such as
padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.building import Factors, first_step
from jhost.lowering.rules.dim_rule import MOST_POSITIONS, FactorDim, Shard
from jhost.lowering.rules.reads import WindowReads


def reading(
    factors: Factors, reads: WindowReads, count: int
) -> tuple[FactorDim | None, FactorDim | None]:
    """The maps of a dim read in windows, and of a dim with one element a step.

    Both follow a new factor of `count` steps.  Both are whole (None) where one of them
    is empty, or too long to count.
    """
    if not 0 < count <= MOST_POSITIONS or not 0 < reads.size <= MOST_POSITIONS:
        return None, None
    factor = factors.new(count)
    return reading_dim(factor, reads, count), FactorDim(factor)


def reading_dim(factor: int, reads: WindowReads, count: int) -> FactorDim:
    """How a dim that is read in windows follows a factor of `count` steps."""
    inside = reads.first >= 0 and reads.first + reads.extent <= reads.stride
    if inside and reads.dilation == 1 and reads.size == reads.stride * count:
        return FactorDim(factor, reads.stride)  # windows do not overlap
    return FactorDim(factor, reads=reads)


def has_windows(eqn: JaxprEqn) -> bool:
    """Whether elements of its values can be left out and filled in.

    Random keys cannot: no value of their dtype can stand for padding.
    """
    dtypes = (aval_of(atom).dtype for atom in (*eqn.invars, *eqn.outvars))
    return not any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes)


def is_whole(mapped: FactorDim | None, shard: Shard) -> bool:
    """Whether all steps of the whole are here, so the equation fits as it is."""
    if mapped is None or mapped.reads is None:
        return True
    return shard.parts(mapped.factor) == 1 and _all_steps(mapped, shard)


def _all_steps(mapped: FactorDim, shard: Shard) -> bool:
    """Whether there are as many steps here as in the whole without padding."""
    assert mapped.reads is not None
    return shard.size(mapped.factor) == mapped.reads.count


def without_padding(x: Any, dims: Sequence[FactorDim | None], shard: Shard) -> Any:
    """`x` without the padding of whole dims that are read in windows."""
    for dim, mapped in enumerate(dims):
        if mapped is not None and mapped.reads is not None and is_whole(mapped, shard):
            x = lax.slice_in_dim(x, 0, mapped.reads.size, axis=dim)
    return x


def window_of(
    x: Any, dim: int, mapped: FactorDim, shard: Shard, fill: Any = None
) -> Any:
    """The places that the steps here read along a dim, in order.

    `fill` stands where there is no element; without `fill`, any value may.
    """
    assert mapped.reads is not None
    x = elements_of(x, dim, mapped, shard, fill)
    if mapped.reads.dilation == 1:
        return x
    value = lax.full((), 0, x.dtype) if fill is None else fill
    return _dilated(x, dim, mapped, shard, value)


def elements_of(
    x: Any, dim: int, mapped: FactorDim, shard: Shard, fill: Any = None
) -> Any:
    """The elements in the window of the steps here, with no empty places."""
    reads, count = mapped.reads, shard.size(mapped.factor)
    assert reads is not None
    value = lax.full((), 0, x.dtype) if fill is None else fill
    if shard.parts(mapped.factor) == 1:
        start = reads.start(0, count)
        x = lax.slice_in_dim(x, 0, reads.size, axis=dim)
        x = padded(x, dim, value, (-start, start + reads.window(count) - reads.size))
    # Nothing is compared where every device's window lies in the dim: XLA would not
    # find out that the comparison is always true.
    elif fill is not None and _leaves(mapped, shard):
        number = _numbers(mapped, shard)
        inside = lax.bitwise_and(number >= 0, number < np.int32(reads.size))
        inside = lax.broadcast_in_dim(inside, x.shape, (dim,))
        x = lax.select(inside, x, lax.broadcast(value, x.shape))
    return x


def _numbers(mapped: FactorDim, shard: Shard) -> Any:
    """Which element of the dim each one in the window of the steps here is."""
    reads, each = mapped.reads, _in_a_row(mapped, shard)
    assert reads is not None
    steps = lax.slice_in_dim(shard.positions(mapped.factor), 0, None, each)
    within = lax.iota(np.int32, reads.window(each))
    return lax.reshape(
        reads.start(steps, each)[:, None] + within, (len(steps) * len(within),)
    )


def _in_a_row(mapped: FactorDim, shard: Shard) -> int:
    """How many of the steps here read elements in a row for certain.

    A chunk of a gathered dim has some steps of each device's part.  No windows of such
    steps overlap, and the fewest steps that read whole elements are in a row.
    """
    reads, count = mapped.reads, shard.size(mapped.factor)
    assert reads is not None
    each = reads.fewest
    apart = reads.stride > 0 and reads.lead(each) is not None and count % each == 0
    if apart and reads.window(count) == count // each * reads.window(each):
        return each
    return count


def _leaves(mapped: FactorDim, shard: Shard) -> bool:
    """Whether the window of some steps is not all in the dim."""
    reads, each = mapped.reads, _in_a_row(mapped, shard)
    assert reads is not None
    every = shard.parts(mapped.factor) * shard.size(mapped.factor)
    starts = [reads.start(step, each) for step in (0, every - each)]
    return min(starts) < 0 or max(starts) + reads.window(each) > reads.size


def _dilated(x: Any, dim: int, mapped: FactorDim, shard: Shard, value: Any) -> Any:
    """Elements with empty places between them, from the first that is read on."""
    reads, count = mapped.reads, shard.size(mapped.factor)
    assert reads is not None
    ends = empty_ends(mapped, shard)
    if ends is not None:
        return padded(x, dim, value, ends, reads.dilation - 1)
    x = padded(x, dim, value, (0, reads.dilation - 1), reads.dilation - 1)
    into = _places_before(mapped, shard)
    return lax.dynamic_slice_in_dim(x, into, reads.reach(count), axis=dim)


def empty_ends(mapped: FactorDim, shard: Shard) -> tuple[int, int] | None:
    """The empty places at both ends of the window, where all devices have so many."""
    reads, count = mapped.reads, shard.size(mapped.factor)
    assert reads is not None
    lead = reads.lead(count)
    if lead is None:
        return None
    between = (reads.window(count) - 1) * reads.dilation + 1
    return lead, reads.reach(count) - lead - between


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FinerSteps:
    """Steps from the first that any device may want: each wants other ones of them.

    Attributes:
        empty_ends: the empty places before and behind the window, the same everywhere.
        stride: how many places further the next step begins.
        first: the first step that is wanted here.
        count: how many steps are wanted.
        each: which of the steps from there on are wanted, counted in steps.
    """

    empty_ends: tuple[int, int]
    stride: int
    first: Any
    count: int
    each: int

    def wanted(self, x: Any, dim: int) -> Any:
        """The steps that are wanted, of all that were made along a dim."""
        size = (self.count - 1) * self.each + 1
        x = lax.dynamic_slice_in_dim(x, self.first, size, dim)
        return lax.slice_in_dim(x, 0, size, self.each, axis=dim)


def finer_steps(mapped: FactorDim, shard: Shard) -> FinerSteps:
    """Steps for devices whose windows begin with different numbers of empty places."""
    reads, count = mapped.reads, shard.size(mapped.factor)
    assert reads is not None
    stride = math.gcd(reads.stride, reads.dilation)
    first = reads.first % stride
    into = _places_before(mapped, shard) - first
    more = reads.dilation - stride + reads.reach(count)
    between = (reads.window(count) - 1) * reads.dilation + 1
    return FinerSteps(
        empty_ends=(-first, first + more - between),
        stride=stride,
        first=into // np.int32(stride),
        count=count,
        each=reads.stride // stride,
    )


def _places_before(mapped: FactorDim, shard: Shard) -> Any:
    """How far behind the first element of the window the steps here begin."""
    reads, count = mapped.reads, shard.size(mapped.factor)
    assert reads is not None
    step = 0 if shard.parts(mapped.factor) == 1 else first_step(shard, mapped.factor)
    return reads.shard(step, count) % reads.dilation


def part_of_whole(
    x: Any, dim: int, mapped: FactorDim, shard: Shard, fill: Any = None
) -> Any:
    """The window of the steps here, of a dim that every device has whole.

    `fill`, or else zero, stands where there is no element.
    """
    assert mapped.reads is not None
    value = lax.full((), 0, x.dtype) if fill is None else fill
    x = lax.slice_in_dim(x, 0, mapped.reads.size, axis=dim)
    wanted = _numbers(mapped, shard)
    shape = (*x.shape[:dim], len(wanted), *x.shape[dim + 1 :])
    return _taken(x, dim, wanted, x.shape[dim], lax.broadcast(value, shape))


def slice_or_fill(
    x: Any, dim: int, start: Any, size: int, fill: Any, stride: int = 1
) -> Any:
    """`size` elements of a dim, `stride` apart, and `fill` where `x` has none."""
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    others = lax.broadcast(fill, shape)
    return looked_up(x, dim, start, x.shape[dim], others, stride)


def looked_up(
    x: Any, dim: int, start: Any, count: Any, others: Any, stride: int = 1
) -> Any:
    """Elements of a dim, `stride` apart, and `others` where `x` has none.

    Of `x` the first `count` elements of the dim count.
    """
    steps = lax.iota(np.int32, others.shape[dim]) * np.int32(stride)
    wanted = lax.convert_element_type(start, np.int32) + steps
    return _taken(x, dim, wanted, count, others)


def _taken(x: Any, dim: int, wanted: Any, count: Any, others: Any) -> Any:
    """The elements of those numbers, and `others` where `x` has not so many."""
    # Looked up, because a slice of padded elements would have them written first.
    inside = lax.bitwise_and(wanted >= 0, wanted < count)
    found = jnp.take(x, wanted, axis=dim, mode="clip")
    inside = lax.broadcast_in_dim(inside, found.shape, (dim,))
    return lax.select(inside, found, others)


def padded(
    x: Any, dim: int, value: Any, widths: tuple[int, int], interior: int = 0
) -> Any:
    """`x` with `widths` more elements at the ends of a dim; negative ones are fewer."""
    config = [(0, 0, 0)] * x.ndim
    config[dim] = (*widths, interior)
    return lax.pad(x, value, config)
