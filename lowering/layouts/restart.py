"""Decide all again, with another assignment of one operation given.

All values that lead to a contraction are then laid out for it, which no change of
single decisions finds.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.improve import improved, is_alike, spread_otherwise
from jhost.lowering.layouts.solver import Solver

_RESTARTS = 8
"""The most contractions for which all is decided again from the start.

Each of them has to move at least this part (an eighth) of all bytes.
"""

_DECISIONS = 2048
"""About how many operations restarts decide again; it bounds their time."""


def restarted(solver: Solver, best: Decisions) -> Decisions:
    """`best`, or better decisions that begin with another assignment of a contraction.

    All values that lead to the contraction are then laid out for it, which no change of
    single decisions finds.  An example are tokens that go whole to their experts, and
    not as partial sums.
    """
    restarts = [(_is_clearly_better, *each) for each in _restarts(solver, best)]
    restarts += [(_is_better, *each) for each in _carried_as_made(solver, best)]
    for is_better, number, assignment in restarts:
        # Preferences are the solver's state: a restart that does not win is undone.
        before = solver.preferences.snapshot()
        other = solver.fixed_point_with(number, assignment)
        if is_better(solver, other, best):
            best = improved(solver, other)
        else:
            solver.preferences.restore(before)
    return best


def _is_clearly_better(solver: Solver, other: Decisions, best: Decisions) -> bool:
    """Whether `other` moves at most half of the bytes, and repeats no more work.

    The parameters must have the same layouts.  A smaller gain does not count, because
    a program with all layouts changed surprises its user.  It may exchange weights, for
    example, instead of summing over the devices.
    """
    return 2 * other.total.all <= best.total.all and _is_better(solver, other, best)


def _is_better(solver: Solver, other: Decisions, best: Decisions) -> bool:
    """Whether `other` costs less, and does as `best` does."""
    return other.price.beats(best.price) and is_alike(solver, other, best)


def _restarts(solver: Solver, best: Decisions) -> list[tuple[int, Assignment]]:
    """Contractions that move much, with other assignments, the most promising first.

    Those come first that then move the fewest bytes of their results and of params,
    whose layouts are given.
    """
    if not best.total.all:
        return []  # nothing moves, so nothing can be gained
    given = {param.name for param in solver.params}
    found: list[tuple[int, int, Assignment]] = []
    for number in solver.paying(best):
        op, now = solver.operations[number], best.assignments[number]
        if not op.reduces or len(op.ins) < 2 or op.pinned is not None:
            continue
        # A contraction that moves little cannot pay for a new start.
        if _moved(solver, op, now, best, op.ins) < best.total.all / _RESTARTS:
            continue
        for assignment in spread_otherwise(
            solver, op, now, [(a,) for a in solver.mesh]
        ):
            least = _moved(solver, op, assignment, best, given)
            if least < best.total.all:
                found.append((least, number, assignment))
    most = min(_RESTARTS, _DECISIONS // len(solver.operations))
    return [(number, assignment) for _, number, assignment in sorted(found)[:most]]


def _carried_as_made(
    solver: Solver, best: Decisions
) -> Iterator[tuple[int, Assignment]]:
    """Values that enter a loop, with the layouts in which an iteration hands them on.

    If a carried value moves at the end of each iteration, something else may read it
    where it moves to, as the stack of a scan.  Then no single change gains.
    """
    enters = {op.outs: n for n, op in enumerate(solver.operations) if op.carries}
    for number in solver.paying(best):
        op, now = solver.operations[number], best.assignments[number]
        if op.like is None or (op.like,) not in enters:
            continue
        if _moved(solver, op, now, best, op.ins) < best.much:
            continue
        enter = enters[(op.like,)]
        into, (made,) = solver.operations[enter], op.ins
        assignment = into.following(best.layouts[made])
        if assignment != best.assignments[enter] and into.fits(assignment, solver.mesh):
            yield enter, assignment


def _moved(
    solver: Solver,
    op: Operation,
    assignment: Assignment,
    best: Decisions,
    operands: Container[str],
) -> int:
    """The bytes that an operation's results and the `operands` move."""
    effect = solver.effects.of(op, assignment)
    moves = [
        solver.costs.reshard(name, best.layouts[name], want)
        for name, want in effect.wants
        if name in operands
    ]
    return sum((moved.all for moved in moves), effect.cost.all)
