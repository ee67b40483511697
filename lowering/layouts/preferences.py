"""The layouts that values should have: users' constraints, and consumers' preferences.

Constraints are fixed.  Preferences flow backward through the factors of the operations,
from the constraints and from the assignments of operations (`backward.py`).
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

Snapshot: TypeAlias = tuple[Mapping[str, Layout], Mapping[str, frozenset[str]]]

Preference: TypeAlias = tuple[Layout | None, frozenset[str] | None]
"""The target of a value and its free axes, where it has any."""

Preferred: TypeAlias = tuple[str, Layout, bool]
"""An operand, the layout preferred for it, and whether that uses axes."""


class Preferences:
    """Layouts by buffer name: preferred `targets`, and among these the `fixed` ones."""

    def __init__(
        self,
        buffers: Mapping[str, Buffer],
        marks: Mapping[str, ShardMark],
        mesh: Mapping[str, int],
        barriers: frozenset[str] = frozenset(),
    ) -> None:
        self.buffers = buffers
        self.mesh = mesh
        self.barriers = barriers
        self.through_borders = False
        """Whether operations that follow a whole value pass on readers' preferences."""
        self.specs = {name: mark.spec for name, mark in marks.items()}
        self.known: dict[tuple[Operation, Assignment], Sequence[Preferred]] = {}
        self.targets: dict[str, Layout] = {}
        self.free_axes: dict[str, frozenset[str]] = {}
        """Axes that a target leaves open: its value may be sharded over them."""
        self.restart()
        self.fixed = {
            name: self.targets[name]
            for name, spec in self.specs.items()
            if None not in spec
        }

    def restart(self) -> None:
        """Forget all preferences but the user's constraints."""
        self.targets = {
            name: tuple(axes or () for axes in spec)
            for name, spec in self.specs.items()
        }
        self.free_axes = {
            name: self.axes_beside(used_axes(self.targets[name]))
            for name, spec in self.specs.items()
            if None in spec
        }

    def snapshot(self) -> Snapshot:
        """All present preferences, for `restore`."""
        return dict(self.targets), dict(self.free_axes)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to the preferences of a snapshot."""
        # Both together: the free axes belong to the targets of the same snapshot.
        targets, free_axes = snapshot
        self.targets, self.free_axes = dict(targets), dict(free_axes)

    def of(self, name: str) -> Preference:
        """The layout preferred for a value, and the axes that it leaves open."""
        return self.targets.get(name), self.free_axes.get(name)

    def changed_since(self, snapshot: Snapshot) -> list[str]:
        """The values whose preferences are no longer those of a snapshot."""
        targets, free_axes = snapshot
        return [
            name
            for name, target in self.targets.items()
            if target != targets.get(name)
            or self.free_axes.get(name) != free_axes.get(name)
        ]

    # --- Backward ------------------------------------------------------------- #

    def follows(self, op: Operation) -> bool:
        """Whether its operand's layout decides, as for a barrier."""
        return op.taking or not self.barriers.isdisjoint(op.outs)

    def is_wished_otherwise(self, op: Operation, assignment: Assignment) -> bool:
        """Whether its operand is whole, though readers of its result prefer parts."""
        if not self.follows(op) or any(assignment):
            return False
        return any(used_axes(self.targets.get(name, ())) for name in op.outs)

    def is_as_read(self, op: Operation, assignment: Assignment) -> bool:
        """Whether its operand should have the layout that readers of its result prefer.

        An operation that only follows is assigned as its operand was made.  There are
        two exceptions.  A sum is stacked in the layout that readers prefer.  And a
        value that every device has whole need not be made whole.
        """
        whole = self.through_borders and self.follows(op) and not any(assignment)
        return op.stacks or whole

    def preferred(self, op: Operation, assignment: Assignment) -> Sequence[Preferred]:
        """The layouts that an operation, so assigned, prefers for its operands.

        A layout without axes is only a preference if the operand has no factors.
        """
        case = op, assignment
        if case not in self.known:
            required = [(n, op.required(i, assignment)) for i, n in enumerate(op.ins)]
            self.known[case] = [
                (name, self.constrained(name, wanted), bool(used_axes(wanted)))
                for (name, wanted), dims in zip(required, op.operands, strict=True)
                if name not in self.fixed and self.is_legal(name, wanted)
                if used_axes(wanted) or not any(dims)
            ]
        return self.known[case]

    def suggested(self, op: Operation) -> Assignment:
        """The assignment that constraints around `op` suggest, operands' ones first."""
        if op.pinned is not None:
            return op.pinned
        claims = claims_of(op, self.fixed, self.targets, self.mesh)
        taken: dict[str, int | None] = {}
        for axis, factor in claims:
            # Operands claim first, and the first claim has the axis.
            taken.setdefault(axis, factor)
        assignment = assignment_of(len(op.sizes), claims, taken)
        return assignment if op.fits(assignment, self.mesh) else nowhere(op)

    def target(self, name: str, rest: Layout) -> Layout:
        """The layout preferred for a value that rests in `rest`, or else `rest`."""
        wanted = self.targets.get(name)
        if wanted is None:
            return rest
        free = self.free_axes.get(name, frozenset()) - used_axes(wanted)
        return tuple(
            want or tuple(axis for axis in have if axis in free)
            for want, have in zip(wanted, rest, strict=True)
        )

    def about(self, names: Iterable[str]) -> Hashable:
        """All present preferences for some values."""
        targets, free_axes = self.targets, self.free_axes
        return tuple([(targets.get(n), free_axes.get(n)) for n in names])

    def axes_beside(self, axes: Iterable[str]) -> frozenset[str]:
        return frozenset(self.mesh).difference(axes)

    # --- Where values stay ---------------------------------------------------- #

    def rest(self, name: str, produced: Layout, partial: Partial) -> Layout:
        """The layout in which a value rests: its constraint, or as it is produced.

        A partial axis is scattered onto the dim that prefers it.  If none does, the
        value is reduced on all devices.
        """
        if name in self.fixed:
            return self.fixed[name]
        wanted = self.targets.get(name)
        if wanted is None:
            return self.constrained(name, produced)
        axes = {axis for axis, _ in partial}
        rest = tuple(
            want
            if want[: len(have)] == have and axes.issuperset(want[len(have) :])
            else have
            for have, want in zip(produced, wanted, strict=True)
        )
        return self.constrained(name, rest if self.is_legal(name, rest) else produced)

    def constrained(self, name: str, layout: Layout) -> Layout:
        """The user's constraint, with `layout` in the dims that it leaves free."""
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
