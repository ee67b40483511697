"""Units made from a Python function, for work that no equation of the user does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Var

from jhost._jax import aval_of
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.statements import Buffer, Compute, Dim, Unit, UnitEqn
from jhost.lowering.rules.table import rule_of


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
    # JAX returns a result that it knows while tracing as a literal, and no statement
    # makes a literal.
    outvars = tuple(var for var in jaxpr.outvars if isinstance(var, Var))
    assert len(outvars) == len(jaxpr.outvars), f"{name} returns a literal"
    return Unit(
        name=name, eqns=tuple(eqns), invars=tuple(jaxpr.invars), outvars=outvars
    )


def computes_of(
    name: str,
    fun: Callable[..., Any],
    ins: Sequence[Buffer],
    outs: Sequence[Buffer],
    names: FreshNames,
    *,
    pads: bool = False,
) -> list[Compute]:
    """Statements of one equation each that compute `fun` of `ins` into `outs`.

    Values between them have the layout of the first of `outs` if they have as many
    dims, and are whole otherwise.  `name` and `pads` are fields of the units.
    """
    unit = unit_of(name, fun, *(jax.ShapeDtypeStruct(b.shape, b.dtype) for b in ins))
    buffers = dict(zip(unit.invars, ins, strict=True))
    buffers |= zip(unit.outvars, outs, strict=True)
    computes: list[Compute] = []
    # One equation each, so that each statement has one rule for later passes.
    for unit_eqn in unit.eqns:
        eqn = unit_eqn.eqn
        invars = tuple(v for v in eqn.invars if not isinstance(v, Literal))
        for var in eqn.outvars:
            if var not in buffers:
                name_of = names.fresh(f"{outs[0].name}_{eqn.primitive.name}")
                buffers[var] = _like(outs[0], aval_of(var), name_of)
        one = Unit(
            name=name,
            eqns=(unit_eqn,),
            invars=invars,
            outvars=tuple(eqn.outvars),
            pads=pads,
        )
        read, made = ([buffers[v] for v in each] for each in (invars, eqn.outvars))
        computes.append(Compute(unit=one, ins=tuple(read), outs=tuple(made)))
    return computes


def _like(out: Buffer, aval: Any, name: str) -> Buffer:
    """A buffer of that type, with the layout of `out` if it has as many dims."""
    rank = len(aval.shape)
    return dataclasses.replace(
        out,
        name=name,
        shape=aval.shape,
        dtype=aval.dtype,
        dims=out.dims if rank == len(out.dims) else (Dim(),) * rank,
        partial=(),
    )
