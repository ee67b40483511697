"""Decide the layouts of values and the assignments of operations together.

Preferences flow backward (`preferences.py`) and decisions flow forward, until nothing
changes.  `assigner.py` has the best assignment of one operation.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.graph import makers_of
from jhost.lowering.ir.layout import Layout, replicated
from jhost.lowering.ir.marks import BarrierMark, ShardMark
from jhost.lowering.ir.operation import Assignment
from jhost.lowering.layouts.activations import Staying
from jhost.lowering.layouts.assigner import Assigner, decided_by
from jhost.lowering.layouts.backward import Backward
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.flat_bodies import Flattened, buffers_of, repeats_of
from jhost.lowering.layouts.hidden_dims import StreamedDim
from jhost.lowering.layouts.kinds import OfKinds
from jhost.lowering.layouts.preferences import Preferences
from jhost.lowering.layouts.transfer_bytes import ReshardCosts

_ROUNDS = 16
"""The most rounds of a search; one carries a preference through the whole program.

Most programs need two or three rounds.
"""

KnownRest: TypeAlias = dict[int, tuple[Assignment, bool]]
"""By an operation, an assignment, and whether its results then lie where they rest."""


class Solver:
    """The operations of a program, and the layouts with which they move few bytes."""

    def __init__(
        self,
        whole: Flattened,
        marks: Mapping[str, ShardMark],
        streamed: Mapping[str, StreamedDim],
        known: OfKinds | None = None,
    ) -> None:
        known = OfKinds() if known is None else known
        # A barrier's results have the layouts of its operands.  Otherwise a
        # `jax.checkpoint` would keep two copies of a value, one in each layout.
        self.operations, self.flat = whole
        barriers = frozenset(
            flat.prefix + mark.buffer
            for flat in self.flat.walk()
            for mark in flat.program.marks
            if isinstance(mark, BarrierMark)
        )
        program = self.flat.program
        self.mesh = dict(program.mesh.shape)
        self.params = program.params
        self.border = {b.name for b in (*program.params, *program.results)}
        """The values whose shardings are the function's, and not of its activations."""
        self.buffers = buffers_of(self.flat)
        fills = {op.outs[0] for op in self.operations if op.makes_any_part}
        repeats = repeats_of(self.flat)
        self.costs = ReshardCosts(self.buffers, self.mesh, streamed, fills, repeats)
        self.preferences = Preferences(self.buffers, marks, self.mesh, barriers)
        self.assigner = Assigner(self.operations, self.preferences, self.costs, known)
        self.effects = self.assigner.effects
        self.readers: dict[str, list[int]] = {}
        self.makers = makers_of(op.outs for op in self.operations)
        for number, op in enumerate(self.operations):
            for name in decided_by(op):
                self.readers.setdefault(name, []).append(number)

    def fixed_point(self) -> Decisions:
        """The best fixed point; whole values are made in parts if no more moves."""
        best, preferences = self.of_two_starts(), self.preferences
        decided = zip(self.operations, best.in_order(), strict=True)
        if not any(preferences.is_wished_otherwise(*each) for each in decided):
            return best  # most programs end here
        before = preferences.snapshot()
        preferences.through_borders = True
        in_parts = self.fixed_point_from(best.copy())
        preferences.through_borders = False
        # Making the value in parts may also move more, where something reads it whole.
        if best.price.beats(in_parts.price):
            preferences.restore(before)
            return best
        return in_parts

    def of_two_starts(self) -> Decisions:
        """The better fixed point of two starts.

        One starts with the layouts of the operands, the other with what constraints
        suggest for the operations before them.
        """
        by_operands = self.fixed_point_from(self.forward())
        # The second start overwrites the preferences of the first.
        before = self.preferences.snapshot()
        self.preferences.restart()
        by_constraints = self.fixed_point_from(None)
        # The start from the operands may move less by having devices repeat matmuls.
        # Then it does not count.
        no_more_work = by_operands.flops <= by_constraints.flops
        if no_more_work and by_operands.price.beats(by_constraints.price):
            self.preferences.restore(before)
            return by_operands
        return by_constraints

    def fixed_point_from(self, made: Decisions | None) -> Decisions:
        """The fixed point from some decisions, which change; or from constraints."""
        walk = Backward(self.preferences, self.operations, self.readers, self.makers)
        changed = None
        if made is None:
            walk.all(None)
            made = self.forward()
        else:
            changed = self.forward_again(made, walk.all(made.in_order()))
        for _ in range(_ROUNDS):
            assignments = made.in_order()
            if changed is None:
                preferred = walk.all(assignments)
            else:
                preferred = walk.again(assignments, changed)
            changed = self.forward_again(made, preferred)
            if not changed:
                break
        return made

    def fixed_point_keeping(self, staying: Staying) -> Decisions:
        """The fixed point from a new start, with some operands staying over an axis."""
        self.assigner.staying = staying
        self.preferences.restart()
        try:
            decided = self.fixed_point().in_order()
        finally:
            self.assigner.staying = ()
        return self.decided(decided)

    def fixed_point_with(self, number: int, assignment: Assignment) -> Decisions:
        """The fixed point from a new start, with one operation's assignment given."""
        operations = self.operations
        # Pinned while all else is decided around it; later steps may change it again.
        pinned = dataclasses.replace(operations[number], pinned=assignment)
        self.operations = (*operations[:number], pinned, *operations[number + 1 :])
        self.preferences.restart()
        try:
            decided = self.fixed_point().in_order()
        finally:
            self.operations = operations
        return self.decided(decided)

    def starting_at(self, assignments: Sequence[Assignment]) -> Decisions:
        """Assignments that were best by other costs, with the preferences for them."""
        walk = Backward(self.preferences, self.operations, self.readers, self.makers)
        walk.all(assignments)
        return self.decided(assignments)

    def decided(self, assignments: Sequence[Assignment]) -> Decisions:
        """Each operation with its own of these assignments."""
        made = Decisions(self.operations, self.effects, self.costs, self.given())
        for number, each in enumerate(assignments):
            made.decide(number, each)
        return made

    # --- Decisions ------------------------------------------------------------ #

    def forward(self) -> Decisions:
        """Decide in program order, given the earlier decisions."""
        made = Decisions(self.operations, self.effects, self.costs, self.given())
        for number in range(len(self.operations)):
            made.decide(number, self.assigner.cheapest(number, made))
        return made

    def forward_again(self, made: Decisions, preferred: Iterable[str]) -> set[int]:
        """Decide again as `forward` would, where only some values' preferences changed.

        Returns:
            The operations that are assigned otherwise.
        """
        # Most rounds change a few of thousands of operations.
        params = [n for n, layout in self.given().items() if made.lay_out(n, layout)]
        queued = {self.makers[name] for name in preferred if name in self.makers}
        for name in params:
            queued.update(self.readers.get(name, ()))
        changed: set[int] = set()
        waiting = sorted(queued)
        while waiting:
            number = heapq.heappop(waiting)
            assignment, before = (
                self.assigner.cheapest(number, made),
                made.counted[number],
            )
            if assignment != made.assignments[number]:
                changed.add(number)
            laid_out = made.decide(number, assignment)
            moves = {*before.wants} ^ {*made.counted[number].wants}
            # Others that read the same operand may share a move, or share it no longer.
            for name in {*laid_out, *(name for name, _ in moves)}:
                for reader in self.readers.get(name, ()):
                    if reader > number and reader not in queued:
                        queued.add(reader)
                        heapq.heappush(waiting, reader)
        return changed

    def given(self) -> dict[str, Layout]:
        """The layouts of the parameters."""
        return {
            param.name: self.preferences.targets.get(param.name)
            or replicated(len(param.shape))
            for param in self.params
        }

    def paying(self, made: Decisions, known: KnownRest | None = None) -> list[int]:
        """The operations that move something, or whose results are moved.

        `known` has what was asked before by the same preferences.
        """
        moved, known = made.moved(), {} if known is None else known
        return [
            number
            for number, op in enumerate(self.operations)
            if not (moved.isdisjoint(op.ins) and moved.isdisjoint(op.outs))
            or not self.is_at_rest(number, made.assignments[number], known)
        ]

    def is_at_rest(self, number: int, assignment: Assignment, known: KnownRest) -> bool:
        """Whether an operation, so assigned, makes its results where they rest."""
        before = known.get(number)
        if before is None or before[0] is not assignment:
            effect = self.effects.of(self.operations[number], assignment)
            before = known[number] = assignment, effect.at_rest
        return before[1]
