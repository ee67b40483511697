"""Contractions that nothing waits for, and the transfers that they stand beside.

Only the optimizer reads the gradient of a weight, so it may be computed long after its
operands are there: beside a transfer that would have no other work beside it.  Cheap
statements on such a gradient, and transfers of it, wait with it.  So do cheap values
that nothing else reads, because XLA fuses these into their readers.  The choice goes by
counts, as in `order.py`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from jhost.lowering.ir.graph import Group, Node, makers_of, read_by, written_by
from jhost.lowering.ir.layout import bytes_in
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.statements import Communicate, Compute
from jhost.lowering.schedule.cheap import can_wait, is_cheap

_TRANSFERS = 2
"""The contractions that are ready are shared by so many transfers.

They hide the last transfer of their own loop, and the first one of the next loop.
"""


class WaitingContractions:
    """The contractions of a graph that no transfer or reader has taken yet.

    `numbers` says which nodes they are.  Nodes in `in_loops` (identities) never wait.
    """

    def __init__(
        self, graph: Sequence[Node], numbers: Iterable[int], in_loops: Collection[int]
    ) -> None:
        self.graph = graph
        self.every = [graph[number] for number in sorted(numbers)]
        self.ids = {*map(id, self.every)}
        self.waiting = self.every
        self.in_loops = in_loops
        self.put_off: list[Group] = []
        self.taken_since = False
        """Whether a contraction was taken since groups were last resumed."""
        # Names of what is still to be made: a sum that reads none of them is ready.
        self.unmade = written_by(graph)
        self.params = read_by(graph) - self.unmade
        self.for_late: dict[str, Group] = {}
        """For each value that only late groups read, the cheap group that makes it."""
        # How many that wait write a value; counted, as programs have hundreds of each.
        self.late = Counter[str]()
        self.count_late(self.waiting, 1)

    def in_order(self, groups: Sequence[Group]) -> Iterator[Group]:
        """The groups as they are to be written; loops take contractions meanwhile."""
        self.for_late = self.read_late(groups) if self.every else {}
        for group in groups:
            # A waiting contraction is written where a transfer or a reader takes it.
            if self.has(group[0]) or self.is_for_late(group):
                continue
            if self.can_wait(group) and self.is_late(group):
                self.put(group)
                continue
            yield from self.before(group)
            yield from self.written(group)
            yield from self.resumed()
        # No transfer is left beside which these could stand.
        yield from self.in_turn(self.waiting)

    def has(self, node: Node) -> bool:
        """Whether a node is one of the contractions, taken or not."""
        return id(node) in self.ids

    def made_last(self, groups: Sequence[Group]) -> list[Group]:
        """For each contraction, the last of the groups that make an operand of it."""
        makers = makers_of(map(written_by, groups))
        found = {
            max((makers[b.name] for b in node.reads if b.name in makers), default=-1)
            for node in self.every
        }
        return [groups[number] for number in sorted(found - {-1})]

    def made(self, nodes: Iterable[Node]) -> None:
        """Note that the values of these nodes are there from now on."""
        self.unmade -= written_by(nodes)

    def beside(self) -> list[Node]:
        """The contractions beside the next transfer: its share of the ready ones."""
        ready = [
            node
            for node in self.waiting
            if self.unmade.isdisjoint(buffer.name for buffer in node.reads)
        ]
        return self.taken(ready[: -(-len(ready) // _TRANSFERS)])

    def taken(self, nodes: list[Node]) -> list[Node]:
        """The nodes, which no longer wait."""
        if nodes:
            taken = {*map(id, nodes)}
            self.waiting = [node for node in self.waiting if id(node) not in taken]
            self.count_late(nodes, -1)
            self.taken_since = True
        self.made(nodes)
        return nodes

    # --- What waits with them ------------------------------------------------- #

    def can_wait(self, group: Group) -> bool:
        """Whether a group is no loop and no work, and has no effects but its values."""
        (node, *more), stmt = group, group[0].stmt
        if more or node.barrier or id(node) in self.in_loops:
            return False
        communicates = isinstance(stmt, Communicate)
        return communicates or (can_wait(stmt) and not has_contraction(stmt))

    def is_late(self, group: Group) -> bool:
        """Whether it reads values of waiting contractions, or values made of these."""
        return not self.late.keys().isdisjoint(_read(group))

    def put(self, group: Group) -> None:
        """Put off a group."""
        self.put_off.append(group)
        self.count_late(group, 1)

    def count_late(self, nodes: Iterable[Node], more: int) -> None:
        """Count values that are late from now on, or late no more."""
        for name in (buffer.name for node in nodes for buffer in node.writes):
            self.late[name] += more
            if not self.late[name]:
                del self.late[name]

    def before(self, group: Group) -> Iterator[Group]:
        """The waiting nodes that make the operands of a group."""
        if not self.is_late(group):
            yield from self.resumed()
            return
        wanted = _read(group)
        late = (*((node,) for node in self.waiting), *self.put_off)
        makers = {name: each for each in late for name in written_by(each)}
        reading = [*wanted]
        while reading:
            found = _read(makers.pop(reading.pop(), ()))
            wanted |= found
            reading += found
        read = [node for node in self.waiting if wanted & written_by([node])]
        yield from self.in_turn(read)

    def in_turn(self, nodes: Sequence[Node]) -> Iterator[Group]:
        """These contractions, and what waits with them, each behind its operands."""
        while nodes:
            ready = [n for n in nodes if self.late.keys().isdisjoint(read_by([n]))]
            yield from ((node,) for node in self.taken(ready))
            yield from self.resumed()
            nodes = [node for node in nodes if node not in ready]

    def resumed(self) -> Iterator[Group]:
        """The groups that were put off and whose operands are there now."""
        # What keeps a group is a contraction, or a group that was put off before it.
        # Most often none was taken, and there may be hundreds of each.
        if not self.taken_since:
            return
        self.taken_since = False
        waiting, self.put_off = self.put_off, []
        for group in waiting:
            self.count_late(group, -1)
        for group in waiting:
            if self.is_late(group):
                self.put(group)
            else:
                yield from self.written(group)  # others may be taken meanwhile

    # --- What only they read -------------------------------------------------- #

    def read_late(self, groups: Sequence[Group]) -> dict[str, Group]:
        """By value, the cheap group that makes it, if all its readers may be late."""
        behind = self.may_be_late(groups)
        found: dict[str, Group] = {}
        # From the last to the first: a reader may be such a group itself.
        for group in reversed(groups):
            made = written_by(group)
            readers = set[int]().union(*(self.readers.get(name, ()) for name in made))
            if id(group[0]) in behind or not readers or not readers <= behind:
                continue
            if self.can_wait(group) and self.keeps_no_more(group[0]):
                behind.add(id(group[0]))
                found |= dict.fromkeys(made, group)
        return found

    def may_be_late(self, groups: Sequence[Group]) -> set[int]:
        """The first nodes of the groups that wait if all contractions wait."""
        late, behind = written_by(self.every), set[int]()
        for group in groups:
            waits = self.can_wait(group) and not self.has(group[0])
            if waits and not late.isdisjoint(_read(group)):
                behind.add(id(group[0]))
                late |= written_by(group)
        return behind

    @functools.cached_property
    def readers(self) -> dict[str, set[int]]:
        """By value, the nodes that read it: also those that loops write."""
        readers: dict[str, set[int]] = {}
        for node in self.graph:
            for name in _read([node]):
                readers.setdefault(name, set()).add(id(node))
        return readers

    def keeps_no_more(self, node: Node) -> bool:
        """Whether a node is cheap, and its operands take no more than its results."""
        kept = [buffer for buffer in node.reads if buffer.name not in self.params]
        return (
            isinstance(node.stmt, Compute)
            and all(map(is_cheap, node.stmt.unit.eqns))
            and bytes_in(kept) <= bytes_in(node.writes)
        )

    def is_for_late(self, group: Group) -> bool:
        """Whether a group is written with the first group that reads it."""
        return any(buffer.name in self.for_late for buffer in group[0].writes)

    def written(self, group: Group) -> Iterator[Group]:
        """A group, behind the cheap groups that were left for it."""
        for buffer in (buffer for node in group for buffer in node.reads):
            left = self.for_late.get(buffer.name, ())
            for name in written_by(left):
                del self.for_late[name]
            if left:
                yield from self.written(left)
        yield group
        self.made(group)


def _read(group: Group) -> set[str]:
    """The values that a group reads, or that are in one barrier with it."""
    return read_by(group).union(*(node.barrier for node in group))
