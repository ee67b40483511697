"""What primitives are apart from their dims: calls, marks, views, barriers, callbacks.

Names are those of JAX 0.10 to 0.12.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn, jaxprs_in_params

INLINED: frozenset[str] = frozenset(
    {
        "call",
        "closed_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "eval_jaxpr",
        "jit",
        "remat2",
    }
)
"""Calls of JAX's that lowering replaces by their bodies, so that no rule meets them."""

CALLS = INLINED | {"jhost"}
"""All that it replaces so."""

PLAIN_CALLS = frozenset({"call", "closed_call", "eval_jaxpr", "jit"})
"""The calls that mean their bodies and no more to every transform of JAX's.

The others say how they are differentiated, or what is kept for that.
"""

MARKS = frozenset({"stream", "serial", "shard", "sharding_constraint"})
"""What the user says of a value; lowering takes them up."""

IDENTITIES = MARKS | {"copy"}
"""Equations that hand their operand on; lowering speaks of the value itself."""

CONTROL_FLOW = frozenset({"cond", "scan", "while"})
"""What has programs for bodies."""

VIEWS = frozenset({"broadcast_in_dim", "iota", "reshape", "squeeze", "transpose"})
"""What computes nothing: XLA makes it where it is read."""

CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback"})
"""Not `pure_callback`, which may be called any number of times."""


def called_body(eqn: JaxprEqn) -> Any:
    """The jaxpr that `eqn` calls, with its consts where it has any."""
    # Most calls hold a closed jaxpr, `remat2` an open one (JAX 0.10 to 0.12).
    closed = (value for value in eqn.params.values() if hasattr(value, "consts"))
    return next(closed, None) or next(iter(jaxprs_in_params(eqn.params)))


def keeps_its_barrier(eqn: JaxprEqn) -> bool:
    """Whether it is a `remat` whose body must not be found in the forward's values.

    remat's lowering rule has a barrier there: without it XLA finds them again and keeps
    them instead of computing them twice.
    """
    return bool(eqn.params.get("differentiated") and eqn.params.get("prevent_cse"))


def has_callback(eqn: JaxprEqn) -> bool:
    """Whether the equation calls the host, itself or in a body, for all devices."""
    if eqn.primitive.name == "shard_map":
        return False  # its body is each device's own
    if eqn.primitive.name in CALLBACKS:
        return not eqn.params.get("partitioned")  # each device speaks for itself
    bodies = jaxprs_in_params(eqn.params) if eqn.effects else ()
    return any(has_callback(inner) for body in bodies for inner in body.eqns)


def is_barrier(eqn: JaxprEqn) -> bool:
    """Whether it hands its operands on, none before all are there."""
    return eqn.primitive.name == "optimization_barrier"
