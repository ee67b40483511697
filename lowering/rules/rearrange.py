"""Dim rules of slices, pads, reversals and concatenations.

An element of the result is an element of an operand at another place, or padding.  So
a part of the result reads a window of the operand, as long as the part and elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.building import Factors, along, first_step
from jhost.lowering.rules.dim_rule import (
    DimRule,
    FactorDim,
    Shard,
    bind,
    part_shape,
    shape_of,
)
from jhost.lowering.rules.joining import in_a_row, joining
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.reducers import identity, sum_of
from jhost.lowering.rules.registry import rule
from jhost.lowering.rules.rows import can_be_summed
from jhost.lowering.rules.windows import (
    has_windows,
    is_whole,
    part_of_whole,
    reading,
    slice_or_fill,
    window_of,
    without_padding,
)

MOST_PIECES = 32
"""The most operands of a concatenation, or copies in a tiling, that are joined."""

_FEW = 16
"""With fewer elements than this far apart, some devices may have none."""


def _one_operand(
    eqn: JaxprEqn, reads: dict[int, WindowReads], others: Sequence[Any] = ()
) -> DimRule:
    """The rule where each element of the result is an element of the first operand.

    `reads` has the dims along which it has another position there.
    """
    operand, result = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    factors = Factors()
    pairs = [
        reading(factors, reads[dim], result[dim])
        if dim in reads
        else (FactorDim(factors.new(size)),) * 2
        for dim, size in enumerate(operand)
    ]
    operands, results = zip(*pairs, strict=True) if pairs else ((), ())
    made = factors.rule([operands, *others], [results])
    return dataclasses.replace(made, counted=made.windowed)


@rule("slice")
def slice(eqn: JaxprEqn) -> DimRule:
    """Dims that get shorter are read with an offset."""
    shapes = zip(shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), strict=True)
    cut = [dim for dim, (size, left) in enumerate(shapes) if size != left]
    if not has_windows(eqn):
        return along(eqn, cut, sizes="limit_indices")
    if any(map(functools.partial(_is_small, eqn), cut)):
        return _small_slice(eqn, cut)
    starts, strides = eqn.params["start_indices"], _strides(eqn, cut)
    result = shape_of(eqn.outvars[0])
    made = _one_operand(
        eqn,
        {
            dim: WindowReads(
                size=shape_of(eqn.invars[0])[dim],
                first=starts[dim],
                stride=strides[dim],
                steps=(0, result[dim]),
            )
            for dim in cut
        },
    )
    return dataclasses.replace(made, rebind=_slice_part(made, strides))


def _strides(eqn: JaxprEqn, cut: Sequence[int]) -> list[int]:
    """The strides of dims that get shorter.  Where one row is all, a stride is 1."""
    strides = eqn.params["strides"] or (1,) * len(eqn.params["start_indices"])
    return [stride if dim in cut else 1 for dim, stride in enumerate(strides)]


def _is_small(eqn: JaxprEqn, dim: int) -> bool:
    """Whether so little is left of a dim that devices add up what each has of it.

    A dim of one element has no parts.  Without the sum, the operand would have to be
    whole on every device.
    """
    size, left = (shape_of(v)[dim] for v in (eqn.invars[0], eqn.outvars[0]))
    strides = eqn.params["strides"]
    # Elements far apart lie on all devices: each has its own, unless there are few.
    apart = strides is not None and 8 * strides[dim] * left > size
    little = left == 1 or (8 * left <= size and (left < _FEW or not apart))
    return little and can_be_summed(aval_of(eqn.invars[0]).dtype)


def _small_slice(eqn: JaxprEqn, cut: Sequence[int]) -> DimRule:
    """A slice that leaves little of a dim: each device gives the elements it has.

    The sum over the devices is the slice.  Other dims that get shorter stay whole.
    """
    shape, starts = shape_of(eqn.invars[0]), eqn.params["start_indices"]
    small = {dim for dim in cut if _is_small(eqn, dim)}
    whole = [dim for dim in cut if dim not in small]
    reducer = sum_of(aval_of(eqn.invars[0]).dtype)
    factors = Factors()
    dims = [
        None
        if dim in whole
        else FactorDim(factors.new(size, reducer if dim in small else None))
        for dim, size in enumerate(shape)
    ]
    results = [None if dim in small else mapped for dim, mapped in enumerate(dims)]
    made = factors.rule([dims], [results])

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        (x,), strides = args, _strides(eqn, cut)
        limits = eqn.params["limit_indices"]
        filled = {
            dim: mapped.factor
            for dim, mapped in enumerate(dims)
            if mapped and dim in small and shard.size(mapped.factor) != shape[dim]
        }
        # What all devices cut alike comes first, so less is filled.
        alike = [dim for dim in cut if dim not in filled]
        x = _cut(x, alike, starts, limits, strides)
        for dim, factor in filled.items():
            first = starts[dim] - first_step(shard, factor)
            size, nothing = shape_of(eqn.outvars[0])[dim], identity(reducer, x.dtype)
            x = slice_or_fill(x, dim, first, size, nothing, strides[dim])
        return [x]

    picked = frozenset(d.factor for n, d in enumerate(dims) if d and n in small)
    return dataclasses.replace(made, rebind=rebind, counted=picked, picked=picked)


def _cut(
    x: Any,
    dims: Collection[int],
    starts: Sequence[int],
    limits: Sequence[int],
    strides: Sequence[int],
) -> Any:
    """A slice of some dims, with the others as they are."""
    each = [
        (starts[d], limits[d], strides[d]) if d in dims else (0, size, 1)
        for d, size in enumerate(x.shape)
    ]
    return lax.slice(x, *zip(*each, strict=True)) if each else x


def _slice_part(made: DimRule, strides: Sequence[int]) -> Any:
    (dims,), (results,) = made.operands, made.results

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        (x,), starts = args, list(eqn.params["start_indices"])
        sizes = part_shape(results, shape_of(eqn.outvars[0]), shard)
        for dim, mapped in enumerate(dims):
            if not is_whole(mapped, shard):
                assert mapped is not None
                x = window_of(x, dim, mapped, shard)
                starts[dim] = 0
        limits = [
            start + (size - 1) * stride + 1 if size else start
            for start, size, stride in zip(starts, sizes, strides, strict=True)
        ]
        return [lax.slice(x, starts, limits, strides)]

    return rebind


@rule("rev")
def rev(eqn: JaxprEqn) -> DimRule:
    """Reversed dims are read from their other end."""
    shape, reversed_dims = shape_of(eqn.invars[0]), eqn.params["dimensions"]
    if not has_windows(eqn):
        return along(eqn, reversed_dims)
    reads = {
        dim: WindowReads(
            size=shape[dim], first=shape[dim] - 1, stride=-1, steps=(0, shape[dim])
        )
        for dim in reversed_dims
    }
    made = _one_operand(eqn, reads)
    (dims,) = made.operands

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        x = without_padding(args[0], dims, shard)
        for dim, mapped in enumerate(dims):
            if not is_whole(mapped, shard):
                assert mapped is not None
                x = window_of(x, dim, mapped, shard)
        return bind(eqn, [x])

    return dataclasses.replace(made, rebind=rebind)


@rule("pad")
def pad(eqn: JaxprEqn) -> DimRule:
    """Padded dims are read with an offset; no element is read where padding is.

    A dim that is mostly padding is whole in the operand, as in a concatenation.
    """
    config, shape = eqn.params["padding_config"], shape_of(eqn.invars[0])
    padded = [dim for dim, widths in enumerate(config) if any(widths)]
    if not has_windows(eqn):
        return along(eqn, padded)
    result = shape_of(eqn.outvars[0])
    reads = {
        dim: WindowReads(
            size=shape[dim],
            first=-config[dim][0],
            dilation=config[dim][2] + 1,
            steps=(0, result[dim]),
        )
        for dim in padded
    }
    made = _one_operand(eqn, reads, others=[()])
    dims, _ = made.operands
    small = {
        dim
        for dim, mapped in enumerate(dims)
        if mapped and mapped.reads and _is_small_piece(shape[dim], result[dim])
        if mapped.reads.dilation == 1
    }

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        x, value = args
        x, widths = without_padding(x, dims, shard), list(config)
        for dim, mapped in enumerate(dims):
            if not is_whole(mapped, shard):
                assert mapped is not None
                window = part_of_whole if dim in small else window_of
                x = window(x, dim, mapped, shard, value)
                widths[dim] = (0, 0, 0)
        return bind(eqn, [x, value], padding_config=tuple(widths))

    held = [None if dim in small else mapped for dim, mapped in enumerate(dims)]
    return dataclasses.replace(made, operands=(tuple(held), ()), rebind=rebind)


def _is_small_piece(size: int, total: int) -> bool:
    """Whether a piece is up to a quarter of the result, so that operands come whole.

    Only the devices of that quarter need any of it, and windows would send to all.
    """
    return 4 * size <= total


# --- Concatenations --------------------------------------------------------------- #


@rule("concatenate")
def concatenate(eqn: JaxprEqn) -> DimRule:
    """Operands are joined; those that are a small part of the result are whole."""
    dim = eqn.params["dimension"]
    sizes = [shape_of(v)[dim] for v in eqn.invars]
    if not has_windows(eqn) or len(sizes) > MOST_PIECES or not sum(sizes):
        return along(eqn, (dim,))
    return joining(eqn, dim, in_a_row(range(len(sizes)), sizes), whole=_small(sizes))


@rule("tile")
def tile(eqn: JaxprEqn) -> DimRule:
    """Copies of the operand are joined, if the equation repeats one dim."""
    shape, reps = shape_of(eqn.invars[0]), eqn.params["reps"]
    repeated = [dim for dim, n in enumerate(reps) if n != 1]
    if len(repeated) != 1 or not has_windows(eqn):
        return along(eqn, repeated)
    (dim,) = repeated
    if reps[dim] > MOST_PIECES or not reps[dim] * shape[dim]:
        return along(eqn, repeated)
    return joining(eqn, dim, in_a_row([0] * reps[dim], [shape[dim]] * reps[dim]))


def _small(sizes: Sequence[int]) -> set[int]:
    """The operands that come whole: together they are much less than another one.

    Only the devices of their part of the result need any of them, and each permute
    sends to all.
    """
    order = sorted(range(len(sizes)), key=lambda n: sizes[n])
    ends = itertools.accumulate(sizes[n] for n in order)
    return {n for n, end in zip(order, ends, strict=True) if 8 * end <= max(sizes)}
