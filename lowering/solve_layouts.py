"""Decide the layout of every value and the assignment of every operation.

User constraints are fixed.  Wishes flow backward from them through the factors of the
operations, decisions flow forward, and both are repeated until nothing changes.  Where
two operands claim one mesh axis for different factors, the assignment that moves the
fewest bytes wins; on a tie, the one that leaves the larger operand where it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jhost.lowering.ir import Buffer, Compute, Program, Set, ShardMark
from jhost.lowering.layout import Layout, divides, used_axes, whole
from jhost.lowering.layout_costs import NOTHING, Costs, Moved
from jhost.lowering.operations import Assignment, Operation, operation
from jhost.lowering.reshard import Partial
from jhost.lowering.rules import Dims
from jhost.lowering.streamed_dims import StreamedDim

_ROUNDS = 16
"""A wish crosses the whole program in one round; most settle in two or three."""


@dataclasses.dataclass(frozen=True, slots=True)
class Solution:
    """Layouts by buffer name, and an assignment for each operation of the body."""

    operations: tuple[Operation, ...]
    layouts: Mapping[str, Layout]
    assignments: tuple[Assignment, ...]


def solve_layouts(
    program: Program,
    marks: Mapping[str, ShardMark],
    streamed: Mapping[str, StreamedDim],
) -> Solution:
    """The layouts that meet `marks` and move few bytes elsewhere.

    What the loops over `streamed` dims hide counts after all that they do not.
    """
    solver = _Solver(program, marks, streamed)
    for _ in range(_ROUNDS):
        before = dict(solver.layouts), dict(solver.assignments)
        solver.backward()
        solver.forward()
        if before == (solver.layouts, solver.assignments):
            break
    assignments = tuple(solver.assignments[i] for i in range(len(solver.operations)))
    return Solution(tuple(solver.operations), solver.layouts, assignments)


class _Solver:
    def __init__(
        self,
        program: Program,
        marks: Mapping[str, ShardMark],
        streamed: Mapping[str, StreamedDim],
    ) -> None:
        self.mesh = dict(program.mesh.shape)
        self.params = program.params
        statements = [stmt for stmt in program.body if isinstance(stmt, Compute | Set)]
        self.operations = [operation(stmt) for stmt in statements]
        self.buffers = {buffer.name: buffer for buffer in _buffers(program)}
        self.costs = Costs(self.buffers, self.mesh, streamed)
        self.fixed: dict[str, Layout] = {}
        self.wishes: dict[str, Layout] = {}
        self.specs = {name: mark.spec for name, mark in marks.items()}
        for name, spec in self.specs.items():
            into = self.wishes if None in spec else self.fixed
            into[name] = tuple(axes or () for axes in spec)
        self.layouts: dict[str, Layout] = {}
        self.assignments: dict[int, Assignment] = {}

    # --- Wishes --------------------------------------------------------------- #

    def backward(self) -> None:
        """Carry wishes from the consumers of values to their producers."""
        for number in reversed(range(len(self.operations))):
            op = self.operations[number]
            assignment = self.assignments.get(number) or self.wished_assignment(op)
            for position, name in enumerate(op.ins):
                wish = op.required(position, assignment)
                if name not in self.fixed and self.is_legal(name, wish):
                    # A factor on no axis wishes for nothing, a whole dim does.
                    needed = not any(op.operands[position]) and name not in self.wishes
                    if used_axes(wish) or needed:
                        self.wishes[name] = self.constrained(name, wish)

    def wished_assignment(self, op: Operation) -> Assignment:
        """What the constraints around `op` suggest: its operands' first."""
        claims = [
            *self.claims(op.ins, op.operands, self.fixed),
            *self.claims(op.outs, op.results, self.goals),
        ]
        taken: dict[str, int] = {}
        for axis, factor in claims:
            taken.setdefault(axis, factor)
        assignment = _assignment(len(op.sizes), claims, taken)
        return assignment if op.fits(assignment, self.mesh) else _nowhere(op)

    @property
    def goals(self) -> Mapping[str, Layout]:
        return {**self.wishes, **self.fixed}

    def claims(
        self, names: Sequence[str], maps: Sequence[Dims], layouts: Mapping[str, Layout]
    ) -> list[tuple[str, int]]:
        """Which mesh axis is on which factor, by the layouts of these values."""
        return [
            (axis, dim.factor)
            for name, dims in zip(names, maps, strict=True)
            if name in layouts
            for dim, axes in zip(dims, layouts[name], strict=True)
            if dim is not None
            for axis in axes
        ]

    # --- Decisions ------------------------------------------------------------ #

    def forward(self) -> None:
        """Decide in program order, from what is decided already."""
        for param in self.params:
            self.layouts[param.name] = self.goal(param.name) or whole(len(param.shape))
        for number, op in enumerate(self.operations):
            assignment = self.cheapest(op)
            self.assignments[number] = assignment
            for position, name in enumerate(op.outs):
                self.layouts[name] = self.rest(name, *op.produced(position, assignment))

    def goal(self, name: str) -> Layout | None:
        return self.fixed.get(name) or self.wishes.get(name)

    def cheapest(self, op: Operation) -> Assignment:
        """The assignment that moves the fewest bytes."""
        claims = [
            *self.claims(op.ins, op.operands, self.layouts),
            *self.claims(op.outs, op.results, self.goals),
        ]
        best: Assignment | None = None
        least = (NOTHING, 0, 0)
        for candidate in _candidates(len(op.sizes), claims):
            if not op.fits(candidate, self.mesh):
                continue
            cost = self.cost(op, candidate)
            if best is None or cost < least:
                best, least = candidate, cost
            if cost[0] == NOTHING:
                break  # nothing moves, and later candidates spread the work less
        assert best is not None, "the assignment to nobody always fits"
        return best

    def cost(self, op: Operation, assignment: Assignment) -> tuple[Moved, int, int]:
        """Bytes moved; then work repeated; then the largest operand that must move."""
        total, largest = NOTHING, 0
        for position, name in enumerate(op.ins):
            have, want = self.layouts[name], op.required(position, assignment)
            if have != want:
                total += self.costs.reshard(name, have, want)
                largest = max(largest, math.prod(self.buffers[name].shape))
        for position, name in enumerate(op.outs):
            have, partial = op.produced(position, assignment)
            total += self.costs.reshard(
                name, have, self.rest(name, have, partial), partial
            )
            goal = self.goal(name)
            if goal is not None:
                rest = self.rest(name, have, partial)
                total += self.costs.reshard(name, rest, goal)
        spread = sum(len(axes) for axes in assignment)
        return total, -spread, largest

    def rest(self, name: str, produced: Layout, partial: Partial) -> Layout:
        """Where a value stays: its constraint, or what it is produced as, reduced.

        A partial axis is scattered onto the dim that wishes for it, else reduced
        everywhere.
        """
        if name in self.fixed:
            return self.fixed[name]
        wish = self.wishes.get(name, produced)
        axes = {axis for axis, _ in partial}
        rest = tuple(
            want
            if want[: len(have)] == have and axes.issuperset(want[len(have) :])
            else have
            for have, want in zip(produced, wish, strict=True)
        )
        return self.constrained(name, rest if self.is_legal(name, rest) else produced)

    def constrained(self, name: str, layout: Layout) -> Layout:
        """`layout` in the dims that the user left free, elsewhere what was given."""
        spec = self.specs.get(name, (None,) * len(layout))
        given = {axis for axes in spec for axis in axes or ()}
        return tuple(
            tuple(itertools.takewhile(lambda axis: axis not in given, have))
            if axes is None
            else axes
            for have, axes in zip(layout, spec, strict=True)
        )

    # --- Help ----------------------------------------------------------------- #

    def is_legal(self, name: str, layout: Layout) -> bool:
        axes = [axis for dim in layout for axis in dim]
        shape = self.buffers[name].shape
        return len(axes) == len(set(axes)) and divides(shape, layout, self.mesh)


def _buffers(program: Program) -> Iterator[Buffer]:
    yield from program.params
    for stmt in program.body:
        if isinstance(stmt, Compute):
            yield from stmt.outs
        elif isinstance(stmt, Set):
            yield stmt.out


def _nowhere(op: Operation) -> Assignment:
    return ((),) * len(op.sizes)


def _candidates(
    factors: int, claims: Sequence[tuple[str, int]]
) -> Iterator[Assignment]:
    """Every way to give each claimed axis to one of its claimants, or to nobody."""
    claimants: dict[str, list[int | None]] = {}
    for axis, factor in claims:
        if factor not in claimants.setdefault(axis, []):
            claimants[axis].append(factor)
    for choice in itertools.product(*([*c, None] for c in claimants.values())):
        yield _assignment(factors, claims, dict(zip(claimants, choice, strict=True)))


def _assignment(
    factors: int, claims: Iterable[tuple[str, int]], chosen: Mapping[str, int | None]
) -> Assignment:
    """Axes by factor, in the order in which the claims name them."""
    spread: list[list[str]] = [[] for _ in range(factors)]
    for axis, factor in claims:
        if chosen[axis] == factor and axis not in spread[factor]:
            spread[factor].append(axis)
    return tuple(tuple(axes) for axes in spread)
