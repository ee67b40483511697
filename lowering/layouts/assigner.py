"""The best assignment of one operation, given the layouts of what it reads.

Two operands may claim one mesh axis for different factors.  Then the assignment that
receives the fewest bytes wins.  On a tie the larger operand stays where it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jhost.lowering.ir.layout import Layout, used_axes
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
from jhost.lowering.layouts.decisions import Decisions, WantedLayout
from jhost.lowering.layouts.effects import AssignmentEffects
from jhost.lowering.layouts.kinds import Kinds, OfKinds, by_place
from jhost.lowering.layouts.preferences import Preferences
from jhost.lowering.layouts.transfer_bytes import (
    NOTHING,
    LayoutCost,
    ReshardCosts,
    TransferBytes,
)


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


class Assigner:
    """The candidates for an operation's assignment, and which of them is best.

    It knows what later operations prefer, and `staying`: what is to stay over a mesh
    axis, if anything is.  What is `known` of kinds of operations is not found again.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        preferences: Preferences,
        costs: ReshardCosts,
        known: OfKinds,
    ) -> None:
        self.operations = operations
        self.preferences = preferences
        self.costs = costs
        self.kinds = Kinds(preferences, costs, known.numbers)
        self.effects = AssignmentEffects(preferences, costs, self.kinds, known.effects)
        self.found, self.others = known.cheapest, known.others
        self.staying: Staying = ()

    @functools.cached_property
    def operands(self) -> Mapping[str, OperandNumbers]:
        """The operands that may stay: activations, and weights."""
        return operands_of(self.operations)

    def cheapest(self, number: int, made: Decisions) -> Assignment:
        """The best assignment of an operation, found once for each case of a kind."""
        op, moves = made.operations[number], made.known(number)
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
            if op.fits(candidate, self.costs.mesh):
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
            self.costs.mesh,
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
                largest = max(largest, math.prod(self.costs.buffers[name].shape))
        shared = -sum(map(len, assignment))
        cost = LayoutCost(moved, effect.flops).in_bytes
        return AssignmentRank(cost, shared, largest, moved)


def decided_by(op: Operation) -> tuple[str, ...]:
    """The values whose layouts influence an operation's assignment."""
    return op.ins if op.like is None else (*op.ins, op.like)
