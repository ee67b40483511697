"""The layouts decided so far for a program's values, and what they move.

Decisions can change one at a time, in any order.  A change only recounts the values
that it affects.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.effects import AssignmentEffect, AssignmentEffects
from jhost.lowering.layouts.transfer_bytes import (
    NOTHING,
    LayoutCost,
    ReshardCosts,
    TransferBytes,
)

WantedLayout: TypeAlias = tuple[str, Layout]
"""A value, and a layout in which some operation wants it."""

_MUCH = 8
"""A large move has at least this part (an eighth) of all bytes that move."""

_NO_MOVES = frozenset[WantedLayout]()


class Decisions:
    """Layouts and assignments, with the sum of the bytes that they move and the work.

    A value is brought to another layout once, however many operations read it there.
    It comes from the nearest layout that it is in by then.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        effects: AssignmentEffects,
        costs: ReshardCosts,
        given: Mapping[str, Layout],
    ) -> None:
        self.operations = operations
        self.effects = effects
        self.costs = costs
        self.layouts = dict(given)
        self.assignments: dict[int, Assignment] = {}
        # As they were counted: preferences may have changed since.
        self.counted: dict[int, AssignmentEffect] = {}
        self.total = NOTHING
        self.flops = 0
        self.movers: dict[WantedLayout, list[int]] = {}
        self.moves_of: dict[str, set[Layout]] = {}
        self.moving: dict[str, TransferBytes] = {}

    def decide(self, number: int, assignment: Assignment) -> set[str]:
        """Assign an operation; return the results whose layouts change with that."""
        old = self.counted.get(number)
        new = self.effects.of(self.operations[number], assignment)
        self.assignments[number] = assignment
        if new is old:
            return set()
        self.counted[number] = new
        recount: set[str] = set()
        wanted_before = () if old is None else old.wants
        if old is not None:
            self.total -= old.cost
            self.flops -= old.flops
        if new.wants != wanted_before:
            for move in wanted_before:
                if move not in new.wants and self._drop(move, number):
                    recount.add(move[0])
            for move in new.wants:
                if move not in wanted_before and self._add(move, number):
                    recount.add(move[0])
        self.total += new.cost
        self.flops += new.flops
        changed: set[str] = set()
        for name, rest in new.rests:  # mostly one; this is asked most often of all
            if self.layouts.get(name) != rest:
                self.layouts[name] = rest
                changed.add(name)
        # Once for all that changed.
        for name in recount | changed:
            if name in self.moves_of:
                self._count(name)
        return changed

    def copy(self) -> Decisions:
        """The same decisions, which change by themselves."""
        made = copy.copy(self)
        made.layouts, made.assignments = dict(self.layouts), dict(self.assignments)
        made.counted, made.moving = dict(self.counted), dict(self.moving)
        made.movers = {move: [*numbers] for move, numbers in self.movers.items()}
        made.moves_of = {name: {*wanted} for name, wanted in self.moves_of.items()}
        return made

    @property
    def price(self) -> LayoutCost:
        """The bytes of all moves, and the work."""
        return LayoutCost(self.total, self.flops)

    @property
    def much(self) -> int:
        """How many bytes are a large part of all that move."""
        return max(1, self.total.all // _MUCH)

    def in_order(self) -> tuple[Assignment, ...]:
        """The assignments of all operations."""
        return tuple(self.assignments[n] for n in range(len(self.operations)))

    def same_as(self, other: Decisions) -> bool:
        """Whether all decisions are the same."""
        mine, others = (
            (self.layouts, self.assignments),
            (other.layouts, other.assignments),
        )
        return mine == others

    def moved(self) -> set[str]:
        """The values that some operation wants in another layout than they rest in."""
        return {
            name
            for name, wanted in self.moves_of.items()
            if wanted - {self.layouts[name]}
        }

    def known(self, number: int) -> frozenset[WantedLayout]:
        """The moves of an operation's operands that earlier operations make."""
        known = [
            (name, want)
            for name in self.operations[number].ins
            for want in self.moves_of.get(name, ())
            # Later operations find the value moved, so only the first pays.
            if self.movers[name, want][0] < number
        ]
        return frozenset(known) if known else _NO_MOVES  # most often there are none

    def _add(self, move: WantedLayout, number: int) -> bool:
        """Note that an operation wants a move; whether it is the first one."""
        movers = self.movers.get(move)
        if not movers:  # most values have one reader
            self.movers[move] = [number]
            self.moves_of.setdefault(move[0], set()).add(move[1])
            return True
        # In the order of the operations: the first that wants a move makes it, and the
        # others find it there (`known`).
        place = bisect.bisect_left(movers, number)
        if movers[place : place + 1] == [number]:
            return False  # an operation may read a value twice
        movers.insert(place, number)
        return place == 0

    def _drop(self, move: WantedLayout, number: int) -> bool:
        """Forget that an operation wants a move; whether it was the first one."""
        movers = self.movers.get(move, [])
        if number not in movers:
            return False
        is_first = movers[0] == number
        movers.remove(number)
        if not movers:
            self.moves_of[move[0]].discard(move[1])
        return is_first

    def lay_out(self, name: str, layout: Layout) -> bool:
        """Lay out a value, and recount its moves; whether the layout changed."""
        old = self.layouts.get(name)
        if old == layout:
            return False
        self.layouts[name] = layout
        if self.moves_of.get(name):
            self._count(name)
        return True

    def _count(self, name: str) -> None:
        """Recount the moves of a value, each from the nearest layout it is in."""
        wanted, rest = self.moves_of[name], self.layouts[name]
        before = self.moving.pop(name, None)
        # Most values are wanted where they are, and layouts are counted often.
        others = [want for want in wanted if want != rest]
        if len(others) == 1:
            moved = self.costs.reshard(name, rest, others[0])
        elif others:
            others.sort(key=lambda want: (self.movers[name, want][0], want))
            moved = self.costs.moves(name, rest, others)
        else:
            moved = NOTHING
        if moved is not NOTHING:
            self.moving[name] = moved
            self.total += moved
        if before is not None:
            self.total -= before
