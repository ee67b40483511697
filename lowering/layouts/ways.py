"""Ways to lay a program out in which activations or weights stay over a mesh axis.

No change of a single decision leads to them: all that reads a value over the axis has
to change together.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from jhost.lowering.ir.layout import used_axes
from jhost.lowering.ir.names import path_of
from jhost.lowering.ir.operation import Operation
from jhost.lowering.layouts.activations import ACTIVATIONS, WEIGHTS, Staying, stays
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.improve import improved, is_alike
from jhost.lowering.layouts.preferences import Snapshot
from jhost.lowering.layouts.solver import Solver


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
        if is_alike(solver, way.made, made) and not known:
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
        if axis in moving and size >= made.much:
            yield ACTIVATIONS, axis
            if weights[axis] >= made.much:
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
    return {axis for axis, size in moved.items() if size >= made.much}


def _moves(
    solver: Solver, made: Decisions, what: str
) -> Iterator[tuple[Operation, str, int]]:
    """The operations that move such an operand, with the mesh axis and the bytes."""
    operands = solver.assigner.operands[what]
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
        if op in solver.assigner.operands[WEIGHTS]:
            assignment = made.assignments[number]
            for axis, _ in op.produced(0, assignment)[1]:
                yield op, axis, solver.effects.of(op, assignment).cost.all
