"""Units made from a Python function, for work that no equation of the user does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import aval_of, cached, fresh_var, with_own_operands
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.statements import Buffer, Compute, Dim, Unit, UnitEqn
from jhost.lowering.rules.dim_rule import Dims, FactorDim
from jhost.lowering.rules.table import rule_of


def unit_of(name: str, fun: Callable[..., Any], *avals: Any, **params: Any) -> Unit:
    """The unit that computes `fun` on arrays of the types `avals`.

    Each of its results is computed.  `fun` is traced once for such types and `params`.
    So it is a function of a module: a closure would never be found again.
    """
    unit = _traced(fun, avals, tuple(params.items()))
    return with_own_variables(dataclasses.replace(unit, name=name))


def on_part(unit: Unit, dim: FactorDim, count: int) -> Unit:
    """The unit of one equation on one of `count` parts of what follows `dim`.

    The equation's params must say nothing about shapes.
    """
    (each,) = unit.eqns
    eqn, rule = each.eqn, each.rule
    known = {
        var: fresh_var(_part_type(aval_of(var), dims, dim, count))
        for var, dims in zip(
            (*eqn.invars, *eqn.outvars), (*rule.operands, *rule.results), strict=True
        )
        if isinstance(var, Var)
    }
    eqn = _copied_eqn(eqn, known)
    # Still spread over the mesh: a sum of one term has another zero than one of many.
    one = dataclasses.replace(each, eqn=eqn, rule=rule_of(eqn))
    invars, outvars = ([known[v] for v in each] for each in (unit.invars, unit.outvars))
    return dataclasses.replace(
        unit, eqns=(one,), invars=tuple(invars), outvars=tuple(outvars)
    )


def _part_type(aval: Any, dims: Dims, dim: FactorDim, count: int) -> Any:
    sizes = zip(aval.shape, dims, strict=True)
    return aval.update(shape=tuple(n // count if d == dim else n for n, d in sizes))


def barrier_of(name: str, *avals: Any) -> Unit:
    """The unit of one barrier around arrays of the types `avals`."""
    return unit_of(name, _barrier, *avals)


def _barrier(*args: jax.Array) -> tuple[jax.Array, ...]:
    return lax.optimization_barrier(args)


# A step of a hundred layers has some hundred different ones.
@cached(2048, by_context=True)
def _traced(
    fun: Callable[..., Any], avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]
) -> Unit:
    return _unit(fun.__name__, functools.partial(fun, **dict(params)), *avals)


def _unit(name: str, fun: Callable[..., Any], *avals: Any) -> Unit:
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


def with_own_variables(unit: Unit) -> Unit:
    """A unit of the same equations on other variables.

    Units that are merged later are one jaxpr (`segment.py`), in which a variable is
    made once.
    """
    known: dict[Var, Var] = {var: fresh_var(var.aval) for var in unit.invars}
    eqns = tuple(
        dataclasses.replace(each, eqn=_copied_eqn(each.eqn, known))
        for each in unit.eqns
    )
    return dataclasses.replace(
        unit,
        eqns=eqns,
        invars=tuple(known[var] for var in unit.invars),
        outvars=tuple(known[var] for var in unit.outvars),
    )


def _copied_eqn(eqn: JaxprEqn, known: dict[Var, Var]) -> JaxprEqn:
    invars = [v if isinstance(v, Literal) else known[v] for v in eqn.invars]
    outvars = [known.setdefault(var, fresh_var(var.aval)) for var in eqn.outvars]
    return eqn.replace(invars=invars, outvars=outvars)


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
    unit = _unit(name, fun, *map(type_of, ins))
    buffers = dict(zip(unit.invars, ins, strict=True))
    buffers |= zip(unit.outvars, outs, strict=True)
    computes: list[Compute] = []
    # One equation each, so that each statement has one rule for later passes.
    for unit_eqn in unit.eqns:
        eqn, read = with_own_operands(unit_eqn.eqn)
        for var in eqn.outvars:
            if var not in buffers:
                name_of = names.fresh(f"{outs[0].name}_{eqn.primitive.name}")
                buffers[var] = _like(outs[0], aval_of(var), name_of)
        one = Unit(
            name=name,
            eqns=(dataclasses.replace(unit_eqn, eqn=eqn),),
            invars=tuple(read),
            outvars=tuple(eqn.outvars),
            pads=pads,
        )
        used, made = (
            tuple(buffers[v] for v in each) for each in (read.values(), eqn.outvars)
        )
        computes.append(Compute(unit=one, ins=used, outs=made))
    return computes


def type_of(buffer: Buffer) -> ShapedArray:
    """The type of a buffer, as `unit_of` takes it."""
    memory_space = buffer.memory_space
    return ShapedArray(buffer.shape, buffer.dtype, memory_space=memory_space)


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
