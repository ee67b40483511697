"""Decide the layouts of values and the assignments of operations together.

Preferences flow backward (`preferences.py`) and decisions flow forward, until nothing
changes.  Two operands may claim one mesh axis for different factors.  Then the
assignment that receives the fewest bytes wins.  On a tie the larger operand stays where
it is.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.graph import makers_of
from jhost.lowering.ir.layout import Layout, replicated, used_axes
from jhost.lowering.ir.marks import BarrierMark, ShardMark
from jhost.lowering.ir.operation import (
    Assignment,
    Claim,
    Operation,
    assignments_by,
    claims_of,
)
from jhost.lowering.layouts.activations import (
    OperandNumbers,
    Staying,
    operands_of,
    stays,
)
from jhost.lowering.layouts.backward import Backward
from jhost.lowering.layouts.decisions import Decisions, WantedLayout
from jhost.lowering.layouts.effects import AssignmentEffects
from jhost.lowering.layouts.flat_bodies import Flattened, buffers_of, repeats_of
from jhost.lowering.layouts.hidden_dims import StreamedDim
from jhost.lowering.layouts.kinds import Kinds, OfKinds, by_place
from jhost.lowering.layouts.preferences import Preferences
from jhost.lowering.layouts.transfer_bytes import (
    NOTHING,
    LayoutCost,
    ReshardCosts,
    TransferBytes,
)

_ROUNDS = 16
"""The most rounds of a search; one carries a preference through the whole program.

Most programs need two or three rounds.
"""

KnownRest: TypeAlias = dict[int, tuple[Assignment, bool]]
"""By an operation, an assignment, and whether its results then lie where they rest."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class AssignmentRank:
    """How good an assignment is: less is better, and earlier fields count first.

    Attributes:
        cost: the bytes, with the work counted in bytes.
        shared: minus the number of axes that share the work.
        largest: the elements of the largest operand that must move.
        moved: the bytes alone, which do not count in comparisons.
    """

    cost: TransferBytes
    shared: int
    largest: int
    moved: TransferBytes = dataclasses.field(compare=False)


class Solver:
    """The operations of a program, and how each is best assigned."""

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
        self.kinds = Kinds(self.preferences, self.costs, known.numbers)
        self.effects = AssignmentEffects(
            self.preferences, self.costs, self.kinds, known.effects
        )
        self.found = known.cheapest
        self.staying: Staying = ()
        """What stays over a mesh axis while layouts are decided."""
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
        self.staying = staying
        self.preferences.restart()
        try:
            decided = self.fixed_point().in_order()
        finally:
            self.staying = ()
        return self.decided(decided)

    @functools.cached_property
    def operands(self) -> Mapping[str, OperandNumbers]:
        """The operands that may stay: activations, and weights."""
        return operands_of(self.operations)

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
            made.decide(number, self.cheapest(number, made))
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
            assignment, before = self.cheapest(number, made), made.counted[number]
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

    def cheapest(self, number: int, made: Decisions) -> Assignment:
        """The best assignment of an operation, found once for each case of a kind."""
        op, moves = self.operations[number], made.known(number)
        layouts = [made.layouts[name] for name in decided_by(op)]
        kept, about = self.kept_by(op, made.layouts), self.preferences.about(op.outs)
        case = self.kinds.of(op), by_place(op, moves), kept, about, *layouts
        found = self.found.get(case)
        if found is None:
            found = self.found[case] = self.find_cheapest(op, made.layouts, moves)
        return found

    def find_cheapest(
        self,
        op: Operation,
        layouts: Mapping[str, Layout],
        moves: Collection[WantedLayout],
    ) -> Assignment:
        """The best assignment of an operation.

        First the best is found for each number of axes that share the work.  Among
        these, the one that moves the fewest bytes wins, and hidden bytes count too:
        hiding bytes does not pay for a reduction that more devices repeat.
        """
        best: dict[int, tuple[AssignmentRank, Assignment]] = {}
        for candidate in self.allowed(op, layouts):
            rank = self.rank(op, candidate, layouts, moves)
            # Only reductions are work that more devices should not repeat.
            shared = rank.shared if op.reduces else 0
            if shared not in best or rank < best[shared][0]:
                best[shared] = rank, candidate
            if rank.moved == NOTHING:
                break  # later candidates spread the work less, and cannot move less
        assert best, "the assignment to nobody always fits"
        shared = min(best, key=lambda shared: (best[shared][0].cost.all, shared))
        return best[shared][1]

    def allowed(
        self, op: Operation, layouts: Mapping[str, Layout]
    ) -> Iterable[Assignment]:
        """The candidates; those that leave an operand in place, if that is to stay."""
        candidates, kept = self.candidates(op, layouts), self.kept_by(op, layouts)
        if kept is None:
            return candidates
        operand, axis = kept
        every = [*candidates]
        staying = [c for c in every if stays(op, operand, c, layouts, axis)]
        return staying or every

    def kept_by(
        self, op: Operation, layouts: Mapping[str, Layout]
    ) -> tuple[int, str] | None:
        """The operand that is to stay over an axis, if it lies over that axis."""
        if not self.staying:
            return None
        what, axis = self.staying
        operand = self.operands[what].get(op)
        if operand is None or axis not in used_axes(layouts[op.ins[operand]]):
            return None
        return operand, axis

    def candidates(
        self, op: Operation, layouts: Mapping[str, Layout]
    ) -> Iterator[Assignment]:
        if op.like is not None:
            yield op.following(layouts[op.like])
            return
        if op.pinned is not None:
            yield op.pinned
            return
        claims = self.claims(op, layouts)
        for candidate in assignments_by(len(op.sizes), claims):
            if op.fits(candidate, self.mesh):
                yield candidate
                if self.preferences.follows(op):
                    break  # the first is the operand's own layout

    def claims(self, op: Operation, layouts: Mapping[str, Layout]) -> Sequence[Claim]:
        """The claims of its operands, and of its results' targets unless it follows."""
        if op.like is not None or op.pinned is not None:
            return ()
        return claims_of(
            op,
            layouts,
            {} if self.preferences.follows(op) else self.preferences.targets,
            self.mesh,
        )

    def is_bound(self, op: Operation) -> bool:
        """Whether another value's layout decides its own."""
        return op in self.bound

    @functools.cached_property
    def bound(self) -> Collection[Operation]:
        """The operations that another value's layout decides."""
        follows = self.preferences.follows
        return {op for op in self.operations if op.like is not None or follows(op)}

    def rank(
        self,
        op: Operation,
        assignment: Assignment,
        layouts: Mapping[str, Layout],
        moves: Collection[WantedLayout],
    ) -> AssignmentRank:
        """How good an assignment is, with the bytes to what consumers prefer."""
        effect = self.effects.of(op, assignment)
        moved, largest = effect.cost + effect.more, 0
        for name, want in effect.wants:
            if layouts[name] != want and (name, want) not in moves:
                there = [have for value, have in moves if value == name]
                have = self.costs.nearest(name, [layouts[name], *there], want)
                moved += self.costs.reshard(name, have, want)
                largest = max(largest, math.prod(self.buffers[name].shape))
        shared = -sum(map(len, assignment))
        cost = LayoutCost(moved, effect.flops).in_bytes
        return AssignmentRank(cost, shared, largest, moved)

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


def decided_by(op: Operation) -> tuple[str, ...]:
    """The values whose layouts influence an operation's assignment."""
    return op.ins if op.like is None else (*op.ins, op.like)
