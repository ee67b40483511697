"""What primitives are apart from their dims: calls, marks, views, barriers, callbacks.

Names are those of JAX 0.10 to 0.12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, jaxprs_in_params

INLINED: frozenset[str] = frozenset(
    {
        "call",
        "closed_call",
        "custom_jvp_call",
        "custom_linear_solve",
        "custom_vjp_call",
        "eval_jaxpr",
        "jit",
        "linear_call",
        "remat2",
    }
)
"""Calls of JAX's that lowering replaces with their bodies, so they need no rules."""

CALLS = INLINED | {"jhost"}
"""All calls that lowering replaces with their bodies."""

PLAIN_CALLS = frozenset({"call", "closed_call", "eval_jaxpr", "jit"})
"""The calls that mean no more than their bodies to every transform of JAX's.

The other calls say how they are differentiated, or what is kept for it.
"""

MARKS = frozenset({"stream", "serial", "shard", "sharding_constraint"})
"""Primitives by which the user says something of a value; lowering reads them."""

IDENTITIES = MARKS | {"copy"}
"""Primitives that return their operand; lowering works on the operand itself."""

CONTROL_FLOW = frozenset({"cond", "scan", "while"})
"""Primitives whose bodies become programs."""

VIEWS = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze", "transpose"})
"""Primitives that compute nothing: XLA fuses them into the reader."""

CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback"})
"""Callbacks whose calls the user sees.

`pure_callback` is not one: JAX may call it any number of times.
"""


def called_body(eqn: JaxprEqn) -> Any:
    """The jaxpr that `eqn` calls, with its consts where it has any."""
    if eqn.primitive.name == "custom_linear_solve":
        return eqn.params["jaxprs"].solve
    # Most calls hold a closed jaxpr, `remat2` an open one (JAX 0.10 to 0.12).
    closed = (value for value in eqn.params.values() if hasattr(value, "consts"))
    return next(closed, None) or next(iter(jaxprs_in_params(eqn.params)))


def called(eqn: JaxprEqn, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The jaxpr that `eqn` calls, and which of `args` that takes."""
    if eqn.primitive.name != "custom_linear_solve":
        return called_body(eqn), args
    # Each of its bodies has consts of its own, in front of the right-hand sides (JAX
    # 0.10 to 0.12).
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    consts = args[first : first + lengths.solve]
    return called_body(eqn), [*consts, *args[sum(lengths) :]]


def keeps_its_barrier(eqn: JaxprEqn) -> bool:
    """Whether it is a `remat` that must compute its body a second time.

    JAX's own lowering of remat puts a barrier there.  Without one, XLA finds the same
    values in the forward, keeps them, and computes nothing twice.
    """
    return bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse"))


def has_callback(eqn: JaxprEqn) -> bool:
    """Whether the equation calls the host, itself or in a body, for all devices."""
    if eqn.primitive.name == "shard_map":
        return False  # each device runs the body, and so the callback, by itself
    if eqn.primitive.name in CALLBACKS:
        return not eqn.params.get("partitioned")  # each device calls for its own part
    bodies = jaxprs_in_params(eqn.params) if eqn.effects else ()
    return any(has_callback(inner) for body in bodies for inner in body.eqns)


def is_barrier(eqn: JaxprEqn) -> bool:
    """Whether it returns its operands, but none of them before all are there."""
    return eqn.primitive.name == "optimization_barrier"
