"""The layouts that values should have: the user's constraints, and consumers' wishes.

Constraints are fixed.  Wishes flow backward through the factors of the operations, from
the constraints and from what operations are assigned to.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.layout import (
    Layout,
    Partial,
    divides,
    is_layout,
    used_axes,
)
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import (
    Assignment,
    Operation,
    assignment_of,
    claims_of,
    nowhere,
)
from jhost.lowering.ir.statements import Buffer

Kept: TypeAlias = tuple[Mapping[str, Layout], Mapping[str, frozenset[str]]]

_Asked: TypeAlias = tuple[str, Layout, bool]


class Wishes:
    """Layouts by buffer name: `fixed` ones, and `goals`, which are all there are."""

    def __init__(
        self,
        buffers: Mapping[str, Buffer],
        marks: Mapping[str, ShardMark],
        mesh: Mapping[str, int],
    ) -> None:
        self.buffers = buffers
        self.mesh = mesh
        self.specs = {name: mark.spec for name, mark in marks.items()}
        self.known: dict[tuple[Operation, Assignment], Sequence[_Asked]] = {}
        self.goals: dict[str, Layout] = {}
        self.open: dict[str, frozenset[str]] = {}
        """Axes of which a goal says nothing: its value may be sharded over them."""
        self.restart()
        self.fixed = {
            name: self.goals[name]
            for name, spec in self.specs.items()
            if None not in spec
        }

    def restart(self) -> None:
        """Go back to what the user gave."""
        self.goals = {
            name: tuple(axes or () for axes in spec)
            for name, spec in self.specs.items()
        }
        self.open = {
            name: self._axes_beside(used_axes(self.goals[name]))
            for name, spec in self.specs.items()
            if None in spec
        }

    def kept(self) -> Kept:
        """All present wishes, for `restore`."""
        return dict(self.goals), dict(self.open)

    def restore(self, kept: Kept) -> None:
        """Go back to wishes that were kept: goals, and what they say nothing of."""
        goals, left_open = kept
        self.goals, self.open = dict(goals), dict(left_open)

    # --- Backward ------------------------------------------------------------- #

    def backward(
        self,
        operations: Sequence[Operation],
        assignments: Sequence[Assignment] | None,
    ) -> None:
        """Carry wishes from the consumers of values to their producers."""
        for number in reversed(range(len(operations))):
            op = operations[number]
            # As it was made, and a sum where it is wished for.
            if assignments is None or op.stacks:
                assignment = self.suggested(op)
            else:
                assignment = assignments[number]
            for name, wish, used in self.asked(op, assignment):
                # A factor on no axis wishes for nothing, a whole dim does.
                if used or name not in self.goals:
                    self.goals[name] = wish
                    # At first only what the constraints suggest is known.
                    known = self.mesh if assignments else used_axes(assignment)
                    self.open[name] = self._axes_beside(known)

    def asked(self, op: Operation, assignment: Assignment) -> Sequence[_Asked]:
        """What may be wished of operands so assigned, and whether that uses axes.

        Where it does not, a whole dim is all that the operand has.
        """
        case = op, assignment
        if case not in self.known:
            wishes = [(n, op.required(i, assignment)) for i, n in enumerate(op.ins)]
            self.known[case] = [
                (name, self.constrained(name, wish), bool(used_axes(wish)))
                for (name, wish), dims in zip(wishes, op.operands, strict=True)
                if name not in self.fixed and self.is_legal(name, wish)
                if used_axes(wish) or not any(dims)
            ]
        return self.known[case]

    def suggested(self, op: Operation) -> Assignment:
        """The assignment that constraints around `op` suggest, its operands' first."""
        if op.pinned is not None:
            return op.pinned
        claims = claims_of(op, self.fixed, self.goals)
        taken: dict[str, int | None] = {}
        for axis, factor in claims:
            # Operands claim first, and the first claim has the axis.
            taken.setdefault(axis, factor)
        assignment = assignment_of(len(op.sizes), claims, taken)
        return assignment if op.fits(assignment, self.mesh) else nowhere(op)

    def goal(self, name: str, rest: Layout) -> Layout:
        """The layout wished for of a value that is in `rest`; `rest` without a wish."""
        wish = self.goals.get(name)
        if wish is None:
            return rest
        free = self.open.get(name, frozenset()) - used_axes(wish)
        return tuple(
            want or tuple(axis for axis in have if axis in free)
            for want, have in zip(wish, rest, strict=True)
        )

    def about(self, names: Iterable[str]) -> Hashable:
        """All present wishes about some values."""
        goals, left_open = self.goals, self.open
        return tuple([(goals.get(n), left_open.get(n)) for n in names])

    def _axes_beside(self, axes: Iterable[str]) -> frozenset[str]:
        return frozenset(self.mesh).difference(axes)

    # --- Where values stay ---------------------------------------------------- #

    def rest(self, name: str, produced: Layout, partial: Partial) -> Layout:
        """Where a value stays: its constraint, or what it is produced as, reduced.

        A partial axis is scattered onto the dim that wishes for it, else reduced
        everywhere.
        """
        if name in self.fixed:
            return self.fixed[name]
        wish = self.goals.get(name)
        if wish is None:
            return self.constrained(name, produced)
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
        spec = self.specs.get(name)
        if spec is None:
            return layout
        given = {axis for axes in spec for axis in axes or ()}
        return tuple(
            tuple(itertools.takewhile(lambda axis: axis not in given, have))
            if axes is None
            else axes
            for have, axes in zip(layout, spec, strict=True)
        )

    def is_legal(self, name: str, layout: Layout) -> bool:
        shape = self.buffers[name].shape
        return is_layout(layout) and divides(shape, layout, self.mesh)
