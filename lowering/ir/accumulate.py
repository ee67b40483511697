"""Accumulators: the buffers in which a loop over a reduced factor combines results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from jhost.lowering.ir.statements import Compute
from jhost.lowering.rules.dim_rule import factors_of
from jhost.lowering.rules.reducers import COMBINE


def accumulators(stmt: Compute) -> list[int]:
    """The results of `stmt` that go into accumulators: they lack the loop's factor."""
    if stmt.reducer is None:
        return []
    # A result that follows the factor has a place for each chunk, so nothing is added.
    cut = {
        id(var)
        for each in stmt.unit.eqns
        for var, dims in zip(each.eqn.outvars, each.rule.results, strict=True)
        if each.stream in factors_of(dims)
    }
    return [i for i, var in enumerate(stmt.unit.outvars) if id(var) not in cut]


def combine(
    stmt: Compute, held: Sequence[Any | None], new: Sequence[Any]
) -> Sequence[Any]:
    """The values of accumulators after the `new` results; `held` is None before any.

    Both are made as wide as the accumulators, but a first result stays as it is.
    """
    reducer = stmt.reducer
    if reducer is None or all(old is None for old in held):
        return new
    # Maxima, sums and results of two parts depend on each other, so none is combined
    # alone.
    if reducer == "softmax":
        (unit_eqn,) = stmt.unit.eqns
        assert unit_eqn.rule.combine is not None
        return unit_eqn.rule.combine(held, new)
    found = list(new)
    for number, out in enumerate(accumulators(stmt)):
        if (old := held[number]) is not None:
            # A sum of bfloat16 goes into float32: in chunks it would round once for
            # each.
            dtype = stmt.outs[out].dtype
            both = (lax.convert_element_type(x, dtype) for x in (old, new[number]))
            found[number] = COMBINE[reducer](*both)
    return found
