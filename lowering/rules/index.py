"""Dim rules of slices, lookups and updates at computed indices.

The dims that are indexed stay whole, so that an index means the same in each part, in
bounds or out of them.  A dim taken in full counts as not indexed: the one start in
bounds is 0, for the whole and for a part alike.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from jax.extend.core import JaxprEqn

from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    Factors,
    along,
    rebind_local,
    rule,
    shape_of,
    without,
)


@rule("dynamic_slice")
def dynamic_slice(eqn: JaxprEqn) -> DimRule:
    """Dims sliced in full are factors."""
    indexed = _differing(shape_of(eqn.invars[0]), eqn.params["slice_sizes"])
    return along(eqn, indexed, sizes="slice_sizes")


@rule("dynamic_update_slice")
def dynamic_update_slice(eqn: JaxprEqn) -> DimRule:
    """Dims updated in full are factors."""
    operand, update, *_ = eqn.invars
    return along(eqn, _differing(shape_of(operand), shape_of(update)))


def _differing(shape: Sequence[int], other: Sequence[int]) -> list[int]:
    sizes = enumerate(zip(shape, other, strict=True))
    return [dim for dim, (size, part) in sizes if size != part]


@rule("gather")
def gather(eqn: JaxprEqn) -> DimRule:
    """Dims of the indices are factors, and so are operand dims gathered in full.

    A batching dim is a dim of both the indices and the operand.
    """
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = (shape_of(v) for v in eqn.invars)
    batching = _pairs(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims
    )
    missing = (*numbers.collapsed_slice_dims, *batching)
    factors = Factors()
    batch = factors.dims(indices[:-1])
    window = factors.dims(operand, whole=(*missing, *_differing(operand, sizes)))
    result = _interleave(without(window, missing), numbers.offset_dims, batch)
    return factors.rule(
        [_batched(window, batching, batch), (*batch, None)],
        [result],
        rebind_local("slice_sizes", window),
    )


@rule(
    "scatter",
    "scatter-add",
    "scatter-max",
    "scatter-min",
    "scatter-mul",
    "scatter-sub",
)
def scatter(eqn: JaxprEqn) -> DimRule:
    """Batching dims are factors, and so are operand dims updated in full.

    The other dims of the indices stay whole: each part of the operand may be hit by
    any of the updates.
    """
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = (shape_of(v) for v in eqn.invars)
    batching = _pairs(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    )
    missing = (*numbers.inserted_window_dims, *batching)
    present = [dim for dim in range(len(operand)) if dim not in missing]
    partial = [
        dim
        for dim, update_dim in zip(present, numbers.update_window_dims, strict=True)
        if operand[dim] != updates[update_dim]
    ]
    looped = set(range(len(indices))) - set(batching.values())
    factors = Factors()
    batch = factors.dims(indices[:-1], whole=looped)
    window = factors.dims(operand, whole=(*missing, *partial))
    result = _batched(window, batching, batch)
    update = _interleave(without(window, missing), numbers.update_window_dims, batch)
    return factors.rule([result, (*batch, None), update], [result])


def _pairs(operand_dims: Sequence[int], indices_dims: Sequence[int]) -> dict[int, int]:
    """The batching dims: of the operand, to those of the indices."""
    return dict(zip(operand_dims, indices_dims, strict=True))


def _batched(window: Dims, batching: Mapping[int, int], batch: Dims) -> Dims:
    """The operand's map: its batching dims follow those of the indices."""
    return tuple(
        batch[batching[dim]] if dim in batching else mapped
        for dim, mapped in enumerate(window)
    )


def _interleave(window: Dims, positions: Container[int], batch: Dims) -> Dims:
    """The map that has `window` at `positions` and `batch` elsewhere, in order."""
    windows, batches = iter(window), iter(batch)
    return tuple(
        next(windows) if position in positions else next(batches)
        for position in range(len(window) + len(batch))
    )
