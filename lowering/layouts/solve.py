"""Decide the layout of every value and the assignment of every operation.

`solver.py` decides them together.  Then decisions change where the whole program
receives fewer bytes: first single ones (`improve.py`), then all that move activations
or weights over a mesh axis (`ways.py`), then all that lead to one contraction
(`restart.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import Assignment, Claim, Operation
from jhost.lowering.layouts.activations import Staying
from jhost.lowering.layouts.assigner import AssignmentRank
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.flat_bodies import FlatBody, Flattened
from jhost.lowering.layouts.hidden_dims import StreamedDim
from jhost.lowering.layouts.improve import improved
from jhost.lowering.layouts.kinds import OfKinds
from jhost.lowering.layouts.restart import restarted
from jhost.lowering.layouts.solver import Solver
from jhost.lowering.layouts.transfer_bytes import LayoutCost, ReshardCosts
from jhost.lowering.layouts.ways import asked_way, axes_left_open, ways

_CLOSE = 2
"""Up to so many times the fewest bytes, layouts are weighed by predicted times."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alternatives:
    """The rank of an operation's assignment, and the ranks of others.

    `losing` has, for each claim that the assignment does not follow, the best rank that
    does; None if none divides.
    """

    rank: AssignmentRank
    losing: Mapping[Claim, AssignmentRank | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """Layouts by buffer name; an assignment and its alternatives for each operation.

    `price` is the cost of all of it.  `close` says what stays over an axis in other
    solutions that move at most twice the bytes.
    """

    operations: tuple[Operation, ...]
    flat: FlatBody
    layouts: Mapping[str, Layout]
    assignments: tuple[Assignment, ...]
    alternatives: tuple[Alternatives, ...]
    costs: ReshardCosts
    price: LayoutCost
    close: tuple[Staying, ...] = ()

    def wanted(self, number: int) -> Layout:
        """The layout in which an operation takes its one operand."""
        op = self.operations[number]
        if op.forwards:
            return op.forwarded(self.layouts[op.outs[0]])
        return op.required(0, self.assignments[number])


def solve_layouts(
    whole: Flattened,
    marks: Mapping[str, ShardMark],
    streamed: Mapping[str, StreamedDim],
    near: Solution | None = None,
    known: OfKinds | None = None,
) -> Solution:
    """The layouts that meet `marks` and move few bytes elsewhere, in bodies too.

    What the loops over `streamed` dims hide counts after all that they do not.  Marks
    and dims belong to values by their names in `flattened`.  Where it is to be `near` a
    solution for other such dims, single decisions of that one are changed.  What is
    `known` of kinds of operations is not found again.
    """
    solver = Solver(whole, marks, streamed, known)
    close: tuple[Staying, ...] = ()
    if near is not None:
        best = improved(solver, solver.starting_at(near.assignments))
    else:
        best, close = _by_bytes(solver)
    alternatives = [
        _alternatives(solver, op, assignment, best.layouts)
        for op, assignment in zip(solver.operations, best.in_order(), strict=True)
    ]
    return Solution(
        operations=solver.operations,
        flat=solver.flat,
        layouts=best.layouts,
        assignments=best.in_order(),
        alternatives=tuple(alternatives),
        costs=solver.costs,
        price=best.price,
        close=close,
    )


def _by_bytes(solver: Solver) -> tuple[Decisions, tuple[Staying, ...]]:
    """The best decisions, and what else could stay.

    If the program says in which way, it is this one that is best.
    """
    made = improved(solver, solver.fixed_point())
    asked = solver.flat.program.staying
    if asked is not None:
        return restarted(solver, asked_way(solver, made, asked).taken(solver)), ()
    first, *others = ways(solver, made)
    # Restarts come last: they have to beat what single decisions reach.
    best = restarted(solver, first.taken(solver))
    others = [way for way in others if way.made.total.all <= _CLOSE * best.total.all]
    if not others:
        return best, ()
    left_open = axes_left_open(solver, made)
    closes = (way.staying for way in others)
    return best, tuple(c for c in closes if left_open >= {*c[1:], *first.staying[1:]})


def _alternatives(
    solver: Solver, op: Operation, assignment: Assignment, layouts: Mapping[str, Layout]
) -> Alternatives:
    """The claims that `assignment` does not follow, and what following them costs."""
    claims = dict.fromkeys(solver.assigner.claims(op, layouts))
    lost = [(axis, f) for axis, f in claims if axis not in assignment[f]]
    # Ranked once more for the user: what the claims that lost would have cost.
    ranked = [
        (candidate, solver.assigner.rank(op, candidate, layouts, set()))
        for candidate in (solver.assigner.candidates(op, layouts) if lost else ())
    ]
    losing = {
        (axis, factor): min(
            (rank for candidate, rank in ranked if axis in candidate[factor]),
            default=None,
        )
        for axis, factor in lost
    }
    return Alternatives(solver.assigner.rank(op, assignment, layouts, set()), losing)
