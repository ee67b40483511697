"""Questions about a traced program, and its evaluation."""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.api_util import shaped_abstractify
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import JaxprEqn, Literal, Var, jaxprs_in_params
from jax.extend.random import threefry_prng_impl

from jhost._jax.caches import cached_by_jaxpr
from jhost._jax.eqns import Atom, ClosedJaxpr


def evaluate(jaxpr: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Evaluates a program, equation by equation."""
    return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


def evaluate_by(
    body: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    equation: Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]],
    literal: Callable[[Literal], Any],
) -> list[Any]:
    """Evaluates a program; `equation` gives the results of each equation."""
    jaxpr = getattr(body, "jaxpr", body)
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        outs = equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def as_weak(values: Iterable[Any], avals: Iterable[Any]) -> tuple[Any, ...]:
    """Arrays with the weak types of `avals`, which are lost where a buffer is between.

    A value of weak type takes the dtype of the value that it is combined with.
    """
    return tuple(
        lax.convert_element_type_p.bind(
            value, new_dtype=value.dtype, weak_type=True, sharding=None
        )
        if aval.weak_type and not jax.typeof(value).weak_type
        else value
        for value, aval in zip(values, avals, strict=True)
    )


def type_of(array: Any) -> ShapedArray:
    """The type of an array, or of a value that stands for one, without a sharding."""
    aval: Any = shaped_abstractify(array)
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def is_type(value: Any) -> bool:
    """Whether a value is the type of an array."""
    return isinstance(value, ShapedArray)


def arg_names(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """The user's name of each operand, as `params['w']`; empty if there is none."""
    return jaxpr.debug_info.safe_arg_names(len(jaxpr.invars))


def result_paths(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    """The tree path of each result, as `result[0]`; empty if it is not known."""
    return jaxpr.debug_info.safe_result_paths(len(jaxpr.outvars))


def aval_of(atom: Atom) -> ShapedArray:
    """The type of an operand or result that is an array; `TypeError` if it is not."""
    aval = atom.aval
    if not isinstance(aval, ShapedArray):
        raise TypeError(f"expected an array, got {aval}")
    return aval


def itemsize(dtype: Any) -> int:
    """The bytes of an element, also of an extended dtype that does not say them.

    Keys say them (JAX 0.10 to 0.12), but a user's dtype need not.
    """
    if hasattr(dtype, "itemsize"):
        return dtype.itemsize
    element = dtype._rules.physical_element_aval(dtype)
    return math.prod(element.shape) * np.dtype(element.dtype).itemsize


def is_array(atom: Atom) -> bool:
    """Whether an operand or result is an array; it may be a reference to one."""
    return isinstance(atom.aval, ShapedArray)


# --- 64 bits ----------------------------------------------------------------------- #

_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def is_wide(jaxpr: ClosedJaxpr) -> bool:
    """Whether a program has values of 64 bits although JAX makes none now.

    A program that was traced inside of `jax.enable_x64` may run outside of it.
    """
    return not jax.enable_x64.value and _holds_wide(jaxpr)


@contextmanager
def with_width(wide: bool) -> Generator[None]:
    """Has JAX make values of 64 bits, for a program that `is_wide`."""
    with jax.enable_x64(True) if wide else nullcontext():
        yield


@cached_by_jaxpr
def _holds_wide(jaxpr: Any) -> bool:
    # On 0.10 some bodies are open, and have no constants to look at.
    body = getattr(jaxpr, "jaxpr", jaxpr)
    made = (var for eqn in body.eqns for var in eqn.outvars)
    values = (*body.constvars, *body.invars, *made)
    return any(getattr(v.aval, "dtype", None) in _WIDE for v in values) or any(
        _holds_wide(inner)
        for eqn in body.eqns
        for inner in jaxprs_in_params(eqn.params)
    )


# --- Random numbers ---------------------------------------------------------------- #


def makes_threefry_keys(keys: Atom) -> bool:
    """Whether keys are of JAX's threefry generator, which draws for each key by itself.

    For a batch of other keys, JAX may draw all numbers from the first one.
    """
    return aval_of(keys).dtype._impl is threefry_prng_impl


def hashes_positions(eqn: JaxprEqn) -> bool:
    """Whether each number drawn by an equation depends only on its key and position."""
    partitionable = bool(eqn.ctx.threefry_partitionable)
    return partitionable and makes_threefry_keys(eqn.invars[0])
