"""Transfers of whole shards that are issued ahead of their loop.

The first loop of a layer that is computed again gathers the layer's input and its
cotangent, and no contraction waits yet that could stand beside both.  But the cotangent
is there long before.  So it is gathered beside the work in front of the loop, and its
product stands beside the gather of the input.

Of several shards the first comes a work earlier.  Then the last ones are there before
the work in front of the loop has sums to send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jhost.lowering.ir.bodies import CONTROL_FLOW
from jhost.lowering.ir.graph import Group, Node, makers_of, read_by, written_by
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.schedule.cheap import makers_and_along, may_go_along
from jhost.lowering.schedule.waiting_contractions import WaitingContractions
from jhost.lowering.schedule.whole_shards import products_of

_AHEAD = 2
"""A transfer is issued at most so many works ahead of its loop: it takes memory.  The
first of several shards comes one earlier."""


@dataclasses.dataclass(frozen=True, slots=True)
class IssuedAhead:
    """Shards of a transfer that are issued before a work in front of its loop.

    `along` has the cheap groups that make its source, and come with it.
    """

    transfer: Node
    loop: Group
    work: Group
    along: tuple[Group, ...]
    shards: slice


class WorkAhead:
    """The groups of a program in order, and the works among them."""

    def __init__(
        self, groups: Sequence[Group], contractions: WaitingContractions
    ) -> None:
        self.groups, self.contractions = groups, contractions
        self.works = [n for n, group in enumerate(groups) if self.is_work(group)]
        self.makers = makers_of(map(written_by, groups))

    def is_work(self, group: Group) -> bool:
        """Whether a group takes long enough to hide a transfer, and keeps its place."""
        if self.contractions.has(group[0]):
            return False
        stmts = [node.stmt for node in group]
        return any(has_contraction(s) or isinstance(s, CONTROL_FLOW) for s in stmts)

    def ahead(self, loop: Group, moved: Group, work: Group) -> Iterator[IssuedAhead]:
        """The transfers to issue ahead, of those that a loop issues at one time.

        They have a product that waits for none of the others.  `work` reads them all.
        """
        place = self.groups.index(loop)
        before = [number for number in self.works if number < place][-_AHEAD:]
        for node in moved:
            others = [each for each in moved if each is not node]
            if not others or not products_of(node, others, work):
                continue
            makers, along = makers_and_along(
                [node.reads[0].name],
                self.makers,
                lambda number: self.goes_along(self.groups[number]),
                lambda number: read_by(self.groups[number]),
            )
            ready = max(makers, default=-1)
            first = next((number for number in before if number > ready), None)
            if first is not None:
                yield from self.issued(node, loop, first, (ready, along))

    def issued(
        self, node: Node, loop: Group, first: int, source: tuple[int, list[int]]
    ) -> Iterator[IssuedAhead]:
        """A transfer before the work `first`, and its first shard a work earlier."""
        ready, along = source
        earlier = [number for number in self.works if ready < number < first][-1:]
        several = bytes_of(node.writes[0]) > 2 * bytes_of(node.reads[0])
        parts = [slice(1), slice(1, None)] if several and earlier else [slice(None)]
        for number, part in zip((*earlier, first)[-len(parts) :], parts, strict=True):
            some = tuple(self.groups[each] for each in along if each > number)
            along = [each for each in along if each <= number]
            yield IssuedAhead(node, loop, self.groups[number], some, part)

    def goes_along(self, group: Group) -> bool:
        """Whether a group is one cheap statement, and makes no more than it reads."""
        return self.contractions.can_wait(group) and may_go_along(group[0].stmt)
