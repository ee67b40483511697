"""The fewest bytes that a forward program can hand to the backward one.

What JAX hands on are the values that the derivatives read, such as the five arrays of
`gelu`'s; what is worth handing on is a least cut (`lowering/ir/least_cut.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import Residual, Split, rewritten
from jhost.lowering.frontend.inline_calls import FlatJaxpr, inline_plain_calls
from jhost.lowering.ir.least_cut import least_cut, needed
from jhost.lowering.rules.elementwise import COMPUTED_AGAIN
from jhost.lowering.rules.properties import CALLS, IDENTITIES, called_body

_APPLIED_AGAIN = IDENTITIES | {"reshard"}


def hand_over_least(split: Split) -> Split:
    """The two programs with as few bytes between them as recomputing allows.

    An operand of the first costs nothing, as it is there anyway.  Where a policy of
    the user's says what is saved, only marks are applied again.
    """
    flat = inline_plain_calls(split.first)
    again = _makers(
        flat, _APPLIED_AGAIN if split.by_policy else _APPLIED_AGAIN | COMPUTED_AGAIN
    )
    wanted = [_value_of(residual, flat) for residual in split.residuals]
    saved = _least_cut(flat, again, [var for var in wanted if var])
    eqns = _computing(wanted, saved, again, flat)
    return _cut_at(split, flat, wanted, saved, eqns)


def _makers(flat: FlatJaxpr, primitives: Collection[str]) -> dict[Var, JaxprEqn]:
    """The equation that makes each variable which may be computed again."""
    eqns = (eqn for eqn in flat.eqns if _is_made_of(eqn, primitives))
    return {var: eqn for eqn in eqns if not eqn.effects for var in eqn.outvars}


def _is_made_of(eqn: JaxprEqn, primitives: Collection[str]) -> bool:
    """Whether an equation is one of the primitives, or calls nothing but these."""
    if eqn.primitive.name not in CALLS:
        return eqn.primitive.name in primitives
    return all(_is_made_of(inner, primitives) for inner in called_body(eqn).eqns)


def _value_of(residual: Residual, flat: FlatJaxpr) -> Var | None:
    """What is handed over, or None for a constant."""
    if residual.result is not None:
        return flat.outvars[residual.result]
    return None if residual.given is None else flat.invars[residual.given]


# --- The cut ------------------------------------------------------------------------ #


def _least_cut(
    flat: FlatJaxpr, again: Mapping[Var, JaxprEqn], wanted: Collection[Var]
) -> list[Var]:
    """The variables of fewest bytes from which `wanted` can be computed again.

    They come in the order of the program.
    """
    given = set(flat.invars)
    cut = least_cut(wanted, _made_of(again), lambda v: 0 if v in given else _bytes(v))
    results = (var for eqn in flat.eqns for var in eqn.outvars)
    return [var for var in (*flat.invars, *results) if var in cut]


def _made_of(again: Mapping[Var, JaxprEqn]) -> dict[Var, list[Var]]:
    return {var: _operands(eqn) for var, eqn in again.items()}


def _operands(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _bytes(var: Var) -> int:
    aval: Any = var.aval
    return max(1, int(aval.size) * aval.dtype.itemsize)


# --- The programs ------------------------------------------------------------------- #


def _cut_at(
    split: Split,
    flat: FlatJaxpr,
    wanted: Sequence[Var | None],
    saved: Sequence[Var],
    again: Sequence[JaxprEqn],
) -> Split:
    """The programs with `saved` between them, and `again` at the start of the second.

    What else the first made for the second, but no residual, stays its last results.
    """
    constants = [n for n, var in enumerate(wanted) if var is None]
    kept = flat.outvars[: split.kept]
    there = {*flat.invars, *kept}
    made = [var for var in saved if var not in there]
    old = {residual.result for residual in split.residuals}
    others = [
        var for n, var in enumerate(flat.outvars) if n >= split.kept and n not in old
    ]
    results = [*kept, *made, *others]
    sources = [_source(var, results, flat.invars) for var in saved]
    invars = split.second.jaxpr.invars
    operands = [*saved, *(invars[n] for n in constants), *invars[len(wanted) :]]
    instead = {invars[n]: var for n, var in enumerate(wanted) if var}
    return dataclasses.replace(
        split,
        first=rewritten(
            split.first, invars=flat.invars, outvars=results, eqns=flat.eqns
        ),
        second=_with_other_operands(split.second, operands, instead, again),
        residuals=(*sources, *(split.residuals[n] for n in constants)),
    )


def _source(var: Var, results: Sequence[Var], invars: Sequence[Var]) -> Residual:
    if var in invars:
        return Residual(given=invars.index(var))
    return Residual(result=results.index(var))


def _computing(
    wanted: Iterable[Var | None],
    saved: Collection[Var],
    again: Mapping[Var, JaxprEqn],
    flat: FlatJaxpr,
) -> list[JaxprEqn]:
    """The equations from `saved` to `wanted`, in their order."""
    computed = needed([var for var in wanted if var], _made_of(again), saved)
    makers = {id(again[var]) for var in computed if var not in saved}
    return [eqn for eqn in flat.eqns if id(eqn) in makers]


def _with_other_operands(
    closed_jaxpr: Any,
    operands: Sequence[Var],
    instead: Mapping[Var, Var],
    before: Sequence[JaxprEqn],
) -> Any:
    """The program on `operands`, and on what `before` computes `instead` of its own."""

    def renamed(atoms: Iterable[Any]) -> list[Any]:
        return [a if isinstance(a, Literal) else instead.get(a, a) for a in atoms]

    jaxpr = closed_jaxpr.jaxpr
    eqns = [eqn.replace(invars=renamed(eqn.invars)) for eqn in jaxpr.eqns]
    return rewritten(
        closed_jaxpr,
        invars=operands,
        outvars=renamed(jaxpr.outvars),
        eqns=[*before, *eqns],
    )
