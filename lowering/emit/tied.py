"""Which operands of a loop's step wait for the step before it.

An operand that waits goes through a barrier.  XLA copies a part of an array before a
barrier, where a kernel could read it in place.  So only values that the loop makes or
receives wait.  Parts of older arrays wait only for a matmul that would otherwise wait
for nothing.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from jax.extend.core import Var

from jhost._jax import aval_of
from jhost.lowering.ir.effects import Aliases, written
from jhost.lowering.ir.layout import size_in_bytes
from jhost.lowering.ir.statements import For, Select, Unit, walk
from jhost.lowering.rules.dim_rule import shape_of


def made_in(loop: For) -> frozenset[str]:
    """The buffers that `loop` writes, whole or in part, and the parts of these."""
    aliases = Aliases(loop.body)
    stmts = [stmt for stmt in walk(loop.body) if not isinstance(stmt, Select)]
    buffers = [buffer for stmt in stmts for buffer in written(stmt)]
    made = {b.name for b in buffers} | aliases.memories(buffers)
    parts = aliases.selects.values()
    made |= {s.out.name for s in parts if aliases.memory(s.source).name in made}
    return frozenset(made)


def tied(
    unit: Unit, made: AbstractSet[int], parts: AbstractSet[int], *, repeats: bool
) -> AbstractSet[int]:
    """The operands that wait, by number.

    Some are `made` in the loop, and others are `parts` of values from before.  A step
    that `repeats` waits for some operand, or XLA would merge its iterations.  Cheap
    work that stands there once, such as a weight's cast, reads the old value in place.
    """
    waiting = set(made)
    every = frozenset(range(len(unit.invars) if repeats else 0))
    # If no operand of a matmul waits, it could run in any step's place, and XLA would
    # merge it with the matmuls of other steps.
    for reads in _contractions(unit) or [every]:
        if waiting.isdisjoint(reads):
            waiting |= (parts & reads) or reads
    return waiting


def last_work(unit: Unit) -> int | None:
    """The number of a result that a unit's last contraction makes, if it has one.

    Once it is there, all work of the unit is done.
    """
    made: set[int] = set()
    for unit_eqn in unit.eqns:
        eqn = unit_eqn.eqn
        outs = {id(var) for var in eqn.outvars}
        if unit_eqn.rule.contracts:
            made = outs
        elif not made.isdisjoint(map(id, eqn.invars)):
            made |= outs
    numbers = (n for n, var in enumerate(unit.outvars) if id(var) in made)
    return next(numbers, None)


def _contractions(unit: Unit) -> list[AbstractSet[int]]:
    """For each contraction, the operands of the unit that it is made of."""
    reads: dict[int, frozenset[int]] = {
        id(var): frozenset({number}) for number, var in enumerate(unit.invars)
    }
    found: list[AbstractSet[int]] = []
    for unit_eqn in unit.eqns:
        eqn = unit_eqn.eqn
        of = frozenset[int]().union(*(reads.get(id(v), ()) for v in eqn.invars))
        reads |= {id(var): of for var in eqn.outvars}
        if unit_eqn.rule.contracts:
            found.append(of)
    return found


def products_of(unit: Unit) -> list[tuple[int, Var]]:
    """The results that are products, maybe cast or transposed, with what they are of.

    That is the smallest value on the way from the contraction: of a product that is
    widened at the end, the product itself.
    """
    made: dict[Var, Var] = {}
    for unit_eqn in unit.eqns:
        eqn = unit_eqn.eqn
        read = [made[v] for v in eqn.invars if isinstance(v, Var) and v in made]
        if unit_eqn.rule.contracts:
            made |= {out: out for out in eqn.outvars}
        elif read and len(eqn.invars) == 1:
            made |= {out: min(*read, out, key=_bytes) for out in eqn.outvars}
    return [(n, made[v]) for n, v in enumerate(unit.outvars) if v in made]


def _bytes(var: Var) -> int:
    return size_in_bytes(shape_of(var), aval_of(var).dtype)
