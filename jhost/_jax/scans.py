"""Equations of `lax.scan`: their operands by kind, and scans made of others."""

# JAX's private functions are partly untyped; what leaves this module is typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import jax
from jax import lax
from jax._src import core
from jax._src.lax.lax import empty2
from jax.extend.core import JaxprEqn, Var

from jhost._jax.eqns import Atom, ClosedJaxpr


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a `scan` are constants, and how many are carried."""
    if "num_consts" in eqn.params:  # up to 0.10
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(len, eqn.params["ft_in"].unpack())
    return consts, carry


def stacked_var(var: Var, length: int) -> Var:
    """A variable for the stack that a scan of that length makes of its body's `var`."""
    return Var(core.unmapped_leading_aval(length, var.aval))


def zeros_on_host(*, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros in the host's memory, made as a scan makes the stacks that it offloads to.

    XLA allocates them there, and copies nothing.  JAX has no public function for it.
    """
    zero = empty2(dtype, memory_space=jax.memory.Space.Host)
    return lax.broadcast(zero, shape)


def scan_like(
    eqn: JaxprEqn,
    body: ClosedJaxpr,
    *,
    consts: Sequence[Atom],
    xs: Sequence[Atom],
    ys: Sequence[Var],
) -> JaxprEqn:
    """A scan with the carry of `eqn`, and a body with other operands and results.

    The body has them in the scan's order.  Operands: constants, carried values, slices.
    Results: carried values, slices.
    """
    first, count = scan_counts(eqn)
    carry, carried = eqn.invars[first : first + count], eqn.outvars[:count]
    if "num_consts" in eqn.params:  # up to 0.10
        counts: dict[str, Any] = {"num_consts": len(consts)}
    else:
        # From 0.11 on two trees have the counts of a scan.
        flat: Any = import_module("jax._src.flattree")
        _, before, _ = eqn.params["ft_in"].unpack()
        after, _ = eqn.params["ft_out"].unpack()
        operands = flat.nones(len(consts)), before, flat.nones(len(xs))
        results = after, flat.nones(len(ys))
        counts = {"ft_in": flat.pack(operands), "ft_out": flat.pack(results)}
    return eqn.replace(
        invars=[*consts, *carry, *xs],
        outvars=[*carried, *ys],
        params={**eqn.params, **counts, "jaxpr": body},
    )
