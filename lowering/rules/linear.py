"""The reductions that an equation distributes over: f(a + b, c) = f(a, c) + f(b, c).

A partial sum may then stay partial through the equation, and the result is reduced
instead.  Equations that only arrange elements distribute over every reducer, and
reductions over their own kind.

Integers stay exact: they wrap round alike either way.  Floats are multiplied only by
positive numbers that the program itself has and that make no term larger.  Otherwise
terms of both signs could become infinite and add up to NaN, where the product of their
sum is infinite.  None is negated: a sum that cancels is 0.0, whose negative is -0.0,
but negated terms add up to 0.0.  One zero has another sign: -0.0 minus a sum that
cancels becomes 0.0.

If devices look elements up and add them, each element has one *lone* term: the others
are -0.0, or 0 as an integer.  Any cast of the term is the cast of the sum, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jhost._dtypes import bits, holds
from jhost._jax import Atom, aval_of
from jhost.lowering.rules.reducers import Reducer
from jhost.lowering.rules.rows import can_be_summed

OperandSet: TypeAlias = frozenset[int]
"""Positions of operands; an equation distributes over a reduction of all of them."""

_ARRANGING = (
    "broadcast_in_dim",
    "copy",
    "dynamic_slice",
    "name",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "tile",
    "transpose",
    "unstack",
)
"""Primitives that return the first operand's elements in another order or number."""

_ARRANGING_ALL = ("concatenate", "stack")

_REDUCTIONS: Mapping[str, Reducer] = {
    "reduce_and": "and",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_prod": "prod",
    "reduce_sum": "sum",
}


def distributes(
    eqn: JaxprEqn, reducer: Reducer, *, lone: bool = False
) -> tuple[OperandSet, ...]:
    """The groups of operands over whose reduction `eqn` distributes.

    `lone` says that sums have one term which is not neutral.
    """
    name = eqn.primitive.name
    if lone and reducer == "sum" and _casts_numbers(eqn):
        return (frozenset({0}),)
    if name in _ARRANGING or _REDUCTIONS.get(name) == reducer:
        return (frozenset({0}),)
    if name in _ARRANGING_ALL:
        return (frozenset(range(len(eqn.invars))),)
    if name == "select_n":
        # The predicate picks among terms and is not one itself.
        return (frozenset(range(1, len(eqn.invars))),)
    if reducer == "sum" and name in _LINEAR:
        return _LINEAR[name](eqn)
    return ()


def keeps_terms(eqn: JaxprEqn) -> bool:
    """Whether each element of the result is one of the first operand, or its cast.

    What is neutral stays so: -0.0 becomes -0.0 in narrower floats, and 0 in integers.
    """
    return eqn.primitive.name in _ARRANGING or _casts_numbers(eqn)


# --- Sums --------------------------------------------------------------------- #


def _in_operand(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    del eqn
    return (frozenset({0}),)


def _together(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    # All operands at once: each device would add a whole operand once more.
    return (frozenset(range(len(eqn.invars))),)


def _product(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    """A factor, if dtypes agree: a wider result would not wrap round alike."""
    dtypes = [aval_of(atom).dtype for atom in (*eqn.invars[:2], *eqn.outvars)]
    if not all(_keeps_sums(dtype, dtypes[-1]) for dtype in dtypes):
        return ()
    exact = not jnp.issubdtype(dtypes[-1], jnp.inexact)
    others = reversed(eqn.invars[:2])
    return tuple(
        frozenset({n})
        for n, other in enumerate(others)
        if exact or 0 < _number(other) <= 1
    )


def _quotient(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    """The dividend of floats, if the quotient is no larger: integers are rounded."""
    inexact = jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.inexact)
    known = 1 <= _number(eqn.invars[1]) < math.inf
    return (frozenset({0}),) if inexact and known else ()


def _number(atom: Atom) -> float:
    """A real literal's value; NaN, which fails all comparisons, of other atoms."""
    if not isinstance(atom, Literal) or np.ndim(atom.val) or np.iscomplexobj(atom.val):
        return math.nan
    return float(atom.val)


def _negation(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    exact = not jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.inexact)
    return (frozenset({0}),) if exact else ()


def _conversion(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    source, target = (aval_of(atom).dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return (frozenset({0}),) if _keeps_sums(source, target) else ()


def _casts_numbers(eqn: JaxprEqn) -> bool:
    """Whether it casts to a dtype that devices can add up; booleans have no sums."""
    if eqn.primitive.name != "convert_element_type":
        return False
    dtype = aval_of(eqn.outvars[0]).dtype
    return dtype != np.bool_ and can_be_summed(dtype)


def _padding(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    """The operand, if the padding is zeros: each device adds its own padding."""
    value = eqn.invars[1]
    zeros = isinstance(value, Literal) and value.val == 0
    return (frozenset({0}),) if zeros else ()


def _keeps_sums(source: np.dtype, target: np.dtype) -> bool:
    """Whether a sum may be made after a conversion instead of before it.

    Floats must not lose precision.  Integers may get narrower, as both ways wrap round
    alike, but not wider: the narrow sum wraps round, and the wide one does not.
    """
    if source == target:
        return True
    if jnp.issubdtype(source, jnp.integer) and jnp.issubdtype(target, jnp.integer):
        return bits(target) <= bits(source)
    return jnp.issubdtype(source, jnp.inexact) and holds(target, source)


def _updates(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    """The operand and the updates together; the indices stay as they are."""
    del eqn
    return (frozenset({0, 2}),)


_LINEAR: Mapping[str, Callable[[JaxprEqn], tuple[OperandSet, ...]]] = {
    "add": _together,
    "add_any": _together,
    "conv_general_dilated": _product,
    "convert_element_type": _conversion,
    "cumsum": _in_operand,
    "div": _quotient,
    "dot_general": _product,
    "imag": _in_operand,
    "mul": _product,
    "neg": _negation,
    "pad": _padding,
    "real": _in_operand,
    "scatter-add": _updates,
    "sub": _together,
}
