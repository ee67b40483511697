"""The dim rule of equations that join elements of their operands along a dim."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.dim_rule import (
    DimRule,
    FactorDim,
    JoinedReads,
    Shard,
    bind,
    shape_of,
)
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.windows import padded


def joining(
    eqn: JaxprEqn,
    dim: int,
    reads: Sequence[tuple[int, WindowReads]],
    whole: Container[int] = (),
) -> DimRule:
    """The rule of an equation that reads its operands so along `dim`, in that order.

    All devices have the operands in `whole` whole.
    """
    shapes, result = [shape_of(v) for v in eqn.invars], shape_of(eqn.outvars[0])
    factors = Factors()
    dims = factors.dims(result, whole=(dim,))
    factor = factors.new(result[dim])
    # If an element is read several times, the first window is enough: `joined` has them
    # all.
    first = dict(reversed(reads))

    def with_dim(mapped: FactorDim | None) -> list[FactorDim | None]:
        return [*dims[:dim], mapped, *dims[dim + 1 :]]

    operands = [
        with_dim(None if n in whole else FactorDim(factor, reads=first[n]))
        for n in range(len(shapes))
    ]
    made = factors.rule(operands, [with_dim(FactorDim(factor))])

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        pairs = zip(args, shapes, strict=True)
        args = [lax.slice_in_dim(x, 0, shape[dim], axis=dim) for x, shape in pairs]
        (x,) = bind(eqn, args)
        more = shard.size(factor) - x.shape[dim]
        zero = lax.full((), 0, x.dtype)
        return [padded(x, dim, zero, (0, more)) if more else x]

    joined = JoinedReads(dim=dim, factor=factor, reads=tuple(reads))
    return dataclasses.replace(made, rebind=rebind, joined=joined)


def in_a_row(
    operands: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, WindowReads]]:
    """The reads of operands of such sizes, one behind the other."""
    reads: list[tuple[int, WindowReads]] = []
    start = 0
    for operand, size in zip(operands, sizes, strict=True):
        steps = (start, start + size)
        reads.append((operand, WindowReads(size=size, first=-start, steps=steps)))
        start += size
    return reads
