"""The dim rule of convolutions: sums over windows of dims, and over features."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.building import Factors, first_step
from jhost.lowering.rules.contract import rebind_product
from jhost.lowering.rules.dim_rule import DimRule, FactorDim, Rebind, Shard, shape_of
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.reducers import COMBINE, Reducer, sum_of
from jhost.lowering.rules.registry import rule
from jhost.lowering.rules.windows import (
    FinerSteps,
    elements_of,
    empty_ends,
    finer_steps,
    is_whole,
    reading_dim,
    window_of,
    without_padding,
)


class _ConvolutionMaps:
    """The maps of a convolution's operands and result, while they are written down."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.eqn = eqn
        self.factors = Factors()
        self.shapes = tuple(shape_of(v) for v in (*eqn.invars, *eqn.outvars))
        self.specs = eqn.params["dimension_numbers"]
        self.maps: tuple[dict[int, FactorDim], ...] = ({}, {}, {})
        self.reducer: Reducer = sum_of(aval_of(eqn.outvars[0]).dtype)

    def size(self, value: int, shard: int) -> int:
        """The size of a dim, by its position in the dimension numbers."""
        return self.shapes[value][self.specs[value][shard]]

    def put(self, value: int, shard: int, mapped: FactorDim) -> None:
        self.maps[value][self.specs[value][shard]] = mapped

    def rule(self, rebind: Rebind) -> DimRule:
        lhs, rhs, out = (
            [mapped.get(dim) for dim in range(len(shape))]
            for mapped, shape in zip(self.maps, self.shapes, strict=True)
        )
        return self.factors.rule([lhs, rhs], [out], rebind)


# `dimension_numbers` has a list of dims for each: (batch, feature, *space) for the left
# and the result, (out feature, in feature, *space) for the kernel.
_LHS, _RHS, _OUT = range(3)


@rule("conv_general_dilated")
def conv_general_dilated(eqn: JaxprEqn) -> DimRule:
    """Batch, features or groups of them, and space, which is read in windows."""
    maps, groups = _ConvolutionMaps(eqn), None
    features, batches = (
        eqn.params[name] for name in ("feature_group_count", "batch_group_count")
    )
    if features == batches == 1:
        _features_together(maps)
    else:
        groups = _in_groups(maps, features, batches)
    if batches == 1:
        batch = FactorDim(maps.factors.new(maps.size(_LHS, 0)))
        maps.put(_LHS, 0, batch)
        maps.put(_OUT, 0, batch)
    spaces = [_space(maps, space) for space in range(len(maps.specs[_LHS]) - 2)]
    made = maps.rule(_rebind(maps, spaces, groups))
    return dataclasses.replace(made, counted=made.windowed)


def _features_together(maps: _ConvolutionMaps) -> None:
    """The left's features are summed over; the kernel's out features are parallel."""
    contracted = FactorDim(maps.factors.new(maps.size(_LHS, 1), maps.reducer))
    maps.put(_LHS, 1, contracted)
    maps.put(_RHS, 1, contracted)
    free = FactorDim(maps.factors.new(maps.size(_RHS, 0)))
    maps.put(_RHS, 0, free)
    maps.put(_OUT, 1, free)


def _in_groups(maps: _ConvolutionMaps, features: int, batches: int) -> int | None:
    """The factor of groups: each group is a convolution of its own."""
    # Features inside of a group stay whole: a part of every group's features would not
    # be a stretch of the dim.
    count = max(features, batches)
    factor = maps.factors.new(count)
    # The groups divide the left's features, or its batch.
    left = 1 if features > 1 else 0
    for value, shard in ((_LHS, left), (_RHS, 0), (_OUT, 1)):
        maps.put(value, shard, FactorDim(factor, maps.size(value, shard) // count))
    return factor


def _space(maps: _ConvolutionMaps, space: int) -> FactorDim | None:
    """How a dim of the left follows positions of the result, or of the kernel.

    In the derivative by the kernel, the "kernel" is the cotangent, as large as the
    result was, and the result is small.  The larger of the two is the factor; where
    it is the kernel, its positions are summed over.
    """
    params, shard = maps.eqn.params, space + 2
    sizes = [maps.size(value, shard) for value in (_LHS, _RHS, _OUT)]
    if not all(sizes):
        return None
    strides = params["window_strides"][space], params["rhs_dilation"][space]
    by_kernel = sizes[_RHS] > sizes[_OUT]
    # Result i and kernel position k read place `stride * i + apart * k`, so the strides
    # change roles with them.
    stride, apart = strides[::-1] if by_kernel else strides
    count, other = (sizes[_RHS], sizes[_OUT])[:: 1 if by_kernel else -1]
    reads = WindowReads(
        size=sizes[_LHS],
        first=-params["padding"][space][0],
        stride=stride,
        extent=(other - 1) * apart + 1,
        dilation=params["lhs_dilation"][space],
        steps=(0, count),
    )
    factor = maps.factors.new(count, maps.reducer if by_kernel else None)
    maps.put(_RHS if by_kernel else _OUT, shard, FactorDim(factor))
    mapped = reading_dim(factor, reads, count)
    maps.put(_LHS, shard, mapped)
    return mapped


def _rebind(
    maps: _ConvolutionMaps, spaces: Sequence[FactorDim | None], groups: int | None
) -> Rebind:
    dims = [maps.specs[value][2:] for value in (_LHS, _RHS, _OUT)]
    by_dim = dict(zip(dims[_LHS], spaces, strict=True))
    reducer = maps.reducer

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        (x, kernel), params = args, dict(eqn.params)
        padding, dilation = [*params["padding"]], [*params["lhs_dilation"]]
        strides, finer = [*params["window_strides"]], dict[int, FinerSteps]()
        x = without_padding(x, [by_dim.get(dim) for dim in range(x.ndim)], shard)
        pairs = [(x, kernel)]
        for space, (lhs, rhs, out, mapped) in enumerate(
            zip(*dims, spaces, strict=True)
        ):
            if is_whole(mapped, shard):
                continue
            assert mapped is not None
            # Places outside of the dim are multiplied and summed too, so 0 there.
            zero = x.dtype.type(0)
            summed = maps.factors.reducers[mapped.factor] is not None
            if summed:
                made, padding[space], dilation[space] = window_of, (0, 0), 1
            else:  # the convolution itself leaves places between the elements
                made, ends = elements_of, empty_ends(mapped, shard)
                if ends is None:
                    steps = finer[out] = finer_steps(mapped, shard)
                    ends, strides[space] = steps.empty_ends, steps.stride
                padding[space] = ends
            pairs = [(made(x, lhs, mapped, shard, zero), k) for x, k in pairs]
            if summed:
                pairs = [
                    piece
                    for x, k in pairs
                    for piece in _full_or_empty(x, k, (lhs, rhs), mapped, shard)
                ]
        if groups is not None:
            grouped = params["feature_group_count"] > 1
            name = "feature_group_count" if grouped else "batch_group_count"
            # JAX checks that the groups divide the features that it gets.  Here it gets
            # the features of the part.
            params[name] = shard.size(groups)
        params |= {
            "padding": tuple(padding),
            "lhs_dilation": tuple(dilation),
            "window_strides": tuple(strides),
        }
        eqn = eqn.replace(params=params)
        made = [rebind_product(eqn, pair, shard) for pair in pairs]
        outs = [functools.reduce(COMBINE[reducer], o) for o in zip(*made, strict=True)]
        for dim, steps in finer.items():
            outs = [steps.wanted(out, dim) for out in outs]
        return outs

    return rebind


def _full_or_empty(
    x: Any, kernel: Any, dims: tuple[int, int], mapped: FactorDim, shard: Shard
) -> list[tuple[Any, Any]]:
    """Pieces of a kernel whose positions are summed over, and the places they read.

    On each device a piece is all padding or has none.  In the first case the places are
    0 too.  If a piece had both, its padding would meet elements of the array, which may
    be NaN.
    """
    reads, count = mapped.reads, shard.size(mapped.factor)
    assert reads is not None
    parts, real = shard.parts(mapped.factor), reads.count
    if count * parts == real:
        return [(x, kernel)]
    if parts == 1:
        return [_piece(x, kernel, dims, reads, (0, real))]
    start, split = first_step(shard, mapped.factor), real % count
    pieces: list[tuple[Any, Any]] = []
    for begin, end in ((0, split), (split, count)):
        if begin == end:
            continue
        places, positions = _piece(x, kernel, dims, reads, (begin, end))
        if (parts - 1) * count + end > real:
            here = lax.broadcast(start + np.int32(end) <= np.int32(real), places.shape)
            places = lax.select(here, places, lax.full_like(places, 0))
        pieces.append((places, positions))
    return pieces


def _piece(
    x: Any,
    kernel: Any,
    dims: tuple[int, int],
    reads: WindowReads,
    steps: tuple[int, int],
) -> tuple[Any, Any]:
    """Some steps of a kernel, and the places that they read."""
    (lhs, rhs), (begin, end) = dims, steps
    first = reads.stride * begin
    x = lax.slice_in_dim(x, first, first + reads.reach(end - begin), axis=lhs)
    return x, lax.slice_in_dim(kernel, begin, end, axis=rhs)
