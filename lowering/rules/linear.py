"""Over which reductions an equation distributes: f(a + b, c) = f(a, c) + f(b, c).

A partial sum may then stay partial through the equation, and what comes out is reduced
instead.  The other reducers distribute over what only arranges elements, and over
reductions of their own kind.  Integers stay exact: they wrap round alike either way.
Factors of a product are taken to be finite, as a sum in another order takes what it
adds to be; a divisor is often 0.  A sum that cancels and is then negated is 0.0 instead
of -0.0; terms that are all zeros keep their sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jhost._dtypes import bits, holds
from jhost._jax import aval_of
from jhost.lowering.rules.reducers import Reducer

OperandSet: TypeAlias = frozenset[int]
"""Operands, by position, over whose reduction together an equation distributes."""

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
"""The first operand's elements, and no others, in another order or number."""

_ARRANGING_ALL = ("concatenate", "stack")

_REDUCTIONS: Mapping[str, Reducer] = {
    "reduce_and": "and",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_prod": "prod",
    "reduce_sum": "sum",
}


def distributes(eqn: JaxprEqn, reducer: Reducer) -> tuple[OperandSet, ...]:
    """The groups of operands over whose reduction `eqn` distributes."""
    name = eqn.primitive.name
    if name in _ARRANGING or _REDUCTIONS.get(name) == reducer:
        return (frozenset({0}),)
    if name in _ARRANGING_ALL:
        return (frozenset(range(len(eqn.invars))),)
    if name == "select_n":
        # Not the predicate, which picks among terms and is none.
        return (frozenset(range(1, len(eqn.invars))),)
    if reducer == "sum" and name in _LINEAR:
        return _LINEAR[name](eqn)
    return ()


# --- Sums --------------------------------------------------------------------- #


def _alone(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    del eqn
    return (frozenset({0}),)


def _together(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    # All at once: an operand that is whole would be added by each device.
    return (frozenset(range(len(eqn.invars))),)


def _product(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    """Either factor, the other one held; a wider result would not wrap round alike."""
    dtypes = [aval_of(atom).dtype for atom in (*eqn.invars[:2], *eqn.outvars)]
    if not all(_keeps_sums(dtype, dtypes[-1]) for dtype in dtypes):
        return ()
    return frozenset({0}), frozenset({1})


def _quotient(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    """The dividend, where the divisor is not 0, unless integers are rounded."""
    divisor = eqn.invars[1]
    exact = jnp.issubdtype(aval_of(eqn.outvars[0]).dtype, jnp.inexact)
    known = isinstance(divisor, Literal) and divisor.val != 0
    return (frozenset({0}),) if exact and known else ()


def _conversion(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    source, target = (aval_of(atom).dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return (frozenset({0}),) if _keeps_sums(source, target) else ()


def _padding(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    """With zeros: each device adds its own padding."""
    value = eqn.invars[1]
    zeros = isinstance(value, Literal) and value.val == 0
    return (frozenset({0}),) if zeros else ()


def _keeps_sums(source: np.dtype, target: np.dtype) -> bool:
    """Whether sums may be made after a conversion instead of before.

    Floats must not lose precision; integers may, and wrap round alike, but not gain.
    """
    if source == target:
        return True
    if jnp.issubdtype(source, jnp.integer) and jnp.issubdtype(target, jnp.integer):
        return bits(target) <= bits(source)
    return jnp.issubdtype(source, jnp.inexact) and holds(target, source)


def _updates(eqn: JaxprEqn) -> tuple[OperandSet, ...]:
    """What is added to, and what is added at the indices."""
    del eqn
    return (frozenset({0, 2}),)


_LINEAR: Mapping[str, Callable[[JaxprEqn], tuple[OperandSet, ...]]] = {
    "add": _together,
    "add_any": _together,
    "conj": _alone,
    "conv_general_dilated": _product,
    "convert_element_type": _conversion,
    "cumsum": _alone,
    "div": _quotient,
    "dot_general": _product,
    "imag": _alone,
    "mul": _product,
    "neg": _alone,
    "pad": _padding,
    "real": _alone,
    "scatter-add": _updates,
    "sub": _together,
}
