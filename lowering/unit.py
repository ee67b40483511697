"""Units made from a Python function, for work that no equation of the user's is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Var

from jhost.lowering.ir import Unit, UnitEqn
from jhost.lowering.table import rule_of


def unit_of(name: str, fun: Callable[..., Any], *avals: Any) -> Unit:
    """The unit that computes `fun` on arrays of the types `avals`.

    `fun` closes over no array, and each of its results is computed.
    """
    jaxpr = jax.make_jaxpr(fun)(*avals)
    assert not jaxpr.consts, f"{name} closes over arrays"
    eqns: list[UnitEqn] = []
    for eqn in jaxpr.eqns:
        rule = rule_of(eqn)
        eqns.append(UnitEqn(eqn=eqn, rule=rule, axes=((),) * len(rule.sizes)))
    outvars = tuple(var for var in jaxpr.outvars if isinstance(var, Var))
    assert len(outvars) == len(jaxpr.outvars), f"{name} returns a literal"
    return Unit(
        name=name, eqns=tuple(eqns), invars=tuple(jaxpr.invars), outvars=outvars
    )
