"""Change single decisions as long as the whole program then receives fewer bytes."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.assigner import decided_by
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.solver import KnownRest, Solver
from jhost.lowering.rules.dim_rule import factors_of

_TRIALS = 512
"""The most changes with all that follows from them that are tried."""

_ROUNDS = 4
"""The most rounds over all decisions by themselves; mostly the first finds nothing."""

_REACH = 32
"""The most operations for each changed one that are decided again with a change.

What gains does so nearby: the largest gain that was seen decided thirteen.
"""

_LITTLE = 1024
"""The part of all work (a 1024th) by which it may grow."""


class OtherAssignment(NamedTuple):
    """Another assignment for some operations that are alike.

    `alone`, only operations that have to follow other values change with them.
    """

    numbers: tuple[int, ...]
    assignment: Assignment
    alone: bool


@dataclasses.dataclass(slots=True)
class Failed:
    """Changes that cost no less, and would not until something that they read changes.

    Attributes:
        by: when a change failed, and the operations that were decided for it.  Not
            where work changes: its bytes are rounded, so they depend on all other work.
        at: when a value was last laid out otherwise, or moved otherwise.
    """

    now: int = 0
    by: dict[OtherAssignment, tuple[int, Sequence[Operation]]] = dataclasses.field(
        default_factory=dict
    )
    at: dict[str, int] = dataclasses.field(default_factory=dict)

    def changed(self, operations: Iterable[Operation]) -> None:
        """Some operations are assigned otherwise from now on."""
        self.now += 1
        for op in operations:
            self.at.update(dict.fromkeys(_around(op), self.now))

    def fails_again(self, change: OtherAssignment) -> bool:
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
    """`made`, with decisions changed as long as that moves fewer bytes.

    At last they change alone.  In this way a weight is gathered behind its cast to a
    narrower dtype, even if its readers preferred otherwise.
    """
    rounds = _Rounds(solver, made)
    while rounds.finds_better(alone=False):
        pass
    for _ in range(_ROUNDS):
        if not rounds.finds_better(alone=True):
            break
    return made


class _Rounds:
    """Rounds over all decisions that move something.

    Layers are alike.  So of operations in the same case one is tried, and what gains
    there is tried at all others at once.
    """

    def __init__(self, solver: Solver, made: Decisions) -> None:
        self.solver, self.made = solver, made
        self.known, self.failed = KnownRest(), Failed()
        self.trials = _TRIALS

    def finds_better(self, alone: bool) -> bool:
        """Whether a round found anything; an earlier decision may gain then, too."""
        better, seen = False, set[Hashable]()
        numbers = self.solver.paying(self.made, self.known)
        for number in numbers:
            case = case_of(self.solver, number, self.made)
            if case in seen:
                continue
            if self.gains(number, case, numbers, alone):
                better = True
            else:
                seen.add(case)
        return better

    def gains(
        self, number: int, case: Hashable, numbers: Sequence[int], alone: bool
    ) -> bool:
        """Whether another assignment gains at an operation; then at those alike too."""
        gained = False
        for candidate in others(self.solver, number, self.made):
            if not self.tried(OtherAssignment((number,), candidate, alone)):
                continue
            gained = True
            alike = [n for n in numbers if case_of(self.solver, n, self.made) == case]
            if alike:
                self.tried(OtherAssignment(tuple(alike), candidate, alone))
        return gained

    def tried(self, change: OtherAssignment) -> bool:
        """Make a change if that is better, unless it would fail as it did before."""
        # A change of one decision is quick, so all are tried.
        if self.failed.fails_again(change) or not (self.trials or change.alone):
            return False
        self.trials -= not change.alone
        return tried(self.solver, change, self.made, self.failed)


def case_of(solver: Solver, number: int, made: Decisions) -> Hashable:
    """All that the other assignments of an operation depend on."""
    op, current = solver.operations[number], made.assignments[number]
    layouts = [made.layouts[name] for name in decided_by(op)]
    about = solver.preferences.about(op.outs)
    return solver.assigner.kinds.of(op), about, current, *layouts


def others(solver: Solver, number: int, made: Decisions) -> Sequence[Assignment]:
    """The other assignments that the operation could have, found once for a case."""
    op, current = solver.operations[number], made.assignments[number]
    known, case = solver.assigner.others, case_of(solver, number, made)
    found = known.get(case)
    if found is None:
        found = known[case] = _others(solver, op, current, made)
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
    solver: Solver, change: OtherAssignment, made: Decisions, failed: Failed
) -> bool:
    """Change decisions, and later ones that they affect, if that is better.

    If not, `failed` has the change from then on.
    """
    numbers, candidate, alone = change
    before, undo = made.price, list[tuple[int, Assignment]]()
    read = {name for number in numbers for name in solver.operations[number].ins}
    waiting = {*numbers}
    order = [*numbers]
    while order and len(waiting) <= _REACH * len(numbers):
        other = heapq.heappop(order)
        old = made.assignments[other]
        new = candidate if other in numbers else _next(solver, read, other, made)
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
    if not order and made.price.beats(before):
        failed.changed(solver.operations[other] for other, _ in undo)
        return True
    if made.flops == before.flops:
        failed.by[change] = failed.now, [solver.operations[n] for n in waiting]
    for other, old in reversed(undo):
        made.decide(other, old)
    return False


def _next(solver: Solver, read: set[str], other: int, made: Decisions) -> Assignment:
    """The best assignment of an operation, now that an earlier one has changed.

    Of two that `read` one value whole, as two sorts of it, neither gains alone: the
    value has to be gathered for the other one.
    """
    assigner, op, layouts = solver.assigner, solver.operations[other], made.layouts
    best = assigner.cheapest(other, made)
    if read.isdisjoint(op.ins):
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
