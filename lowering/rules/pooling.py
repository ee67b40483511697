"""Dim rules of windows that slide over dims: reductions, and their derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.building import Factors, along
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Place,
    Rebind,
    bind,
    rule,
    shape_of,
)
from jhost.lowering.rules.reads import Reads
from jhost.lowering.rules.reducers import Reducer, identity
from jhost.lowering.rules.windows import (
    is_whole,
    reading,
    window_of,
    without_padding,
)

_REDUCERS: dict[str, Reducer] = {
    "reduce_window_max": "max",
    "reduce_window_min": "min",
    "reduce_window_sum": "sum",
}


@rule("reduce_window", *_REDUCERS, "select_and_gather_add")
def windows(eqn: JaxprEqn) -> DimRule:
    """A dim that a window slides over is read in windows."""
    (first, *_), result = eqn.invars, shape_of(eqn.outvars[0])
    factors = Factors()
    pairs = [
        reading(factors, reads_of(eqn, dim, size), result[dim])
        for dim, size in enumerate(shape_of(first))
    ]
    operand, out = zip(*pairs, strict=True) if pairs else ((), ())
    # Initial values are scalars.
    operands = [operand if shape_of(v) else () for v in eqn.invars]
    made = factors.rule(
        operands, [out] * len(eqn.outvars), _rebind(operand, _fills(eqn))
    )
    return dataclasses.replace(made, counted=made.windowed)


def reads_of(eqn: JaxprEqn, dim: int, size: int) -> Reads:
    """What a window reads that slides over a dim."""
    params = eqn.params
    apart = params["window_dilation"][dim]
    return Reads(
        size=size,
        first=-params["padding"][dim][0],
        stride=params["window_strides"][dim],
        extent=(params["window_dimensions"][dim] - 1) * apart + 1,
        dilation=params["base_dilation"][dim],
        steps=(0, shape_of(eqn.outvars[0])[dim]),
    )


def _fills(eqn: JaxprEqn) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What each operand has where its padding is, out of the operands."""
    name = eqn.primitive.name
    if name == "reduce_window":
        return lambda args: args[len(args) // 2 :]
    dtypes = [aval_of(v).dtype for v in eqn.invars]
    if name == "select_and_gather_add":
        extreme = "max" if eqn.params["select_prim"].name == "ge" else "min"
        fills = [np.zeros((), dtypes[0])[()], identity(extreme, dtypes[1])]
    else:
        fills = [identity(_REDUCERS[name], dtypes[0])]
    return lambda args: fills


def _rebind(dims: Dims, fills_of: Callable[[Sequence[Any]], Sequence[Any]]) -> Rebind:
    def rebind(eqn: JaxprEqn, args: Sequence[Any], place: Place) -> list[Any]:
        fills = fills_of(args)
        padding, dilation = [*eqn.params["padding"]], [*eqn.params["base_dilation"]]
        operands = [without_padding(x, dims, place) for x in args[: len(fills)]]
        for dim, mapped in enumerate(dims):
            if not is_whole(mapped, place):
                assert mapped is not None
                padding[dim], dilation[dim] = (0, 0), 1
                operands = [
                    window_of(x, dim, mapped, place, fill)
                    for x, fill in zip(operands, fills, strict=True)
                ]
        changed = {"padding": tuple(padding), "base_dilation": tuple(dilation)}
        return bind(eqn, [*operands, *args[len(fills) :]], **changed)

    return rebind


@rule("select_and_scatter_add")
def scattered(eqn: JaxprEqn) -> DimRule:
    """A dim has a factor where no two windows share elements, and none has padding."""
    source, operand = (shape_of(v) for v in eqn.invars)
    names = "window_dimensions", "window_strides", "padding"
    params = zip(*(eqn.params[name] for name in names), strict=True)
    apart = [
        window <= stride and tuple(padding) == (0, 0) and size == steps * stride
        for (window, stride, padding), size, steps in zip(
            params, operand, source, strict=True
        )
    ]
    if not any(apart):
        return along(eqn, range(len(operand)))
    factors = Factors()
    whole = [dim for dim, alone in enumerate(apart) if not alone]
    dims = factors.dims(source, whole=whole)
    scaled = [
        mapped and FactorDim(mapped.factor, stride)
        for mapped, stride in zip(dims, eqn.params["window_strides"], strict=True)
    ]
    return factors.rule([dims, scaled], [scaled])
