"""Dim rules of contractions and reductions: the primitives with reduced factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

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
    bind_same,
    shape_of,
)
from jhost.lowering.rules.reducers import Reducer, from_zero, sum_of
from jhost.lowering.rules.registry import rule

DotNumbers: TypeAlias = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]
"""As in `lax.dot_general`: ((lhs, rhs) contracted dims, (lhs, rhs) batch dims)."""

# --- Products ----------------------------------------------------------------- #


@rule("dot_general")
def dot_general(eqn: JaxprEqn) -> DimRule:
    """Batch and free dims are parallel, contracted dims are summed.

    The sum of booleans is their "or": whether both of any pair are true.
    """
    factors = Factors()
    lhs, rhs, out = product(factors, eqn, eqn.params["dimension_numbers"])
    return factors.rule([lhs, rhs], [out], _rebind_dot_general)


def product(
    factors: Factors, eqn: JaxprEqn, numbers: DotNumbers, groups: Sequence[int] = ()
) -> tuple[Dims, Dims, Dims]:
    """The maps of lhs, rhs and the result, without the dims `groups` of rhs."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    reducer = _reducer(eqn)
    lhs = tuple(
        FactorDim(factors.new(size, reducer if dim in lhs_contract else None))
        for dim, size in enumerate(shape_of(eqn.invars[0]))
    )
    # A dim of rhs that has a partner follows the partner's factor.
    partners = dict(zip(rhs_contract, lhs_contract, strict=True))
    partners |= zip(rhs_batch, lhs_batch, strict=True)
    rhs_free = factors.dims(shape_of(eqn.invars[1]), whole=(*partners, *groups))
    rhs = tuple(
        lhs[partners[dim]] if dim in partners else free
        for dim, free in enumerate(rhs_free)
    )
    out = (
        *(lhs[dim] for dim in lhs_batch),
        *without(lhs, (*lhs_batch, *lhs_contract)),
        *without(rhs, (*partners, *groups)),
    )
    return lhs, rhs, out


def _reducer(eqn: JaxprEqn) -> Reducer:
    """What a contraction reduces by."""
    return sum_of(aval_of(eqn.outvars[0]).dtype)


def rebind_product(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
    """Binds a product in the dtype of its accumulator, so that no term is rounded."""
    if shard.accumulator is None:
        return bind(eqn, args)
    return bind(eqn, args, preferred_element_type=shard.accumulator)


def _rebind_dot_general(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
    """Binds a product; as a batch of matrices where batch dims do not come first.

    XLA itself transposes such operands to merge their free and contracted dims.  Of
    tokens `[groups, experts, places, hidden]` in a product by expert it would move the
    last dim too, by one slow transpose for each reader.  `_matrices` leaves the last
    dim where it is.
    """
    contract, batch = eqn.params["dimension_numbers"]
    if not contract[0] or not read_in_other_order(eqn):
        outs = rebind_product(eqn, args, shard)
        return _summed(outs, eqn, args[0], contract[0])
    first = tuple(range(len(batch[0])))
    (lhs, lhs_dim, rows), (rhs, rhs_dim, columns) = map(
        _matrices, args, contract, batch
    )
    numbers = ((lhs_dim,), (rhs_dim,)), (first, first)
    eqn = eqn.replace(params={**eqn.params, "dimension_numbers": numbers})
    (out,) = rebind_product(eqn, [lhs, rhs], shard)
    (out,) = _summed([out], eqn, args[0], contract[0])
    return [out.reshape(*out.shape[: len(first)], *rows, *columns)]


def read_in_other_order(eqn: JaxprEqn) -> list[int]:
    """The numbers of a contraction's operands whose batch dims do not come first.

    XLA moves the batch dims to the front.  It copies the operand for that where it lies
    in memory, and no fusion makes it.
    """
    if eqn.primitive.name != "dot_general":
        return []
    _, batch = eqn.params["dimension_numbers"]
    return [n for n, dims in enumerate(batch) if tuple(dims) != tuple(range(len(dims)))]


def _matrices(
    x: Any, contract: Sequence[int], batch: Sequence[int]
) -> tuple[Any, int, list[int]]:
    """`x` as a batch of matrices, the dim to contract, and the sizes of free dims."""
    free = [dim for dim in range(x.ndim) if dim not in (*contract, *batch)]
    # A contraction takes either order of the two, so the one that needs no transpose.
    as_they_lie = [*contract, *free] == sorted((*contract, *free))
    sides = (contract, free) if as_they_lie else (free, contract)
    sizes = [[x.shape[dim] for dim in dims] for dims in (batch, *sides)]
    x = lax.transpose(x, (*batch, *sides[0], *sides[1]))
    x = x.reshape(*sizes[0], math.prod(sizes[1]), math.prod(sizes[2]))
    return x, len(batch) + (not as_they_lie), sizes[1 + as_they_lie]


# --- Reductions --------------------------------------------------------------- #

_REDUCERS: dict[str, Reducer] = {
    "reduce_and": "and",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_prod": "prod",
    "reduce_sum": "sum",
}


@rule(*_REDUCERS)
def reduction(eqn: JaxprEqn) -> DimRule:
    """Reduced dims carry the reducer; the others are parallel."""
    reducer, axes = _REDUCERS[eqn.primitive.name], eqn.params["axes"]
    factors = Factors()
    dims = tuple(
        FactorDim(factors.new(size, reducer if dim in axes else None))
        for dim, size in enumerate(shape_of(eqn.invars[0]))
    )
    rebind = _rebind_sum if reducer == "sum" else bind_same
    return factors.rule([dims], [without(dims, axes)], rebind)


def _rebind_sum(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
    """Binds a sum in the dtype of its accumulator, if it has one."""
    (x,) = args
    if shard.accumulator is not None:
        x = lax.convert_element_type(x, shard.accumulator)
    return _summed(bind(eqn, [x]), eqn, x, eqn.params["axes"])


def _summed(
    outs: Sequence[Any], eqn: JaxprEqn, part: Any, dims: Sequence[int]
) -> list[Any]:
    """The sums `outs` over `dims` of a `part`, with a zero's sign as in the whole."""
    whole = shape_of(eqn.invars[0])
    # XLA begins a sum with 0.0, so -0.0 becomes 0.0, but takes an element for its own
    # sum.  A part of one element would keep a sign that the whole loses.
    alone = all(part.shape[dim] == 1 for dim in dims)
    if not alone or all(whole[dim] == 1 for dim in dims):
        return list(outs)
    return [from_zero(out) for out in outs]
