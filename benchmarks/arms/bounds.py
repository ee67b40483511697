"""The two limits: the local matmuls alone, and the communications alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from benchmarks.arms.base import Built, Function, forward_or_both, per_device
from benchmarks.axes import Axes
from benchmarks.case import Case, Operand, types_of
from benchmarks.cases import RING, WHOLE_LAYERS
from benchmarks.communication import AXIS, InPlace

_LARGE = 1 << 31
"""Bytes; results above it are not returned whole."""


def compute(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """Each device's matmuls as if the rows of all had always been there.

    Whole values are stacked, one copy for each device, so that none of their gradients
    has to be summed.
    """
    comes = _comes(case)
    keep_rows = case.kind in WHOLE_LAYERS
    axes = case.axes
    operands = [_own_copies(o, axes) for o in case.operands]
    if comes:
        rows, *rest = comes
        operands.append(Operand("placed", (axes.devices * rows, *rest), axes.rows))

    def part(*operands: jax.Array) -> jax.Array:
        placed = operands[-1] if comes else None
        return case.run(InPlace(placed, keep_rows), operands[: len(case.operands)])

    out = axes.columns if case.out_spec == axes.columns else axes.rows
    function = per_device(part, mesh, [o.spec for o in operands], out)
    instance = forward_or_both(function, backward)
    if backward:
        operands.append(_cotangent(function, operands, out))
        # Without residuals x is not computed with: its gradient would be a fill.
        instance = _without_first_gradient(instance) if _unused_x(case) else instance
    return [Built(instance=instance, operands=tuple(operands), checked=False)]


def _comes(case: Case) -> tuple[int, ...]:
    """The shape of what comes first to each device: its own part, after an exchange.

    For keys it has the others' keys only: each device's own are operands.
    """
    for kind, (first, *rest) in case.moved(False):
        if case.kind == RING:
            return first - first // case.axes.tp, *rest
        if kind == "gather":
            return first, *rest
        if kind == "exchange":
            return first, rest[0] // case.axes.tp, *rest[1:]
    return ()


def _own_copies(operand: Operand, axes: Axes) -> Operand:
    """The operand with the parts of devices that have the same one along dim 0."""
    copied = axes.unnamed(operand.spec)
    if not copied:
        return operand
    (first, *rest), (rows, *others) = tuple(operand.spec) or (None,), operand.shape
    named = first if isinstance(first, tuple) else (first,) if first else ()
    sizes = dict(axes.sizes)
    return dataclasses.replace(
        operand,
        shape=(rows * math.prod(sizes[axis] for axis in copied), *others),
        spec=P((*copied, *named), *rest),
    )


def _cotangent(function: Function, operands: Sequence[Operand], out: P) -> Operand:
    found = jax.eval_shape(function, *types_of(operands))
    return Operand("cotangent", found.shape, out)


def _unused_x(case: Case) -> bool:
    computed = case.kind in (*WHOLE_LAYERS, RING)
    return not computed and case.moved(False)[0][0] in ("gather", "exchange")


def _without_first_gradient(both: Function) -> Function:
    def instance(*operands: Any) -> Any:
        result, _, *gradients = both(*operands)
        return (result, *gradients)

    return instance


def communication(case: Case, mesh: Mesh, backward: bool) -> list[Built]:
    """The case's collectives one after another, with nothing between them."""
    moved, axes = case.moved(backward), case.axes
    operands = tuple(
        Operand(f"{kind}_{n}", _sent(kind, shape, axes), axes.stacked)
        for n, (kind, shape) in enumerate(moved)
    )

    def part(*operands: jax.Array) -> tuple[jax.Array, ...]:
        results: list[jax.Array] = []
        for (kind, _), x in zip(moved, operands, strict=True):
            if results:
                x, results[-1] = lax.optimization_barrier((x, results[-1]))
            results.append(_collective(kind, x, axes.batch))
        return tuple(_kept(result) for result in results)

    outs = (axes.stacked,) * len(moved)
    function = per_device(part, mesh, [o.spec for o in operands], outs, check=False)
    return [Built(instance=function, operands=operands, checked=False)]


def _sent(kind: str, shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    """The global shape of what is sent: partial sums are whole on every device."""
    rows, *rest = shape
    parts = axes.groups if kind in ("gather", "exchange") else axes.devices
    return (parts * rows, *rest)


def _collective(kind: str, x: jax.Array, batch: tuple[str, ...]) -> jax.Array:
    if kind == "gather":
        return lax.all_gather(x, AXIS, tiled=True)
    if kind == "scatter":
        return lax.psum_scatter(x, AXIS, tiled=True)
    if kind == "send":
        size = lax.axis_size(AXIS)
        return lax.ppermute(x, AXIS, [(n, (n + 1) % size) for n in range(size)])
    if kind == "exchange":
        return lax.all_to_all(x, AXIS, split_axis=1, concat_axis=0, tiled=True)
    return lax.psum(x, batch if kind == "sum" else AXIS)


def _kept(result: jax.Array) -> jax.Array:
    """The result, or the first rows of one too large to return from several calls."""
    if 2 * math.prod(result.shape) < _LARGE:
        return result
    return lax.slice_in_dim(lax.optimization_barrier(result), 0, 8)
