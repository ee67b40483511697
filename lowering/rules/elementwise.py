"""Dim rules of elementwise primitives, and of primitives that return their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.dim_rule import DimRule, Dims, Shard, shape_of
from jhost.lowering.rules.properties import VIEWS
from jhost.lowering.rules.registry import rule, without_factors

_ARITHMETIC = (
    "abs",
    "add",
    "add_any",
    "atan2",
    "ceil",
    "clamp",
    "complex",
    "conj",
    "div",
    "floor",
    "imag",
    "integer_pow",
    "max",
    "min",
    "mul",
    "mulhi",
    "neg",
    "nextafter",
    "one_minus_square",
    "plus_zero",
    "polynomial",
    "pow",
    "real",
    "rem",
    "round",
    "sign",
    "square",
    "sub",
)
_TRANSCENDENTAL = (
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "cbrt",
    "cos",
    "cosh",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "log2",
    "logistic",
    "rsqrt",
    "sin",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
)
# These are not cheap: each element is a series or a fraction of many terms.
_SPECIAL = (
    "bessel_i0e",
    "bessel_i1e",
    "digamma",
    "erf",
    "erf_inv",
    "erfc",
    "igamma",
    "igamma_grad_a",
    "igammac",
    "lgamma",
    "polygamma",
    "regularized_incomplete_beta",
    "zeta",
)
_LOGICAL = (
    "and",
    "clz",
    "eq",
    "eq_to",
    "ge",
    "gt",
    "is_finite",
    "le",
    "le_to",
    "lt",
    "lt_to",
    "ne",
    "not",
    "or",
    "population_count",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "xor",
)
# A block cipher works element by element on counters that it gets as operands, so a
# part of the counters gives that part of the bits.
_CIPHERS = ("philox2x32", "philox4x32", "threefry2x32", "threefry4x32")
_IDENTITIES = (
    "convert_element_type",
    "copy",
    "name",
    "random_clone",
    "reduce_precision",
    "stop_gradient",
    "xla_metadata_value",
)


ELEMENTWISE = (
    *_ARITHMETIC,
    *_TRANSCENDENTAL,
    *_SPECIAL,
    *_LOGICAL,
    *_CIPHERS,
    *_IDENTITIES,
)

CHEAP = frozenset(
    {*_ARITHMETIC, *_TRANSCENDENTAL, *_LOGICAL, *_IDENTITIES, "erf", "erfc", "erf_inv"}
)
"""The elementwise primitives that take less time than reading their operands does."""

COMPUTED_AGAIN = (CHEAP | VIEWS) - {"name"}
"""Primitives whose results are computed a second time rather than kept for long.

"name" is not among them: the user names a value (`checkpoint_name`) to keep it.
"""


@rule(*ELEMENTWISE)
def elementwise(eqn: JaxprEqn) -> DimRule:
    """A factor for each dim of the result, which the operands share."""
    factors = Factors()
    shape = shape_of(eqn.outvars[0])
    dims = factors.dims(shape)
    operands = [_stretched(dims, shape, shape_of(v)) for v in eqn.invars]
    return factors.rule(operands, [dims for _ in eqn.outvars])


def _stretched(dims: Dims, shape: Sequence[int], operand: Sequence[int]) -> Dims:
    """The map of an operand: a scalar has no dims, and a size of 1 is stretched."""
    if not operand:
        return ()
    return tuple(
        # A dim of size 1 has no parts, so each device has all of it.
        dim if size == own else None
        for dim, size, own in zip(dims, shape, operand, strict=True)
    )


@rule("reshard", "sharding_constraint")
def constraint(eqn: JaxprEqn) -> DimRule:
    """The identity: layouts read the constraint, and a part has nothing left to do."""
    factors = Factors()
    dims = factors.dims(shape_of(eqn.invars[0]))
    # All mesh axes are manual where a part runs, so JAX would refuse the constraint.
    return factors.rule([dims], [dims], _pass_on)


def _pass_on(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> Sequence[Any]:
    del eqn, shard
    return args


@rule("optimization_barrier")
def optimization_barrier(eqn: JaxprEqn) -> DimRule:
    """Each operand has factors of its own, which its result shares."""
    if len(eqn.invars) != len(eqn.outvars):  # a ref among the operands has no result
        return without_factors(eqn)
    factors = Factors()
    maps = [factors.dims(shape_of(v)) for v in eqn.invars]
    return factors.rule(maps, maps)


@rule("device_put")
def device_put(eqn: JaxprEqn) -> DimRule:
    """Between memories each device moves its part; between devices arrays are whole."""
    return optimization_barrier(eqn) if moves_memory(eqn) else without_factors(eqn)


def moves_memory(eqn: JaxprEqn) -> bool:
    """Whether an equation takes values to the device's or the host's memory."""
    if eqn.primitive.name != "device_put":
        return False
    # A sharding or a device among them would move values between devices.
    return all(isinstance(there, jax.memory.Space) for there in eqn.params["devices"])
