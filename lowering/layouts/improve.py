"""Change decisions as long as the whole program then receives fewer bytes."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator

from jhost.lowering.ir.layout import used_axes
from jhost.lowering.ir.names import path_of
from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.activations import (
    ACTIVATIONS,
    WEIGHTS,
    Staying,
    stays,
)
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.preferences import Snapshot
from jhost.lowering.layouts.solver import KnownRest, Solver
from jhost.lowering.rules.dim_rule import factors_of

_TRIALS = 256
"""The most changes of a decision that are tried; each may walk the whole program."""

_ROUNDS = 4
"""The most rounds over all decisions by themselves; mostly the first finds nothing."""

_RESTARTS = 8
"""The most contractions for which all is decided again from the start.

Each of them has to move at least this part (an eighth) of all bytes.
"""

_LITTLE = 1024
"""The part of all work (a 1024th) by which it may grow."""

_DECISIONS = 2048
"""About how many operations restarts decide again; it bounds their time."""


def improved(solver: Solver, made: Decisions) -> Decisions:
    """`made`, with single decisions changed as long as that moves fewer bytes."""
    trials, number, known = _TRIALS, 0, KnownRest()
    numbers = solver.paying(made, known)
    while number < len(numbers) and trials > 0:
        better = False
        for candidate in others(solver, numbers[number], made):
            trials -= 1
            better |= tried(solver, numbers[number], candidate, made)
        if not better:
            number += 1
        else:
            # After a change, an earlier decision may gain too, so all are tried again.
            numbers, number = solver.paying(made, known), 0
    return _refined(solver, made, known)


def _refined(solver: Solver, made: Decisions, known: KnownRest) -> Decisions:
    """`made`, with changes of single decisions that gain while all others stay.

    In this way a weight is gathered behind its cast to a narrower dtype, even if its
    readers preferred otherwise.  Such a trial is quick, so all are made.
    """
    for _ in range(_ROUNDS):
        better = False
        for number in solver.paying(made, known):
            for candidate in others(solver, number, made):
                better |= tried(solver, number, candidate, made, alone=True)
        if not better:
            break
    return made


def others(solver: Solver, number: int, made: Decisions) -> list[Assignment]:
    """The other assignments that the operation could have."""
    op, current = solver.operations[number], made.assignments[number]
    # A reduction stays spread over as many axes: fewer bytes do not pay for repeating
    # it on more devices.  Other work is cheap to repeat.
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
    yield from _spread_otherwise(solver, op, current, moves)


def tried(
    solver: Solver,
    number: int,
    candidate: Assignment,
    made: Decisions,
    alone: bool = False,
) -> bool:
    """Change a decision, and later ones that it affects, if that is better.

    With `alone`, only operations that have to follow other values change with it.
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
        # Readers of the results are affected.  Other readers of the same operands may
        # now share a move with this operation.
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


# --- Activations or weights that stay -------------------------------------------- #


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """Decisions in which something stays over an axis, with their preferences."""

    staying: Staying
    made: Decisions
    preferences: Snapshot

    def taken(self, solver: Solver) -> Decisions:
        """The decisions, with the solver's state as it was behind them."""
        solver.preferences.restore(self.preferences)
        return self.made


def ways(solver: Solver, made: Decisions) -> list[Way]:
    """`made`, and others in which something stays over a mesh axis; the best first."""
    best = Way((), made, solver.preferences.snapshot())
    found = [best]
    for staying in _what_moves(solver, made):
        way = asked_way(solver, made, staying)
        known = any(way.made.same_as(each.made) for each in found)
        if _is_alike(solver, way.made, made) and not known:
            found.append(way)
            best = way if way.made.price.beats(best.made.price) else best
    return [best, *(way for way in found if way is not best)]


def asked_way(solver: Solver, made: Decisions, staying: Staying) -> Way:
    """A value that is to stay over an axis stays there; `made` if nothing is to."""
    if staying:
        made = improved(solver, solver.fixed_point_keeping(staying))
    return Way(staying, made, solver.preferences.snapshot())


def _what_moves(solver: Solver, made: Decisions) -> Iterator[Staying]:
    """What could stay over a mesh axis: activations where they move much.

    Where weights move much over the same axis, these could stay as well.
    """
    activations, weights = Counter[str](), Counter[str]()
    for _, axis, size in (*_moves(solver, made, ACTIVATIONS), *_sums(solver, made)):
        activations[axis] += size
    for _, axis, size in _moves(solver, made, WEIGHTS):
        weights[axis] += size
    # Sums alone are of activations that stay.
    moving = {axis for _, axis, _ in _moves(solver, made, ACTIVATIONS)}
    for axis, size in activations.most_common():
        if axis in moving and size >= _much(made):
            yield ACTIVATIONS, axis
            if weights[axis] >= _much(made):
                yield WEIGHTS, axis


def axes_left_open(solver: Solver, made: Decisions) -> set[str]:
    """The mesh axes over which activations move much where nobody constrained any.

    A constraint in a body says how the user wants activations to lie there, whatever
    time that takes.
    """
    said = {
        (path_of(name), axis)
        for name, spec in solver.preferences.specs.items()
        if name not in solver.border
        for axis in used_axes(tuple(axes or () for axes in spec))
    }
    moved = Counter[str]()
    for op, axis, size in (*_moves(solver, made, ACTIVATIONS), *_sums(solver, made)):
        value, *_ = *op.outs, *op.ins  # a condition's operand leads to no result
        if (path_of(value), axis) not in said:
            moved[axis] += size
    return {axis for axis, size in moved.items() if size >= _much(made)}


def _much(made: Decisions) -> int:
    return max(1, made.total.all // _RESTARTS)


def _moves(
    solver: Solver, made: Decisions, what: str
) -> Iterator[tuple[Operation, str, int]]:
    """Operations of which such an operand moves: over which axis, and the bytes."""
    operands = solver.operands[what]
    for number, op in enumerate(solver.operations):
        operand = operands.get(op)
        if operand is None:
            continue
        name, want = solver.effects.of(op, made.assignments[number]).wants[operand]
        if want == made.layouts[name]:
            continue  # most operands are where they are wanted
        for axis in used_axes(made.layouts[name]):
            if not stays(op, operand, made.assignments[number], made.layouts, axis):
                moved = solver.costs.reshard(name, made.layouts[name], want)
                yield op, axis, moved.all


def _sums(solver: Solver, made: Decisions) -> Iterator[tuple[Operation, str, int]]:
    """Products of activations and weights that are summed over an axis: the bytes."""
    for number, op in enumerate(solver.operations):
        if op in solver.operands[WEIGHTS]:
            assignment = made.assignments[number]
            for axis, _ in op.produced(0, assignment)[1]:
                yield op, axis, solver.effects.of(op, assignment).cost.all


# --- From the start ---------------------------------------------------------------- #


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
    return other.price.beats(best.price) and _is_alike(solver, other, best)


def _is_alike(solver: Solver, other: Decisions, best: Decisions) -> bool:
    """Whether `other` has the same parameters as `best`, and hardly more work."""
    return (
        all(other.layouts[p.name] == best.layouts[p.name] for p in solver.params)
        # Small reductions, such as the loss, may be repeated.
        and other.flops <= best.flops + best.flops // _LITTLE
    )


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
        for assignment in _spread_otherwise(
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
        if _moved(solver, op, now, best, op.ins) < _much(best):
            continue
        enter = enters[(op.like,)]
        into, (made,) = solver.operations[enter], op.ins
        assignment = into.following(best.layouts[made])
        if assignment != best.assignments[enter] and into.fits(assignment, solver.mesh):
            yield enter, assignment


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
    """The bytes that an operation's results and the `operands` move."""
    effect = solver.effects.of(op, assignment)
    moves = [
        solver.costs.reshard(name, best.layouts[name], want)
        for name, want in effect.wants
        if name in operands
    ]
    return sum((moved.all for moved in moves), effect.cost.all)
