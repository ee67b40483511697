"""How much an equation computes."""

from __future__ import annotations

import math

from jax.extend.core import JaxprEqn, jaxprs_in_params

from jhost.lowering.rules.dim_rule import DimRule, Shard, factors_of, shape_of
from jhost.lowering.rules.scaled import MATRICES

_PRODUCTS = ("dot_general", "scaled_dot", "scaled_matmul", "scaled_matmul_wrapper")


def flops_of(eqn: JaxprEqn) -> int:
    """The operations of an equation on whole arrays, in all iterations of its bodies.

    A contraction multiplies and adds.  Any other equation counts one operation for each
    element of its largest operand or result.
    """
    if eqn.primitive.name in _PRODUCTS:
        numbers = eqn.params.get("dimension_numbers", MATRICES)
        ((contracted, _), _) = numbers
        shape = shape_of(eqn.invars[0])
        terms = math.prod(shape[dim] for dim in contracted)
        return 2 * terms * math.prod(shape_of(eqn.outvars[0]))
    bodies = list(jaxprs_in_params(eqn.params))
    if bodies:
        inside = sum(flops_of(inner) for body in bodies for inner in body.eqns)
        # Only a scan says how often its body runs; the body of a `while` counts once.
        return inside * eqn.params.get("length", 1)
    sizes = (math.prod(shape_of(atom)) for atom in (*eqn.invars, *eqn.outvars))
    return max(sizes, default=0)


def matmul_of(rule: DimRule, shard: Shard) -> tuple[int, int, int, int]:
    """Batch, m, n and k of a contraction's part."""
    left, right = factors_of(rule.operands[0]), factors_of(rule.operands[1])
    out = factors_of(rule.results[0])

    def product(factors: set[int]) -> int:
        return math.prod(shard.size(factor) for factor in factors)

    both = left & right
    return (
        product(both & out),
        product((left - right) & out),
        product((right - left) & out),
        product(both - out),
    )
