"""Indexed dims that are cut: which indices meet a part, and where in it.

A device has some rows of a table and is asked for any.  Bounds are those of the whole:
an index is brought into them, or found to be out of them, before it is looked for in
the part.  Here, too, is what the rules of gather and scatter share about dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jhost._dtypes import bits
from jhost.lowering.rules.building import Factors, first_step
from jhost.lowering.rules.dim_rule import MOST_POSITIONS, Dims, FactorDim, Shard
from jhost.lowering.rules.reducers import Reducer

MODES = frozenset(
    {
        lax.GatherScatterMode.CLIP,
        lax.GatherScatterMode.FILL_OR_DROP,
        lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    }
)
"""What may happen to indices out of bounds; of other modes nothing is known."""


def can_be_added_up(width: int, size: int) -> bool:
    """Whether a sum of what devices have of a window costs no more than the whole dim.

    A sum of all devices' terms costs as much as twice what it gives.
    """
    return 2 * width <= size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The dims that an index picks from: an entry for each of its components.

    `sizes` are those of the whole dims, also where a rule works on padded ones, and
    `windows` the elements that are taken there.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    windows: tuple[int, ...]
    factors: tuple[int | None, ...]

    def map(self, others: Dims) -> Dims:
        """The operand's map, which is `others` beside the rows."""
        rows = {
            dim: FactorDim(factor)
            for dim, factor in zip(self.dims, self.factors, strict=True)
            if factor is not None
        }
        return tuple(rows.get(dim, mapped) for dim, mapped in enumerate(others))

    @property
    def cuttable(self) -> frozenset[int]:
        """The factors."""
        return frozenset(factor for factor in self.factors if factor is not None)

    @property
    def of_elements(self) -> Rows:
        """The rows of windows that are taken apart along dims that can be cut."""
        pairs = zip(self.factors, self.windows, strict=True)
        single = tuple(width if f is None else 1 for f, width in pairs)
        return dataclasses.replace(self, windows=single)

    def are_cut(self, operand: Sequence[int], shard: Shard) -> bool:
        """Whether `shard` has other rows than all; padded, `operand` has more."""
        if any(operand[d] != n for d, n in zip(self.dims, self.sizes, strict=True)):
            return True
        return any(
            factor is not None and shard.size(factor) != size
            for factor, size in zip(self.factors, self.sizes, strict=True)
        )

    def bounded(self, indices: Any, *, clip: bool) -> Any:
        """`indices` as int32: those out of bounds are clipped, or left just beyond."""
        beyond = 0 if clip else 1
        # Bounds in the indices' own dtype: a narrow or unsigned one may not reach them.
        most = jnp.iinfo(indices.dtype)
        ends = [min(end + beyond, most.max) for end in self._ends(self.sizes)]
        start = np.array(max(-beyond, most.min), indices.dtype)
        end = _over(np.array(ends, indices.dtype), indices.shape)
        return lax.convert_element_type(lax.clamp(start, indices, end), np.int32)

    def in_bounds(self, indices: Any) -> Any:
        """Which of the `bounded` indices are in the bounds of the whole."""
        return self._between(indices, self.sizes)

    def found_in(self, shard: Shard, indices: Any) -> tuple[Any, Any]:
        """`bounded` indices counted from the start of a part, and which it has."""
        # A component that no factor follows begins at 0, as on every device.
        starts = [_start(shard, factor) for factor in self.factors]
        shift = lax.concatenate([lax.reshape(s, (1,)) for s in starts], 0)
        indices = lax.sub(indices, _over(shift, indices.shape))
        pairs = zip(self.factors, self.sizes, strict=True)
        sizes = [n if f is None else shard.size(f) for f, n in pairs]
        return indices, self._between(indices, sizes)

    def _between(self, indices: Any, sizes: Sequence[int]) -> Any:
        ends = _over(np.array(self._ends(sizes), np.int32), indices.shape)
        inside = lax.bitwise_and(lax.ge(indices, np.int32(0)), lax.le(indices, ends))
        return lax.reduce_and(inside, (indices.ndim - 1,))

    def _ends(self, sizes: Sequence[int]) -> list[int]:
        """The last index of each component at which all that is taken is there."""
        pairs = zip(sizes, self.windows, strict=True)
        return [size - window for size, window in pairs]


def rows_of(
    factors: Factors,
    operand: Sequence[int],
    windows: Sequence[int],
    dims: Sequence[int],
    *,
    cut: Container[int],
    reducer: Reducer | None = None,
) -> Rows:
    """The rows of an operand of that shape, of which windows are taken along `dims`.

    A dim that may be `cut` is a new factor.
    """

    def factor(dim: int) -> int | None:
        if dim not in cut or not 1 < operand[dim] <= MOST_POSITIONS:
            return None
        return factors.new(operand[dim], reducer)

    return Rows(
        dims=tuple(dims),
        sizes=tuple(operand[dim] for dim in dims),
        windows=tuple(windows[dim] for dim in dims),
        factors=tuple(map(factor, dims)),
    )


def holds_first(shard: Shard, factors: Iterable[int]) -> Any:
    """Whether the part at `shard` begins with the first step of all `factors`."""
    first: Any = np.bool_(True)
    for factor in factors:
        first = lax.bitwise_and(first, lax.eq(_start(shard, factor), np.int32(0)))
    return first


def _start(shard: Shard, factor: int | None) -> Any:
    if factor is None:
        return np.int32(0)
    return first_step(shard, factor)


def _over(components: Any, shape: Sequence[int]) -> Any:
    """A number for each component, for every index of an array of them."""
    return lax.broadcast_in_dim(components, shape, (len(shape) - 1,))


def can_be_summed(dtype: np.dtype) -> bool:
    """Whether devices can add up values of this type: not keys, nor floats of 8 bits"""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return not jnp.issubdtype(dtype, jnp.floating) or bits(dtype) > 8


# --- Maps ----------------------------------------------------------------------- #


def differing(shape: Sequence[int], other: Sequence[int]) -> list[int]:
    """The dims that are not of the same size."""
    sizes = enumerate(zip(shape, other, strict=True))
    return [dim for dim, (size, part) in sizes if size != part]


def batched(window: Dims, batching: Mapping[int, int], batch: Dims) -> Dims:
    """The operand's map: its batching dims follow those of the indices."""
    return tuple(
        batch[batching[dim]] if dim in batching else mapped
        for dim, mapped in enumerate(window)
    )


def interleave(window: Dims, positions: Collection[int], batch: Dims) -> Dims:
    """The map that has `window` at `positions` and `batch` elsewhere, in order."""
    windows, batches = iter(window), iter(batch)
    return tuple(
        next(windows) if position in positions else next(batches)
        for position in range(len(window) + len(batch))
    )
