"""Indexed dims that are cut: which indices are in a part, and where in it.

A device has some rows of a table, and indices name any rows.  Bounds belong to the
whole table.  So an index is clipped to them, or found to be outside, before the device
looks for it in its part.  The rules of gather and scatter share this and some maps.
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
"""The modes for indices out of bounds whose meaning the rules keep."""


def can_be_added_up(width: int, size: int) -> bool:
    """Whether summing a window over devices costs no more than gathering the dim.

    An all-reduce of n bytes moves as much as an all-gather of 2 n bytes.
    """
    return 2 * width <= size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The dims that an index picks from; each field has an entry for each component.

    Attributes:
        dims: the operand's dim that the component points into.
        sizes: the size of that dim in the whole, without padding.
        windows: the elements that an index takes of the dim.
        factors: the factor of the dim, or None where it stays whole.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    windows: tuple[int, ...]
    factors: tuple[int | None, ...]

    def map(self, others: Dims) -> Dims:
        """The operand's map: the rows' factors, and `others` for its other dims."""
        rows = {
            dim: FactorDim(factor)
            for dim, factor in zip(self.dims, self.factors, strict=True)
            if factor is not None
        }
        return tuple(rows.get(dim, mapped) for dim, mapped in enumerate(others))

    @property
    def cuttable(self) -> frozenset[int]:
        """The factors of the dims that can be cut."""
        return frozenset(factor for factor in self.factors if factor is not None)

    @property
    def of_elements(self) -> Rows:
        """These rows once windows are taken apart: one element of each dim to cut."""
        pairs = zip(self.factors, self.windows, strict=True)
        single = tuple(width if f is None else 1 for f, width in pairs)
        return dataclasses.replace(self, windows=single)

    def are_cut(self, operand: Sequence[int], shard: Shard) -> bool:
        """Whether `shard` has not exactly the whole's rows: fewer, or padding too."""
        if any(operand[d] != n for d, n in zip(self.dims, self.sizes, strict=True)):
            return True
        return any(
            factor is not None and shard.size(factor) != size
            for factor, size in zip(self.factors, self.sizes, strict=True)
        )

    def bounded(self, indices: Any, *, clip: bool) -> Any:
        """`indices` as int32, clipped to the bounds, or to one beyond the bounds."""
        beyond = 0 if clip else 1
        # The bounds are made in the indices' own dtype, and a narrow or unsigned dtype
        # may not be able to hold them.
        most = jnp.iinfo(indices.dtype)
        ends = [min(end + beyond, most.max) for end in self._ends(self.sizes)]
        start = np.array(max(-beyond, most.min), indices.dtype)
        end = _over(np.array(ends, indices.dtype), indices.shape)
        return lax.convert_element_type(lax.clamp(start, indices, end), np.int32)

    def in_bounds(self, indices: Any) -> Any:
        """Which of the `bounded` indices are in the bounds of the whole."""
        return self._between(indices, self.sizes)

    def found_in(self, shard: Shard, indices: Any) -> tuple[Any, Any]:
        """`bounded` indices counted from a part's start, and which are in the part."""
        # A dim without a factor is whole on every device, so its part begins at 0.
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
        """The last index of each component at which a whole window fits."""
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
    """The rows of an operand of that shape; indices take windows along `dims`.

    A dim in `cut` becomes a new factor.
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
    """One number for each component, broadcast to the shape of an array of indices."""
    return lax.broadcast_in_dim(components, shape, (len(shape) - 1,))


def can_be_summed(dtype: np.dtype) -> bool:
    """Whether devices can add up values of this dtype: not keys, nor 8-bit floats."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    # No collective of XLA's adds floats of 8 bits.
    return not jnp.issubdtype(dtype, jnp.floating) or bits(dtype) > 8


# --- Maps ----------------------------------------------------------------------- #


def differing(shape: Sequence[int], other: Sequence[int]) -> list[int]:
    """The dims that are not of the same size."""
    sizes = enumerate(zip(shape, other, strict=True))
    return [dim for dim, (size, part) in sizes if size != part]


def batched(window: Dims, batching: Mapping[int, int], batch: Dims) -> Dims:
    """The operand's map; its batching dims have the factors of the indices'."""
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
