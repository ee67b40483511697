"""Callbacks with effects: called once for all devices, as under `jax.jit`.

A program runs on every device, so every device would call.  Instead the first device
calls, and sends the answer to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._dtypes import bits
from jhost._jax import aval_of, evaluate_by, user_context
from jhost.lowering.rules.dim_rule import bind
from jhost.lowering.rules.properties import (
    CALLBACKS,
    CONTROL_FLOW,
    INLINED,
    called,
    has_callback,
)


def call_once(
    eqn: JaxprEqn, args: Sequence[Any], axes: tuple[str, ...]
) -> Sequence[Any]:
    """The results of an equation with a callback, on each device along `axes`."""
    # Without a mesh there is one device.
    if not axes:
        return bind(eqn, args)
    if eqn.primitive.name in CALLBACKS:
        return _on_first(eqn, args, axes)
    if eqn.primitive.name in INLINED:
        body, args = called(eqn, args)
        return _evaluate(body, getattr(body, "consts", ()), args, axes)
    return bind(eqn, args, **_bodies(eqn, axes))


def _on_first(
    eqn: JaxprEqn, args: Sequence[Any], axes: tuple[str, ...]
) -> Sequence[Any]:
    avals = [aval_of(var) for var in eqn.outvars]
    outs = lax.cond(
        lax.axis_index(axes) == 0,
        lambda: bind(eqn, args),
        # Zeros do not change the sum over the devices, which is of integers.
        lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in avals],
    )
    return [_from_first(out, axes) for out in outs]


def _from_first(out: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The first device's value, by a sum in which the others have zeros."""
    # Summed as integers: a float sum loses the sign of a zero and the bits of a NaN.
    if out.dtype == bool:
        return lax.psum(out.astype(jnp.uint8), axes).astype(bool)
    if jnp.issubdtype(out.dtype, jnp.integer):
        return lax.psum(out, axes)
    if jnp.issubdtype(out.dtype, jnp.complexfloating):
        return lax.complex(_from_first(out.real, axes), _from_first(out.imag, axes))
    number = jnp.dtype(f"uint{bits(out.dtype)}")
    total = lax.psum(lax.bitcast_convert_type(out, number), axes)
    return lax.bitcast_convert_type(total, out.dtype)


# --- Callbacks in bodies ------------------------------------------------------------ #


def _bodies(eqn: JaxprEqn, axes: tuple[str, ...]) -> dict[str, Any]:
    """The bodies among the parameters, with their callbacks called once.

    `branches` is a tuple of bodies.
    """
    if eqn.primitive.name not in CONTROL_FLOW:
        return {}
    return {name: _each_once(value, axes) for name, value in eqn.params.items()}


def _each_once(value: Any, axes: tuple[str, ...]) -> Any:
    def once(leaf: Any) -> Any:
        return _once(leaf, axes) if hasattr(leaf, "consts") else leaf

    return jax.tree.map(once, value)


def _once(body: Any, axes: tuple[str, ...]) -> Any:
    def evaluated(*args: Any) -> list[Any]:
        return _evaluate(body, body.consts, args, axes)

    # Traced anew: a body in a parameter has to be a jaxpr.
    return jax.make_jaxpr(evaluated)(*body.in_avals)


def _evaluate(
    body: Any, consts: Sequence[Any], args: Sequence[Any], axes: tuple[str, ...]
) -> list[Any]:
    def equation(eqn: JaxprEqn, args: Sequence[Any]) -> Sequence[Any]:
        with user_context(eqn):
            once = has_callback(eqn)
            return call_once(eqn, args, axes) if once else bind(eqn, args)

    return evaluate_by(body, consts, args, equation, lambda literal: literal.val)
