"""Change decisions while the whole program then receives fewer bytes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container, Iterable, Iterator

from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.solver import Solver
from jhost.lowering.rules.dim_rule import factors_of

_TRIALS = 256
"""How many decisions are tried otherwise, at most: each costs a walk of the program."""

_ROUNDS = 4
"""How often all decisions are tried alone, at most; one round mostly finds nothing."""

_RESTARTS = 8
"""How many contractions are spread otherwise from the start, at most: each has to pay
for that part of all bytes."""

_DECISIONS = 2048
"""How many operations are decided anew for that, about: long programs wait for it."""


def improved(solver: Solver, made: Decisions) -> Decisions:
    """`made`, with single decisions changed as long as that moves fewer bytes."""
    trials, number = _TRIALS, 0
    numbers = solver.paying(made)
    while number < len(numbers) and trials > 0:
        better = False
        for candidate in others(solver, numbers[number], made):
            trials -= 1
            better |= tried(solver, numbers[number], candidate, made)
        if not better:
            number += 1
        else:
            # A change may let earlier ones pay, so all are asked again.
            numbers, number = solver.paying(made), 0
    return _refined(solver, made)


def _refined(solver: Solver, made: Decisions) -> Decisions:
    """`made`, with single decisions changed that pay while all others stay.

    A weight is so gathered behind its cast to a narrower dtype, whatever its readers
    would have preferred.  Such a trial is quick, so all are made.
    """
    for _ in range(_ROUNDS):
        better = False
        for number in solver.paying(made):
            for candidate in others(solver, number, made):
                better |= tried(solver, number, candidate, made, alone=True)
        if not better:
            break
    return made


def others(solver: Solver, number: int, made: Decisions) -> list[Assignment]:
    """The other assignments that the operation could have.

    No reduction is repeated on more devices for fewer bytes.
    """
    op, current = solver.operations[number], made.assignments[number]
    # A reduction stays spread over as many axes.  Other work is cheap to repeat.
    least = sum(map(len, current)) if op.reduces else 0
    return [
        candidate
        for candidate in (
            *solver.candidates(op, made.layouts),
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
    if op.reduces or op.pinned is not None or solver.is_bound(op):
        return
    gathered = {
        axis: None
        for name, dims in zip(op.ins, op.operands, strict=True)
        for dim, axes in zip(dims, made.layouts[name], strict=True)
        if dim is None
        for axis in axes
        if not any(axis in each for each in current)
    }
    # The minor axis of a dim leaves it first.
    moves = dict.fromkeys([tuple(reversed(gathered)), *((axis,) for axis in gathered)])
    yield from _spread_otherwise(solver, op, current, moves)


def tried(
    solver: Solver,
    number: int,
    candidate: Assignment,
    made: Decisions,
    alone: bool = False,
) -> bool:
    """Change a decision, and those after it that it bears on, if that is better.

    If it is changed `alone`, only what has to follow other values does.
    """
    before, undo = made.price, list[tuple[int, Assignment]]()
    waiting = {number}
    order = [number]
    while order:
        other = heapq.heappop(order)
        old = made.assignments[other]
        new = candidate if other == number else solver.cheapest(other, made)
        if new == old:
            continue
        undo.append((other, old))
        # Others that read the same values may now share a move.
        # Readers of the results, and others that read the same operands.
        changed = {*made.decide(other, new), *solver.operations[other].ins}
        for reader in itertools.chain(*(solver.readers.get(n, ()) for n in changed)):
            if alone and not solver.is_bound(solver.operations[reader]):
                continue
            # Each is decided once, in program order, so that a trial ends.
            if reader > other and reader not in waiting:
                waiting.add(reader)
                heapq.heappush(order, reader)
    if made.price.beats(before):
        return True
    for other, old in reversed(undo):
        made.decide(other, old)
    return False


# --- From the start ---------------------------------------------------------------- #


def restarted(solver: Solver, best: Decisions) -> Decisions:
    """`best`, or what comes of a contraction that is spread otherwise, if less.

    All that leads to it then has to be laid out for it.  No change of single decisions
    finds that: tokens that go whole to their experts, say, and not as partial sums.
    """
    for number, assignment in _restarts(solver, best):
        # Preferences are the solver's state: a restart that does not win is undone.
        before = solver.preferences.snapshot()
        other = solver.fixed_point_with(number, assignment)
        if _is_clearly_better(solver, other, best):
            best = improved(solver, other)
        else:
            solver.preferences.restore(before)
    return best


def _is_clearly_better(solver: Solver, other: Decisions, best: Decisions) -> bool:
    """Whether half of the bytes move, of the same parameters, and no work is repeated.

    For a smaller gain, a program laid out differently throughout would surprise: one
    that exchanges weights, say, instead of summing over the devices.
    """
    return (
        2 * other.total.all <= best.total.all
        and other.price.beats(best.price)
        and all(other.layouts[p.name] == best.layouts[p.name] for p in solver.params)
        and other.flops <= best.flops
    )


def _restarts(solver: Solver, best: Decisions) -> list[tuple[int, Assignment]]:
    """Contractions that pay for much of it, and how else they could be spread.

    First those that then move the fewest bytes of their results and of what the program
    is given, which lies as it lies.
    """
    if not best.total.all:
        return []  # nothing moves, in a body without any operation, say
    given = {param.name for param in solver.params}
    found: list[tuple[int, int, Assignment]] = []
    for number in solver.paying(best):
        op, now = solver.operations[number], best.assignments[number]
        if not op.reduces or len(op.ins) < 2 or op.pinned is not None:
            continue
        # A contraction that moves little cannot pay for a new start.
        if _moved(solver, op, now, best, op.ins) < best.total.all / _RESTARTS:
            continue
        for assignment in _spread_otherwise(
            solver, op, now, [(a,) for a in solver.mesh]
        ):
            least = _moved(solver, op, assignment, best, given)
            if least < best.total.all:
                found.append((least, number, assignment))
    most = min(_RESTARTS, _DECISIONS // len(solver.operations))
    return [(number, assignment) for _, number, assignment in sorted(found)[:most]]


def _spread_otherwise(
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


def _moved(
    solver: Solver,
    op: Operation,
    assignment: Assignment,
    best: Decisions,
    operands: Container[str],
) -> int:
    """The bytes that it takes to move an operation's results, and those operands."""
    effect = solver.effects.of(op, assignment)
    moves = [
        solver.costs.reshard(name, best.layouts[name], want)
        for name, want in effect.wants
        if name in operands
    ]
    return sum((moved.all for moved in moves), effect.cost.all)
