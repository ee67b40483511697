"""The fewest bytes that a forward program can pass to the backward one.

JAX passes every value that the derivatives read, such as the five arrays of a `gelu`.
The values that are worth passing are a least cut (`lowering/ir/least_cut.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jhost._call.residual_pair import Pair, pair_of, split_of
from jhost._call.residual_scans import with_least_stacked
from jhost._jax import Split
from jhost.lowering.frontend.inline_calls import FlatJaxpr
from jhost.lowering.ir.least_cut import least_cut, needed
from jhost.lowering.rules.elementwise import COMPUTED_AGAIN
from jhost.lowering.rules.properties import CALLS, IDENTITIES, called_body

_APPLIED_AGAIN = IDENTITIES | {"reshard"}


def hand_over_least(split: Split) -> Split:
    """The two programs with as few bytes between them as recomputing allows.

    An operand of the first costs nothing, as it is there anyway.  If a policy of the
    user's says what is saved, only marks are applied again.
    """
    pair = pair_of(split)
    return split_of(_with_least(pair, [0] * len(pair.first.invars)), split)


def _with_least(pair: Pair, costs: Sequence[int]) -> Pair:
    """A pair with the least between its programs.

    `costs` has the bytes that passing each operand of the first takes.
    """
    # The user has chosen what a policy saves, and `jax.checkpoint` would save it too.
    primitives = _APPLIED_AGAIN | (set() if pair.by_policy else COMPUTED_AGAIN)
    again = _makers(pair.first, primitives)
    given = dict(zip(pair.first.invars, costs, strict=True))
    free = _free(pair.first, again, given)
    pair = with_least_stacked(
        pair, lambda var: 0 if var in free else _bytes(var), _with_least
    )
    wanted = [value for value, _ in pair.handed]
    saved = _least_cut(pair.first, again, wanted, given)
    computed = _computing(wanted, saved, again, pair.first)
    instead = {operand: value for value, operand in pair.handed}
    second = _on_other_operands(pair.second, instead)
    return Pair(
        pair.first,
        FlatJaxpr(second.invars, second.outvars, (*computed, *second.eqns)),
        tuple((value, value) for value in saved),
        pair.by_policy,
    )


def _makers(flat: FlatJaxpr, primitives: Collection[str]) -> dict[Var, JaxprEqn]:
    """The equation that makes each variable which may be computed again."""
    eqns = (eqn for eqn in flat.eqns if _is_made_of(eqn, primitives))
    # An effect must happen once, so an equation that has one is never computed again.
    return {var: eqn for eqn in eqns if not eqn.effects for var in eqn.outvars}


def _is_made_of(eqn: JaxprEqn, primitives: Collection[str]) -> bool:
    """Whether an equation is one of the primitives, or calls nothing but these."""
    if eqn.primitive.name not in CALLS:
        return eqn.primitive.name in primitives
    return all(_is_made_of(inner, primitives) for inner in called_body(eqn).eqns)


def _free(
    flat: FlatJaxpr, again: Mapping[Var, JaxprEqn], given: Mapping[Var, int]
) -> set[Var]:
    """The values that cost nothing to pass, or are computed again from such values."""
    free = {var for var, cost in given.items() if not cost}
    for eqn in flat.eqns:
        if free.issuperset(_operands(eqn)):
            free |= again.keys() & set(eqn.outvars)
    return free


# --- The cut ------------------------------------------------------------------------ #


def _least_cut(
    flat: FlatJaxpr,
    again: Mapping[Var, JaxprEqn],
    wanted: Collection[Var],
    given: Mapping[Var, int],
) -> list[Var]:
    """The variables of fewest bytes from which `wanted` can be computed again.

    They come in the order of the program.
    """
    cut = least_cut(
        wanted, _made_of(again), lambda v: given[v] if v in given else _bytes(v)
    )
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


def _computing(
    wanted: Iterable[Var],
    saved: Collection[Var],
    again: Mapping[Var, JaxprEqn],
    flat: FlatJaxpr,
) -> list[JaxprEqn]:
    """The equations from `saved` to `wanted`, in their order."""
    computed = needed(wanted, _made_of(again), saved)
    makers = {id(again[var]) for var in computed if var not in saved}
    return [eqn for eqn in flat.eqns if id(eqn) in makers]


def _on_other_operands(flat: FlatJaxpr, instead: Mapping[Var, Var]) -> FlatJaxpr:
    """The program that reads other values `instead` of some of its operands."""

    def renamed(atoms: Iterable[Any]) -> list[Any]:
        return [a if isinstance(a, Literal) else instead.get(a, a) for a in atoms]

    eqns = tuple(eqn.replace(invars=renamed(eqn.invars)) for eqn in flat.eqns)
    return FlatJaxpr(flat.invars, tuple(renamed(flat.outvars)), eqns)
