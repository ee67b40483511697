"""Runs traced equations, by NumPy where it gives the same numbers as XLA.

NumPy compiles nothing, and is a second opinion.  JAX runs the equations whose results
may differ between the two: narrow floats, whose sums XLA makes in wider dtypes; maxima
and minima of zeros; and functions that each of them approximates in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jhost._jax import aval_of, cached, evaluate_by, is_array, user_context
from jhost.lowering.interpret.primitives import EXACT, MOVES, OF_INTEGERS, converts
from jhost.lowering.rules.dim_rule import bind
from jhost.lowering.rules.properties import INLINED, called

Params: TypeAlias = Mapping[str, Any]


def evaluated(body: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a traced function, equation by equation."""
    consts = getattr(body, "consts", ())
    return evaluate_by(body, consts, args, _equation, _literal)


@cached(1024, by_context=True)
def traced(function: Callable[..., Any], *types: Any) -> Any:
    """`function` as equations, for operands of these types.

    It is traced once for all devices and iterations, which are operands like others.
    """
    return jax.make_jaxpr(lambda *args: function(*args))(*types)


def _equation(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
    found = by_numpy(eqn, args)
    if found is not None:
        return found
    with user_context(eqn):
        if eqn.primitive.name in INLINED:
            return evaluated(*called(eqn, args))
        return bind(eqn, args)


def _literal(literal: Literal) -> Any:
    return np.asarray(literal.val, aval_of(literal).dtype)


def by_numpy(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any] | None:
    """The results of `eqn` for `args`, or None where JAX has to run it."""
    # Under these settings JAX raises where a NaN appears, and NumPy does not.
    if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return None
    name = eqn.primitive.name
    run = MOVES.get(name) or EXACT.get(name)
    if run is None or not all(map(_has_numbers, (*eqn.invars, *eqn.outvars))):
        return None
    operands = [np.asarray(arg) for arg in args]
    if name in EXACT and not _is_exact(name, operands, eqn.params):
        return None
    with np.errstate(all="ignore"):  # XLA overflows in silence
        out = run(*operands, **eqn.params)
    return [*out] if eqn.primitive.multiple_results else [np.asarray(out)]


def _has_numbers(atom: Any) -> bool:
    """Whether an operand or result is an array of numbers, as keys are not."""
    if not is_array(atom):
        return False
    return not jnp.issubdtype(aval_of(atom).dtype, jax.dtypes.extended)


def _is_exact(name: str, operands: Sequence[np.ndarray], params: Params) -> bool:
    """Whether NumPy gives XLA's numbers, up to the order of additions in a sum."""
    dtypes = {x.dtype for x in operands}
    if name == "convert_element_type":
        return all(converts(dtype, params["new_dtype"]) for dtype in dtypes)
    wanted = params.get("preferred_element_type")
    if len(dtypes) != 1 or (wanted is not None and {np.dtype(wanted)} != dtypes):
        return False
    (dtype,) = dtypes
    if dtype.name in ("float32", "float64"):
        return name not in OF_INTEGERS
    return dtype.isbuiltin == 1 and dtype.kind in "biu"
