"""Dim rules of updates at indices, such as the gradient of an embedding's table.

Each device may make some of the updates; what they come to is then reduced over the
devices, and the operand counts on one of them.  A device that has some rows of the
operand makes the updates of those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

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
    rule,
    shape_of,
)
from jhost.lowering.rules.elements import Elements, elements_of
from jhost.lowering.rules.reducers import Reducer, identity
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
    "scatter-sub": "sum",  # of what is taken away, from 0 but for the first
}
_OF_BOOLS: Mapping[Reducer, Reducer] = {"max": "or", "min": "and"}


@rule(*_REDUCERS)
def scatter(eqn: JaxprEqn) -> DimRule:
    """Batching dims are factors, and so are operand dims updated in full.

    A dim of which single elements are updated is a factor: a part of it takes the
    updates that hit it.  The other dims of the indices are reduced over, if updates are
    combined.
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
    """What combines the updates of several parts, if anything does."""
    reducer = _REDUCERS[eqn.primitive.name]
    dtype = aval_of(eqn.invars[0]).dtype
    if reducer is None or not can_be_summed(dtype):
        return None
    if dtype == np.bool_:
        return _OF_BOOLS[reducer]
    # Complex numbers have no least one to begin a maximum with.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Updates:
    """The rebind; `sizes` and `indices`, a shape, are as before any padding."""

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
            # The indices of padding are neither sorted nor unique.
            changed |= {"indices_are_sorted": False, "unique_indices": False}
        if self.rows.are_cut(shape_of(eqn.invars[0]), shard):
            indices = self.of_part(eqn, indices, shard)
            updates = self.elements.apart(updates)
            changed["dimension_numbers"] = self.numbers(eqn)
            # Updates of other parts' rows are dropped here, whatever the user's mode.
            changed["mode"] = lax.GatherScatterMode.FILL_OR_DROP
            changed["indices_are_sorted"] = False
        # Else each part of the updates would add the operand once more.
        parts = any(shard.size(f) != self.sizes[f] for f in self.reduced)
        if parts or padded:
            operand = self.once(operand, holds_first(shard, sorted(self.reduced)))
        return bind(eqn, (operand, indices, updates), **changed)

    def of_part(self, eqn: JaxprEqn, indices: Any, shard: Shard) -> Any:
        """Indices into the part at `shard`; those of other parts are out of bounds."""
        clip = eqn.params["mode"] == lax.GatherScatterMode.CLIP
        bounded = self.rows.bounded(indices, clip=clip)
        each = self.elements.indices(bounded)
        local, here = self.rows.of_elements.found_in(shard, each)
        # A window that is not all in bounds is dropped as a whole.
        for mask in (here, self.rows.in_bounds(bounded)):
            mask = lax.broadcast_in_dim(mask, local.shape, range(mask.ndim))
            local = lax.select(mask, local, lax.full_like(local, -1))
        return local

    def numbers(self, eqn: JaxprEqn) -> lax.ScatterDimensionNumbers:
        """Which dims are which once windows are taken apart."""
        numbers = eqn.params["dimension_numbers"]
        inserted = sorted((*numbers.inserted_window_dims, *self.elements.dims))
        return numbers._replace(
            update_window_dims=self.elements.others,
            inserted_window_dims=tuple(inserted),
        )

    def once(self, operand: Any, counts: Any) -> Any:
        """The operand where it counts, elsewhere what changes nothing."""
        assert self.reducer is not None
        neutral = identity(self.reducer, operand.dtype)
        return lax.select(counts, operand, lax.full_like(operand, neutral))
