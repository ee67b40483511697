"""Dim rules of updates at indices, such as the gradient of an embedding's table.

Each device may make some of the updates.  The results are then reduced over the
devices, and only one device takes the operand into its result.  A device that has some
rows of the operand makes the updates of these rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.building import Factors, without
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Shard,
    bind,
    shape_of,
)
from jhost.lowering.rules.elements import Elements, elements_of
from jhost.lowering.rules.reducers import Reducer, identity
from jhost.lowering.rules.registry import rule
from jhost.lowering.rules.rows import (
    MODES,
    Rows,
    batched,
    can_be_summed,
    holds_first,
    interleave,
    rows_of,
)

_REDUCERS: Mapping[str, Reducer | None] = {
    "scatter": None,
    "scatter-add": "sum",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-mul": "prod",
    # Each device subtracts its updates, the first from the operand and others from 0.
    "scatter-sub": "sum",
}
_OF_BOOLS: Mapping[Reducer, Reducer] = {"max": "or", "min": "and"}


@rule(*_REDUCERS)
def scatter(eqn: JaxprEqn) -> DimRule:
    """Batching dims are factors, and so are operand dims updated in full.

    A dim whose single elements are updated is a factor: a part takes the updates that
    hit it.  The dims of the indices that are not batching dims are reduced, if updates
    can be combined.
    """
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (shape_of(v) for v in eqn.invars)
    batching = dict(
        zip(
            numbers.operand_batching_dims,
            numbers.scatter_indices_batching_dims,
            strict=True,
        )
    )
    missing = (*numbers.inserted_window_dims, *batching)
    present = [dim for dim in range(len(operand)) if dim not in missing]
    windows = [1] * len(operand)
    for dim, update_dim in zip(present, numbers.update_window_dims, strict=True):
        windows[dim] = updates[update_dim]
    partial = [dim for dim in present if operand[dim] != windows[dim]]
    reducer = _reducer(eqn)
    factors = Factors()
    batch = _batch(factors, indices[:-1], {*batching.values()}, reducer)
    window = factors.dims(operand, whole=(*missing, *partial))
    rows = rows_of(
        factors,
        operand,
        windows,
        numbers.scatter_dims_to_operand_dims,
        cut=_written(operand, windows) if eqn.params["mode"] in MODES else (),
    )
    result = rows.map(batched(window, batching, batch))
    elements = elements_of(rows, len(batch), numbers.update_window_dims, present)
    update = interleave(without(window, missing), numbers.update_window_dims, batch)
    made = factors.rule([result, (*batch, None), update], [result])
    reduced = frozenset(f for f, r in enumerate(made.reducers) if r is not None)
    return dataclasses.replace(
        made,
        rebind=_Updates(rows, elements, reducer, reduced, made.sizes, indices),
        counted=rows.cuttable | reduced,
        picked=rows.cuttable,
        updates=reduced,
    )


def _written(operand: Sequence[int], windows: Sequence[int]) -> list[int]:
    """The dims that are written in part."""
    pairs = enumerate(zip(operand, windows, strict=True))
    return [dim for dim, (size, width) in pairs if 0 < width and size != width]


def _reducer(eqn: JaxprEqn) -> Reducer | None:
    """The reducer that combines results of several parts, or None."""
    reducer = _REDUCERS[eqn.primitive.name]
    dtype = aval_of(eqn.invars[0]).dtype
    if reducer is None or not can_be_summed(dtype):
        return None
    if dtype == np.bool_:
        return _OF_BOOLS[reducer]
    # Complex numbers have no order, so a maximum of them has no neutral element.
    ordered = not jnp.issubdtype(dtype, jnp.complexfloating)
    return reducer if ordered or reducer in ("sum", "prod") else None


def _batch(
    factors: Factors, shape: Sequence[int], batching: set[int], reducer: Reducer | None
) -> Dims:
    """The map of the indices: parallel where they are batched, else reduced."""

    def mapped(dim: int, size: int) -> FactorDim | None:
        if dim in batching:
            return FactorDim(factors.new(size))
        # A dim of one step has no parts.
        if reducer is None or size < 2:
            return None
        return FactorDim(factors.new(size, reducer))

    return tuple(mapped(dim, size) for dim, size in enumerate(shape))


_MERGES_SLICES = jax.__version_info__ < (0, 12)
"""Whether a scatter must not see that its operand is a slice.

For an index that it drops, XLA (of JAX 0.10.2, but not of 0.12) reads the old element.
It makes one slice of the two, and so reads beside the part.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Updates:
    """The rebind of a scatter.

    Attributes:
        rows: the operand's dims that indices pick from.
        elements: how windows are taken apart where rows are cut.
        reducer: combines the results of parts; None where parts cannot be combined.
        reduced: the factors of the indices that are reduced.
        sizes: the steps of each factor, without padding.
        indices: the shape of the indices, without padding.
    """

    rows: Rows
    elements: Elements
    reducer: Reducer | None
    reduced: frozenset[int]
    sizes: tuple[int, ...]
    indices: tuple[int, ...]

    def __call__(self, eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        operand, indices, updates = args
        changed: dict[str, Any] = {}
        padded = shape_of(eqn.invars[1]) != self.indices
        if padded:
            # All of the padding's indices are equal: neither sorted nor unique.
            changed |= {"indices_are_sorted": False, "unique_indices": False}
        if self.rows.are_cut(shape_of(eqn.invars[0]), shard):
            indices = self.of_part(eqn, indices, shard)
            updates = self.elements.apart(updates)
            changed["dimension_numbers"] = self.numbers(eqn)
            # A part must drop the updates of other parts' rows, whatever mode the user
            # chose for rows out of bounds.
            changed["mode"] = lax.GatherScatterMode.FILL_OR_DROP
            changed["indices_are_sorted"] = False
            if _MERGES_SLICES:
                operand = lax.optimization_barrier(operand)
        # Without this, each part of the updates would add the operand once more.
        parts = any(shard.size(f) != self.sizes[f] for f in self.reduced)
        if self.reduced and (parts or padded):
            operand = self.once(operand, holds_first(shard, sorted(self.reduced)))
        return bind(eqn, (operand, indices, updates), **changed)

    def of_part(self, eqn: JaxprEqn, indices: Any, shard: Shard) -> Any:
        """Indices into the part at `shard`; other indices are out of bounds there."""
        clip = eqn.params["mode"] == lax.GatherScatterMode.CLIP
        bounded = self.rows.bounded(indices, clip=clip)
        each = self.elements.indices(bounded)
        local, here = self.rows.of_elements.found_in(shard, each)
        # JAX drops a window that is partly out of bounds as a whole.  Its elements have
        # indices of their own here, so each of them is dropped.
        for mask in (here, self.rows.in_bounds(bounded)):
            mask = lax.broadcast_in_dim(mask, local.shape, range(mask.ndim))
            local = lax.select(mask, local, lax.full_like(local, -1))
        return local

    def numbers(self, eqn: JaxprEqn) -> lax.ScatterDimensionNumbers:
        """The dimension numbers once windows are taken apart."""
        numbers = eqn.params["dimension_numbers"]
        inserted = sorted((*numbers.inserted_window_dims, *self.elements.dims))
        return numbers._replace(
            update_window_dims=self.elements.others,
            inserted_window_dims=tuple(inserted),
        )

    def once(self, operand: Any, counts: Any) -> Any:
        """The operand on the device that `counts`, elsewhere the neutral element."""
        assert self.reducer is not None
        neutral = identity(self.reducer, operand.dtype)
        return lax.select(counts, operand, lax.full_like(operand, neutral))
