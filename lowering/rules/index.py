"""Dim rules of slices and updates at computed indices.

A device that has a part of an indexed dim reads the elements of the slice that it has,
and the sum over the devices is the slice.  It writes the elements of an update that
fall into its part.  So only a small slice moves, wherever an index points.  Indices are
clamped to the bounds of the whole first, as JAX does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.building import Factors, along, first_step
from jhost.lowering.rules.dim_rule import (
    MOST_POSITIONS,
    DimRule,
    Dims,
    FactorDim,
    Shard,
    bind,
    part_shape,
    shape_of,
)
from jhost.lowering.rules.reducers import Reducer, identity, sum_of
from jhost.lowering.rules.registry import rule
from jhost.lowering.rules.rows import can_be_added_up, can_be_summed, differing
from jhost.lowering.rules.windows import has_windows, slice_or_fill


@rule("dynamic_slice")
def dynamic_slice(eqn: JaxprEqn) -> DimRule:
    """All dims are factors, except those that keep more than half, and not all."""
    operand, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    dtype = aval_of(eqn.invars[0]).dtype
    indexed = differing(operand, sizes)
    if not can_be_summed(dtype) or max(operand) > MOST_POSITIONS:
        return along(eqn, indexed, sizes="slice_sizes")
    read = [dim for dim in indexed if can_be_added_up(sizes[dim], operand[dim])]
    whole = [dim for dim in indexed if dim not in read]
    dims, factors = _dims(operand, whole, read, sum_of(dtype))
    result = tuple(None if dim in read else m for dim, m in enumerate(dims))

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        x, *starts = args
        if not _are_cut(dims, read, operand, shard):
            local = part_shape(result, sizes, shard)
            # XLA (of JAX 0.10 and 0.11) adds the starts of a slice and of a part of it,
            # and then brings their sum into bounds.
            for dim in indexed:
                starts[dim] = _clamped(starts[dim], operand[dim] - sizes[dim])
            return bind(eqn, [x, *_of_one_type(starts)], slice_sizes=local)
        places = _places(x, dims, (operand, sizes), starts, shard)
        return [_read(x, places, read)]

    made = factors.rule([dims, *((),) * len(operand)], [result], rebind)
    return _of_indices(made, dims, read)


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn: JaxprEqn) -> DimRule:
    """All dims are factors; the update itself stays whole along indexed dims."""
    operand, sizes = (shape_of(v) for v in eqn.invars[:2])
    written = differing(operand, sizes)
    if not has_windows(eqn) or max(operand, default=0) > MOST_POSITIONS:
        return along(eqn, written)
    dims, factors = _dims(operand)
    update = [None if dim in written else mapped for dim, mapped in enumerate(dims)]

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        x, new, *starts = args
        if not _are_cut(dims, written, operand, shard):
            return bind(eqn, args)
        places = _places(x, dims, (operand, sizes), starts, shard)
        return bind(eqn, _written(x, new, places, written))

    made = factors.rule([dims, update, *((),) * len(operand)], [dims], rebind)
    return _of_indices(made, dims, written)


def _dims(
    shape: Sequence[int],
    whole: Collection[int] = (),
    read: Collection[int] = (),
    reducer: Reducer | None = None,
) -> tuple[Dims, Factors]:
    """A factor for each dim that is not `whole`; those `read` are reduced."""
    factors = Factors()
    dims = tuple(
        None
        if dim in whole
        else FactorDim(factors.new(size, reducer if dim in read else None))
        for dim, size in enumerate(shape)
    )
    return dims, factors


def _of_indices(made: DimRule, dims: Dims, indexed: Collection[int]) -> DimRule:
    """The rule `made`, with indices that pick steps along the dims `indexed`."""
    pairs = enumerate(dims)
    picked = frozenset(m.factor for dim, m in pairs if m and dim in indexed)
    return dataclasses.replace(made, counted=picked, picked=picked)


def _are_cut(
    dims: Dims, indexed: Collection[int], shape: Sequence[int], shard: Shard
) -> bool:
    """Whether some indexed dim is not whole; the whole has that `shape`."""
    mapped = ((dims[dim], shape[dim]) for dim in indexed)
    return any(m is not None and shard.size(m.factor) != n for m, n in mapped)


# --- Parts -------------------------------------------------------------------------- #


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a slice of `size` elements stands along a dim of a part.

    The slice begins at `start`, which may be before the part or behind it.  The
    elements that the part has of it are among its `taken` elements from `nearest` on.
    """

    start: Any
    nearest: Any
    size: int
    taken: int


def _places(
    x: Any,
    dims: Dims,
    shapes: tuple[Sequence[int], Sequence[int]],
    starts: Sequence[Any],
    shard: Shard,
) -> list[_Place]:
    """Where a slice at `starts` stands in the part `x` of an array.

    `shapes` has the shapes of the whole array and of the whole slice.
    """

    def place(dim: int) -> _Place:
        whole, size, part = shapes[0][dim], shapes[1][dim], x.shape[dim]
        # The slice is as long as the dim, so 0 is the only start in bounds.
        if whole == size:
            return _Place(start=np.int32(0), nearest=np.int32(0), size=part, taken=part)
        start, mapped = _clamped(starts[dim], whole - size), dims[dim]
        if mapped is not None and shard.size(mapped.factor) != whole:
            start = lax.sub(start, first_step(shard, mapped.factor))
        taken = min(size, part)
        nearest = lax.clamp(np.int32(0), start, np.int32(part - taken))
        return _Place(start=start, nearest=nearest, size=size, taken=taken)

    return [place(dim) for dim in range(len(dims))]


def _clamped(start: Any, last: int) -> Any:
    """An index brought into the bounds from 0 to `last`, as int32."""
    start = jnp.asarray(start)
    # `last` may be more than a narrow dtype can hold, and would wrap round in it.
    last = min(last, jnp.iinfo(start.dtype).max)
    zero, end = (np.array(bound, start.dtype) for bound in (0, last))
    return lax.convert_element_type(lax.clamp(zero, start, end), np.int32)


def _of_one_type(starts: Sequence[Any]) -> list[Any]:
    return [lax.convert_element_type(start, np.int32) for start in starts]


def _read(x: Any, places: Sequence[_Place], dims: Collection[int]) -> Any:
    """A slice with the elements that a part has, and elsewhere what changes no sum."""
    taken = [place.taken for place in places]
    found = lax.dynamic_slice(x, [place.nearest for place in places], taken)
    nothing = identity(sum_of(x.dtype), x.dtype)
    for dim in dims:
        place = places[dim]
        # Element 0 of the slice is at `ahead` among the elements taken.
        ahead = lax.sub(place.start, place.nearest)
        found = slice_or_fill(found, dim, ahead, place.size, nothing)
    return found


def _written(
    x: Any, new: Any, places: Sequence[_Place], dims: Collection[int]
) -> list[Any]:
    """The operands of an update that writes into a part what of `new` falls there."""
    shape = [place.taken for place in places]
    falls_here = lax.full(shape, True)
    for dim in dims:
        place = places[dim]
        # The first element taken is element `behind` of the update.
        behind = lax.sub(place.nearest, place.start)
        number = lax.broadcasted_iota(np.int32, shape, dim) + behind
        inside = lax.bitwise_and(number >= 0, number < np.int32(place.size))
        falls_here = lax.bitwise_and(falls_here, inside)
        if place.size > 1:
            zero = lax.full((), 0, new.dtype)
            new = slice_or_fill(new, dim, behind, place.taken, zero)
    nearest = [place.nearest for place in places]
    # The old elements stay where nothing is written.  Only the slice is selected, and
    # not the part: so XLA writes in place.
    old = lax.dynamic_slice(x, nearest, shape)
    return [x, lax.select(falls_here, new, old), *nearest]
