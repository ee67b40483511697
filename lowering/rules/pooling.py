"""Dim rules of windows that slide over dims: reductions, and their derivatives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.building import Factors, first_step
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Rebind,
    Shard,
    bind,
    shape_of,
)
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.reducers import (
    Reducer,
    from_zero,
    has_identity,
    identity,
)
from jhost.lowering.rules.registry import rule
from jhost.lowering.rules.skipped_places import skipping
from jhost.lowering.rules.windows import (
    elements_of,
    is_whole,
    padded,
    reading,
    slice_or_fill,
    window_of,
    without_padding,
)

_REDUCERS: dict[str, Reducer] = {
    "reduce_window_max": "max",
    "reduce_window_min": "min",
    "reduce_window_sum": "sum",
}
_FUNCTIONS: dict[str, Reducer] = {
    "add": "sum",
    "mul": "prod",
    "max": "max",
    "min": "min",
    "and": "and",
    "or": "or",
}
"""The reducers that a function of one primitive is."""


@rule("reduce_window", *_REDUCERS, "select_and_gather_add")
def windows(eqn: JaxprEqn) -> DimRule:
    """A dim that a window slides over is read in windows.

    XLA skips places without an element.  A value that changes nothing stands there.
    Where there is none, as for a function of the user's, each element says that it is
    one.
    """
    (first, *_), result = eqn.invars, shape_of(eqn.outvars[0])
    factors, fills = Factors(), _fills(eqn)
    pairs = [
        reading(factors, reads_of(eqn, dim, size), result[dim])
        for dim, size in enumerate(shape_of(first))
    ]
    operand, out = zip(*pairs, strict=True) if pairs else ((), ())
    # Initial values are scalars.
    operands = [operand if shape_of(v) else () for v in eqn.invars]
    made = factors.rule(operands, [out] * len(eqn.outvars), _rebind(operand, fills))
    return dataclasses.replace(made, counted=made.windowed)


def _reducer(eqn: JaxprEqn) -> Reducer | None:
    """The reducer of a sum, a maximum and their like; of functions, if it has one."""
    if eqn.primitive.name != "reduce_window":
        return _REDUCERS[eqn.primitive.name]
    made = eqn.params["jaxpr"]
    if len(made.eqns) != 1 or len(eqn.invars) != 2:
        return None
    (combined,) = made.eqns
    # The function may give one of its arguments to both sides.
    if {*map(id, combined.invars)} != {*map(id, made.invars)}:
        return None
    return _FUNCTIONS.get(combined.primitive.name)


def _has_gaps(eqn: JaxprEqn, dim: int) -> bool:
    """Whether a window may slide over places of a dim that have no element."""
    return any(eqn.params["padding"][dim]) or eqn.params["base_dilation"][dim] > 1


def reads_of(eqn: JaxprEqn, dim: int, size: int) -> WindowReads:
    """The elements that a window reads while it slides over a dim."""
    params = eqn.params
    apart = params["window_dilation"][dim]
    return WindowReads(
        size=size,
        first=-params["padding"][dim][0],
        stride=params["window_strides"][dim],
        extent=(params["window_dimensions"][dim] - 1) * apart + 1,
        dilation=params["base_dilation"][dim],
        steps=(0, shape_of(eqn.outvars[0])[dim]),
    )


def _fills(eqn: JaxprEqn) -> Sequence[Any]:
    """For each operand, the value that changes nothing; None if it is not known."""
    if eqn.primitive.name == "select_and_gather_add":
        return [None, None]  # what comes behind NaN is taken, whatever it is
    reducer, dtype = _reducer(eqn), aval_of(eqn.invars[0]).dtype
    if reducer is None or not has_identity(reducer, dtype):
        return [None] * (len(eqn.invars) // 2)  # the others are initial values
    return [identity(reducer, dtype)]


def _rebind(dims: Dims, fills: Sequence[Any]) -> Rebind:
    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        operands, initial = args[: len(fills)], args[len(fills) :]
        cut = [dim for dim, mapped in enumerate(dims) if not is_whole(mapped, shard)]
        skips = fills[0] is None and any(_has_gaps(eqn, dim) for dim in cut)
        values = [*fills, np.False_] if skips else fills
        if skips:
            operands = [*operands, lax.full(operands[0].shape, True)]
        operands = [without_padding(x, dims, shard) for x in operands]
        padding, dilation = [*eqn.params["padding"]], [*eqn.params["base_dilation"]]
        for dim in cut:
            mapped = dims[dim]
            assert mapped is not None
            padding[dim], dilation[dim] = (0, 0), 1
            operands = [
                window_of(x, dim, mapped, shard, fill)
                for x, fill in zip(operands, values, strict=True)
            ]
        changed = {"padding": tuple(padding), "base_dilation": tuple(dilation)}
        if skips:
            return skipping(eqn, operands, initial, changed)
        return bind(eqn, [*operands, *initial], **changed)

    return rebind


# --- The gradient of a maximum in windows ------------------------------------ #


@rule("select_and_scatter_add")
def scattered(eqn: JaxprEqn) -> DimRule:
    """A step of a dim's factor is the stretch between two starts of windows.

    It reads all windows that reach into it, and the cotangent of each of them.  Where
    the stride does not divide the size, a step is as long as divides both.
    """
    source, operand = (shape_of(v) for v in eqn.invars)
    factors = Factors()
    maps = [
        _handed_back(factors, eqn, dim, steps, size)
        for dim, (steps, size) in enumerate(zip(source, operand, strict=True))
    ]
    values, windows, results = zip(*maps, strict=True) if maps else ((), (), ())
    rebind = _rebind_scattered(values, windows, results)
    made = factors.rule([values, windows], [results], rebind)
    return dataclasses.replace(made, counted=made.windowed)


def _handed_back(
    factors: Factors, eqn: JaxprEqn, dim: int, count: int, size: int
) -> tuple[FactorDim | None, FactorDim | None, FactorDim | None]:
    """How the cotangents, the operand and the result of one dim follow a factor."""
    if not size or not count:
        return None, None, None
    names = "window_dimensions", "window_strides", "padding"
    extent, stride, (low, _) = (eqn.params[name][dim] for name in names)
    step = math.gcd(size, stride)
    factor, steps = factors.new(size // step), (0, size // step)
    # Window w is at place `w * stride // step`.  Windows at places `i + first` to
    # `i + last` reach into step i.  A missing one hands 0 back.
    first, last = -(-(low - extent + 1) // step), (step - 1 + low) // step
    reached = WindowReads(
        size=count,
        first=first,
        extent=last - first + 1,
        dilation=stride // step,
        steps=steps,
    )
    read = WindowReads(
        size=size,
        first=first * step - low,
        stride=step,
        extent=(last - first) * step + extent,
        steps=steps,
    )
    # Windows do not overlap: each step reads its own elements.
    if (count, step, read.first) == (size // step, stride, 0) and extent <= stride:
        return FactorDim(factor), FactorDim(factor, step), FactorDim(factor, step)
    values, windows = (FactorDim(factor, reads=each) for each in (reached, read))
    return values, windows, FactorDim(factor, step)


def _rebind_scattered(values: Dims, windows: Dims, results: Dims) -> Rebind:
    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        prim, dtype = eqn.params["select_prim"].name, aval_of(eqn.invars[1]).dtype
        nothing = identity("max" if prim == "ge" else "min", dtype)
        source = without_padding(args[0], values, shard)
        operand = without_padding(args[1], windows, shard)
        padding, zero = [*eqn.params["padding"]], lax.full((), 0, source.dtype)
        starts: list[Any] = [0] * operand.ndim
        for dim, (value, window) in enumerate(zip(values, windows, strict=True)):
            if is_whole(window, shard):
                continue
            assert value is not None
            assert window is not None
            assert window.reads is not None
            stride, extent = (eqn.params[name][dim] for name in _EXTENT)
            source = elements_of(source, dim, value, shard, zero)
            operand = window_of(operand, dim, window, shard, nothing)
            ahead = _ahead(value, window, stride, padding[dim][0], shard)
            reach = (source.shape[dim] - 1) * stride + extent
            operand = _cut(operand, dim, ahead, reach, nothing)
            padding[dim], starts[dim] = (0, 0), -window.reads.first - ahead
        # XLA adds the cotangents to 0, but takes a single one for its own sum.
        if source.size == 1 < math.prod(shape_of(eqn.invars[0])):
            source = from_zero(source)
        (made,) = bind(eqn, [source, operand], padding=tuple(padding))
        # Elements that no window reaches get 0.
        for dim, (start, result) in enumerate(zip(starts, results, strict=True)):
            if result is not None:
                size = shard.size(result.factor) * result.scale
                made = _cut(made, dim, start, size, zero)
        return [made]

    return rebind


_EXTENT = "window_strides", "window_dimensions"


def _ahead(
    value: FactorDim, window: FactorDim, stride: int, low: int, shard: Shard
) -> Any:
    """How far behind the first element that is read the first window here begins."""
    reached, read, count = value.reads, window.reads, shard.size(value.factor)
    assert reached is not None
    assert read is not None

    def ahead(step: Any) -> Any:
        return reached.start(step, count) * stride - low - read.shard(step, count)

    parts = min(shard.parts(value.factor), reached.dilation)
    everywhere = {ahead(part * count) for part in range(parts)}
    alike = len(everywhere) == 1
    return everywhere.pop() if alike else ahead(first_step(shard, value.factor))


def _cut(x: Any, dim: int, start: Any, size: int, fill: Any) -> Any:
    """`size` elements of a dim, and `fill` where `x` has none."""
    if isinstance(start, int):
        return padded(x, dim, fill, (-start, start + size - x.shape[dim]))
    return slice_or_fill(x, dim, start, size, fill)
