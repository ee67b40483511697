"""The fewest bytes that a forward can pass to its backward, in two programs or in one.

JAX passes every value that the derivatives read, such as the five arrays of a `gelu`.
The values that are worth passing are a least cut (`cut.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import Split, itemsize
from jhost.lowering.frontend.inline_calls import FlatJaxpr
from jhost.lowering.rules.elementwise import COMPUTED_AGAIN
from jhost.lowering.rules.properties import CALLS, IDENTITIES, called_body
from jhost.lowering.schedule.recompute.cut import least_cut
from jhost.lowering.schedule.recompute.pair import (
    Pair,
    on_others,
    pair_of,
    renamed,
    split_of,
)
from jhost.lowering.schedule.recompute.scans import (
    scans_in,
    with_least_stacked,
    with_less_stacked,
)

_APPLIED_AGAIN = IDENTITIES | {"reshard"}


def hand_over_least(split: Split) -> Split:
    """The two programs with as few bytes between them as recomputing allows.

    An operand of the first costs nothing, as it is there anyway.  If a policy of the
    user's says what is saved, only marks are applied again.
    """
    pair = pair_of(split)
    return split_of(_with_least(pair, dict.fromkeys(pair.first.invars, 0)), split)


def stack_least(flat: FlatJaxpr) -> FlatJaxpr:
    """The program whose scans stack the fewest bytes for its later scans.

    A program with a gradient of its own has scans of both kinds.
    """
    for place in scans_in(flat.eqns):
        flat = _with_less_before(flat, place)
    return flat


def _with_less_before(flat: FlatJaxpr, place: int) -> FlatJaxpr:
    """The program whose earlier scans stack less for the scan at `place`.

    What stands before that scan, and what stands from there on, are a pair.
    """
    before, behind = flat.eqns[:place], flat.eqns[place:]
    earlier = scans_in(before)
    made = (var for here in earlier for var in before[here].outvars)
    pair = Pair(
        FlatJaxpr(flat.invars, (), before),
        FlatJaxpr((), flat.outvars, behind),
        tuple((var, var) for var in made),
        by_policy=False,
    )
    # What is read behind is there anyway.
    free = _free(before, _makers(pair), {*flat.invars, *_read(behind), *flat.outvars})
    for here in earlier:
        pair = with_less_stacked(pair, here, 0, lambda v: _cost(v, free), _with_less)
    instead = {operand: value for value, operand in pair.saved}
    scan = on_others(pair.second.eqns[:1], instead)
    eqns = (*pair.first.eqns, *scan, *pair.second.eqns[1:])
    return dataclasses.replace(flat, eqns=eqns)


def _with_less(pair: Pair, given: Mapping[Var, int]) -> Pair:
    """A pair of bodies of one program, which hand on what matmuls of both read.

    Such a value is written to memory anyway, as in `loops.py`.  Were it computed again,
    it would also be gathered again: six layers of Llama 70B over four devices would
    take 2 % longer.
    """
    in_first, in_second = _contracted(pair.first), _contracted(pair.second)
    both = {v for v, x in pair.saved if v in in_first and x in in_second}
    return _with_least(pair, given, both)


def _with_least(
    pair: Pair, given: Mapping[Var, int], kept: Collection[Var] = ()
) -> Pair:
    """A pair with the least between its programs.

    `given` has the bytes that passing values takes which are there already.  Values in
    `kept` are not computed again, except from values that cost nothing.
    """
    again = _makers(pair)
    free = _free(
        pair.first.eqns, again, {var for var, cost in given.items() if not cost}
    )
    again = {v: e for v, e in again.items() if v in free or v not in kept}
    pair = with_least_stacked(pair, lambda v: _cost(v, free), _with_least)
    first, second = pair.first, pair.second
    made_of = {var: _operands(eqn) for var, eqn in again.items()}
    wanted = [value for value, _ in pair.saved]
    cut = least_cut(wanted, made_of, lambda v: given[v] if v in given else _bytes(v))
    results = (var for eqn in first.eqns for var in eqn.outvars)
    saved = [var for var in (*first.invars, *results) if var in cut.kept]
    computed = [e for e in first.eqns if not cut.again.isdisjoint(e.outvars)]
    instead = {operand: value for value, operand in pair.saved}
    outvars = tuple(renamed(second.outvars, instead))
    eqns = (*computed, *on_others(second.eqns, instead))
    return dataclasses.replace(
        pair,
        second=FlatJaxpr(second.invars, outvars, eqns),
        saved=tuple((value, value) for value in saved),
    )


# --- What may be computed again, and what it costs to pass -------------------------- #


def _makers(pair: Pair) -> dict[Var, JaxprEqn]:
    """The equation that makes each variable which may be computed again."""
    # The user has chosen what a policy saves, and `jax.checkpoint` would save it too.
    primitives = _APPLIED_AGAIN | (set() if pair.by_policy else COMPUTED_AGAIN)
    eqns = (eqn for eqn in pair.first.eqns if _is_made_of(eqn, primitives))
    # An effect must happen once, so an equation that has one is never computed again.
    return {var: eqn for eqn in eqns if not eqn.effects for var in eqn.outvars}


def _is_made_of(eqn: JaxprEqn, primitives: Collection[str]) -> bool:
    """Whether an equation is one of the primitives, or calls nothing but these."""
    if eqn.primitive.name not in CALLS:
        return eqn.primitive.name in primitives
    return all(_is_made_of(inner, primitives) for inner in called_body(eqn).eqns)


def _contracted(flat: FlatJaxpr) -> set[Var]:
    """The values that matmuls read."""
    return _read(eqn for eqn in flat.eqns if eqn.primitive.name == "dot_general")


def _free(
    eqns: Iterable[JaxprEqn], again: Mapping[Var, JaxprEqn], there: Iterable[Var]
) -> set[Var]:
    """The values that are `there` anyway, or are computed again from such values."""
    free = {*there}
    for eqn in eqns:
        if free.issuperset(_operands(eqn)):
            free |= again.keys() & set(eqn.outvars)
    return free


def _cost(var: Var, free: Container[Var]) -> int:
    return 0 if var in free else _bytes(var)


def _bytes(var: Var) -> int:
    aval: Any = var.aval
    return max(1, int(aval.size) * itemsize(aval.dtype))


# --- Equations ---------------------------------------------------------------------- #


def _operands(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _read(eqns: Iterable[JaxprEqn]) -> set[Var]:
    return {var for eqn in eqns for var in _operands(eqn)}
