"""Change single decisions as long as the whole program then receives fewer bytes."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.assigner import decided_by
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.solver import KnownRest, Solver
from jhost.lowering.rules.dim_rule import factors_of

_TRIALS = 256
"""The most changes of a decision that are tried; each may walk the whole program."""

_ROUNDS = 4
"""The most rounds over all decisions by themselves; mostly the first finds nothing."""

_LITTLE = 1024
"""The part of all work (a 1024th) by which it may grow."""


NewDecision: TypeAlias = tuple[int, Assignment, bool]
"""An operation, another assignment, and whether it changes alone."""


@dataclasses.dataclass(slots=True)
class Failed:
    """Changes that cost no less, and would not until something that they read changes.

    Attributes:
        by: when a change failed, and the operations that were decided for it.  Not
            where work changes: its bytes are rounded, so they depend on all other work.
        at: when a value was last laid out otherwise, or moved otherwise.
    """

    now: int = 0
    by: dict[NewDecision, tuple[int, Sequence[Operation]]] = dataclasses.field(
        default_factory=dict
    )
    at: dict[str, int] = dataclasses.field(default_factory=dict)

    def changed(self, operations: Iterable[Operation]) -> None:
        """Some operations are assigned otherwise from now on."""
        self.now += 1
        for op in operations:
            self.at.update(dict.fromkeys(_around(op), self.now))

    def fails_again(self, change: NewDecision) -> bool:
        """Whether it failed, and nothing that it depends on has changed since."""
        if change not in self.by:
            return False
        then, operations = self.by[change]
        return all(
            self.at.get(name, 0) <= then for op in operations for name in _around(op)
        )


def _around(op: Operation) -> tuple[str, ...]:
    """The values that an operation's decision reads, or lays out."""
    return (*decided_by(op), *op.outs)


def improved(solver: Solver, made: Decisions) -> Decisions:
    """`made`, with single decisions changed as long as that moves fewer bytes."""
    trials, number, known, failed = _TRIALS, 0, KnownRest(), Failed()
    numbers = solver.paying(made, known)
    while number < len(numbers) and trials > 0:
        better = False
        for candidate in others(solver, numbers[number], made):
            trials -= 1
            better |= tried(solver, numbers[number], candidate, made, failed)
        if not better:
            number += 1
        else:
            # After a change, an earlier decision may gain too, so all are tried again.
            numbers, number = solver.paying(made, known), 0
    return _refined(solver, made, known, failed)


def _refined(
    solver: Solver, made: Decisions, known: KnownRest, failed: Failed
) -> Decisions:
    """`made`, with changes of single decisions that gain while all others stay.

    In this way a weight is gathered behind its cast to a narrower dtype, even if its
    readers preferred otherwise.  Such a trial is quick, so all are made.
    """
    for _ in range(_ROUNDS):
        better = False
        for number in solver.paying(made, known):
            for candidate in others(solver, number, made):
                better |= tried(solver, number, candidate, made, failed, alone=True)
        if not better:
            break
    return made


def others(solver: Solver, number: int, made: Decisions) -> Sequence[Assignment]:
    """The other assignments that the operation could have, found once for a case."""
    op, current = solver.operations[number], made.assignments[number]
    assigner = solver.assigner
    layouts = [made.layouts[name] for name in decided_by(op)]
    case = assigner.kinds.of(op), solver.preferences.about(op.outs), current, *layouts
    found = assigner.others.get(case)
    if found is None:
        found = assigner.others[case] = _others(solver, op, current, made)
    return found


def _others(
    solver: Solver, op: Operation, current: Assignment, made: Decisions
) -> Sequence[Assignment]:
    # A reduction stays spread over as many axes: fewer bytes do not pay for repeating
    # it on more devices.  Other work is cheap to repeat.
    least = sum(map(len, current)) if op.reduces else 0
    return [
        candidate
        for candidate in (
            *solver.assigner.candidates(op, made.layouts),
            *_by_other_dims(solver, op, current, made),
        )
        if candidate != current and sum(map(len, candidate)) >= least
    ]


def _by_other_dims(
    solver: Solver, op: Operation, current: Assignment, made: Decisions
) -> Iterator[Assignment]:
    """The assignments with an axis elsewhere whose dim the operation reads whole.

    A sort along a sharded dim so works on the columns that a device has, for two
    exchanges.  What reduces is left as it is: its work is worth more than the bytes.
    """
    if op.reduces or op.pinned is not None or solver.assigner.is_bound(op):
        return
    # A dim of several factors may be read whole as well.
    nested = factors_of(op.nested)
    gathered = {
        axis: None
        for name, dims in zip(op.ins, op.operands, strict=True)
        for dim, axes in zip(dims, made.layouts[name], strict=True)
        if dim is None or dim.factor in nested
        for axis in axes
        if not any(axis in each for each in current)
    }
    moves = dict.fromkeys([tuple(gathered), *((axis,) for axis in gathered)])
    yield from spread_otherwise(solver, op, current, moves)


def tried(
    solver: Solver,
    number: int,
    candidate: Assignment,
    made: Decisions,
    failed: Failed,
    alone: bool = False,
) -> bool:
    """Change a decision, and later ones that it affects, if that is better.

    With `alone`, only operations that have to follow other values change with it.  What
    `failed` before is not tried again as long as it would fail again.
    """
    change = number, candidate, alone
    if failed.fails_again(change):
        return False
    before, undo = made.price, list[tuple[int, Assignment]]()
    waiting = {number}
    order = [number]
    while order:
        other = heapq.heappop(order)
        old = made.assignments[other]
        new = candidate if other == number else _next(solver, number, other, made)
        if new == old:
            continue
        undo.append((other, old))
        # Readers of the results are affected.  Other readers of the same operands may
        # now share a move with this operation.
        changed = {*made.decide(other, new), *solver.operations[other].ins}
        for reader in itertools.chain(*(solver.readers.get(n, ()) for n in changed)):
            if alone and not solver.assigner.is_bound(solver.operations[reader]):
                continue
            # Each is decided once, in program order, so that a trial ends.
            if reader > other and reader not in waiting:
                waiting.add(reader)
                heapq.heappush(order, reader)
    if made.price.beats(before):
        failed.changed(solver.operations[other] for other, _ in undo)
        return True
    if made.flops == before.flops:
        failed.by[change] = failed.now, [solver.operations[n] for n in waiting]
    for other, old in reversed(undo):
        made.decide(other, old)
    return False


def _next(solver: Solver, number: int, other: int, made: Decisions) -> Assignment:
    """The best assignment of an operation, now that an earlier one has changed.

    Of two that read one value whole, as two sorts of it, neither gains alone: the value
    has to be gathered for the other one.
    """
    assigner, op, layouts = solver.assigner, solver.operations[other], made.layouts
    best = assigner.cheapest(other, made)
    if set(op.ins).isdisjoint(solver.operations[number].ins):
        return best
    moves = made.known(other)
    every = [best, *_by_other_dims(solver, op, best, made)]
    return min(every, key=lambda each: assigner.rank(op, each, layouts, moves).cost)


def spread_otherwise(
    solver: Solver, op: Operation, now: Assignment, moves: Iterable[tuple[str, ...]]
) -> Iterator[Assignment]:
    """The assignments with some axes on another factor that mesh axes may cut."""
    followed = map(factors_of, (*op.operands, *op.results))
    factors = sorted(set[int]().union(*followed))
    for axes, factor in itertools.product(moves, factors):
        if any(solver.mesh[axis] > 1 and axis not in now[factor] for axis in axes):
            spread = [tuple(a for a in each if a not in axes) for each in now]
            spread[factor] = (*spread[factor], *axes)
            if op.fits(tuple(spread), solver.mesh):
                yield tuple(spread)


def is_alike(solver: Solver, other: Decisions, best: Decisions) -> bool:
    """Whether `other` has the same parameters as `best`, and hardly more work."""
    return (
        all(other.layouts[p.name] == best.layouts[p.name] for p in solver.params)
        # Small reductions, such as the loss, may be repeated.
        and other.flops <= best.flops + best.flops // _LITTLE
    )
