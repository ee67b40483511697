"""Dim rules of products of narrow values, in blocks with a scale each (MXFP8, NVFP4).

A block is a stretch of the contracted dim.  A step of that factor is the fewest blocks
after which blocks of both operands end.  So no part cuts a block, and scales go with
their values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jhost._jax import aval_of, scaled_matmul_p
from jhost.lowering.rules.building import Factors, without
from jhost.lowering.rules.contract import DotNumbers, rebind_product
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Rebind,
    Shard,
    shape_of,
)
from jhost.lowering.rules.reducers import sum_of
from jhost.lowering.rules.registry import rule

MATRICES: DotNumbers = ((2,), (2,)), ((0,), (0,))
"""`[batch, m, k]` and `[batch, n, k]`, the only shapes of `jax.nn.scaled_matmul`."""


@rule("scaled_matmul", "scaled_matmul_wrapper")
def scaled_matmul(eqn: JaxprEqn) -> DimRule:
    """As `scaled_dot`; a part binds the kernel without JAX's partitioning wrapper."""
    eqn = eqn.replace(primitive=scaled_matmul_p)

    def rebind(_: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        return rebind_product(eqn, args, shard)

    return _scaled(eqn, MATRICES, rebind)


@rule("scaled_dot")
def scaled_dot(eqn: JaxprEqn) -> DimRule:
    """Batch and free dims are parallel, and blocks of contracted dims are summed."""
    return _scaled(eqn, eqn.params["dimension_numbers"], rebind_product)


def _scaled(eqn: JaxprEqn, numbers: DotNumbers, rebind: Rebind) -> DimRule:
    contract, batch = numbers
    lhs, rhs, lhs_scales, rhs_scales = map(shape_of, eqn.invars)
    factors = Factors()
    of_lhs = {dim: factors.new(lhs[dim]) for dim in batch[0]}
    of_rhs = {right: of_lhs[left] for left, right in zip(*batch, strict=True)}
    reducer = sum_of(aval_of(eqn.outvars[0]).dtype)
    for left, right in zip(*contract, strict=True):
        steps = _steps(lhs[left], (lhs_scales[left], rhs_scales[right]))
        of_lhs[left] = of_rhs[right] = factors.new(steps, reducer)
    for of_dims, shape in ((of_lhs, lhs), (of_rhs, rhs)):
        free = (dim for dim in range(len(shape)) if dim not in of_dims)
        of_dims |= {dim: factors.new(shape[dim]) for dim in free}
    operands = [
        _followed(shape, of_dims, factors)
        for shape, of_dims in (
            (lhs, of_lhs),
            (rhs, of_rhs),
            (lhs_scales, of_lhs),
            (rhs_scales, of_rhs),
        )
    ]
    out = (
        *(operands[0][dim] for dim in batch[0]),
        *without(operands[0], (*batch[0], *contract[0])),
        *without(operands[1], (*batch[1], *contract[1])),
    )
    return factors.rule(operands, [out], rebind)


def _steps(size: int, blocks: Sequence[int]) -> int:
    """The number of steps of a contracted dim; a step ends between two blocks."""
    # One scale for the whole dim goes with every step, so any steps will do, but for
    # steps of one element.
    counts = [count for count in blocks if count > 1] or [size // 2 or 1]
    steps = math.gcd(*counts)
    return steps if size % steps == 0 else 1


def _followed(
    shape: Sequence[int], of_dims: Mapping[int, int], factors: Factors
) -> Dims:
    """The map of an operand or of its scales; one scale for a whole dim stays whole."""
    sizes = [factors.sizes[of_dims[dim]] for dim in range(len(shape))]
    return tuple(
        None if have % steps else FactorDim(of_dims[dim], have // steps or 1)
        for dim, (have, steps) in enumerate(
            zip(shape, map(_at_least_1, sizes), strict=True)
        )
    )


def _at_least_1(size: int) -> int:
    return max(size, 1)  # an empty dim has no steps, and 0 divides nothing
