"""Straight-line statements as a dependency graph, and the merging of its nodes.

The segmenter and the grouping into loops both ask which statements may stand
together.  Groups are convex: no path leaves one and comes back, so each can run as a
whole.  What may merge is a predicate that the caller hands in (nvFuser #4145).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from typing import TypeAlias

from jhost.lowering.ir.effects import Aliases, reads_writes
from jhost.lowering.ir.marks import BarrierMark
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import (
    Buffer,
    Communicate,
    Compute,
    Select,
    Stmt,
    Wait,
    every,
)
from jhost.lowering.rules.properties import is_barrier


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A statement, or a communication with its wait, and the buffers it touches.

    If it is a piece of a barrier, `barrier` has the names of all pieces' operands.
    """

    stmts: tuple[Stmt, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    barrier: tuple[str, ...] = ()

    @property
    def stmt(self) -> Stmt:
        return self.stmts[0]


class Graph(tuple[Node, ...]):
    """The nodes of straight-line statements, in order, and what stands between them."""

    @functools.cached_property
    def makers(self) -> Mapping[str, int]:
        """By value, the node that makes it."""
        return makers_of((b.name for b in node.writes) for node in self)

    @functools.cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """By value, the nodes that read it, in order."""
        readers: dict[str, list[int]] = {}
        for number, node in enumerate(self):
            # Once each: an equation may read one value twice, as `x * x` does.
            for name in dict.fromkeys(buffer.name for buffer in node.reads):
                readers.setdefault(name, []).append(number)
        return readers

    @functools.cached_property
    def touching(self) -> Mapping[str, Sequence[tuple[int, bool, int]]]:
        """By value, the nodes that touch it, whether they write it, and where."""
        touching: dict[str, list[tuple[int, bool, int]]] = {}
        for number, node in enumerate(self):
            for writes, buffers in ((False, node.reads), (True, node.writes)):
                for position, buffer in enumerate(buffers):
                    place = (number, writes, position)
                    touching.setdefault(buffer.name, []).append(place)
        return touching

    def next_to(self, number: int, forward: bool) -> Iterator[int]:
        """The readers of a node's results, or the makers of its operands."""
        node = self[number]
        if forward:
            return (n for b in node.writes for n in self.readers.get(b.name, ()))
        makers = (self.makers.get(buffer.name) for buffer in node.reads)
        return (maker for maker in makers if maker is not None)

    @functools.cached_property
    def of_products(self) -> Set[str]:
        """The values with a contraction behind them; weights have none."""
        made = set[str]()
        for node in self:
            if has_contraction(node.stmt) or any(b.name in made for b in node.reads):
                made.update(buffer.name for buffer in node.writes)
        return made

    @functools.cached_property
    def before(self) -> Sequence[Set[int]]:
        """For each node, those before it that it must follow."""
        return dependencies(self)


def makers_of(written: Iterable[Iterable[str]]) -> dict[str, int]:
    """By value, the last that writes it, of some things in order that write values."""
    return {name: number for number, names in enumerate(written) for name in names}


Group: TypeAlias = Sequence[Node]


def written_by(nodes: Iterable[Node]) -> set[str]:
    """The values that some nodes make."""
    return {buffer.name for node in nodes for buffer in node.writes}


def read_by(nodes: Iterable[Node]) -> set[str]:
    """The values that some nodes read."""
    return {buffer.name for node in nodes for buffer in node.reads}


ShouldMerge: TypeAlias = Callable[[Group, Group], bool]
"""Whether two groups may merge; the members of each have merged already.

The predicate need not ask whether the result is convex.
"""

KindOf: TypeAlias = Callable[[Node], Hashable]
"""A key that is equal for nodes that may merge; None for a node that never merges."""


def nodes(
    body: Sequence[Stmt], barriers: Mapping[str, tuple[str, ...]] | None = None
) -> Graph:
    """The nodes of `body`: each communication stands together with its wait, if it can.

    `barriers` has the operands of the barrier that makes a buffer, by its name.
    """
    barriers = barriers or {}
    waits = {stmt.communication for stmt in every(Wait, body)}
    together: dict[int, tuple[Stmt, ...]] = {}
    if waits:  # most stretches have none
        issued = {stmt.name for stmt in every(Communicate, body)}
        for number, stmt in enumerate(body):
            if isinstance(stmt, Wait) and stmt.communication in issued:
                together[number] = ()
            elif isinstance(stmt, Communicate) and stmt.name in waits:
                together[number] = (stmt, Wait(communication=stmt.name))
    made: list[Node] = []
    for number, stmt in enumerate(body):
        if not (stmts := together.get(number, (stmt,))):
            continue
        reads, writes = reads_writes(stmt)
        operands = barriers.get(writes[0].name, ()) if barriers and writes else ()
        if operands and not _forwards(stmt):
            operands = ()
        made.append(Node(stmts, tuple(reads), tuple(writes), operands))
    return Graph(made)


def graph_of(program: Program) -> Graph:
    """The nodes of a program, each piece of a barrier with the operands of all."""
    # Not `derived`: `take_known` passes derived facts to programs with other bodies.
    barriers = (mark for mark in program.marks if isinstance(mark, BarrierMark))
    return nodes(program.body, {mark.buffer: mark.operands for mark in barriers})


def _forwards(stmt: Stmt) -> bool:
    """Whether it is a barrier, and not a cut of padding behind a barrier."""
    return isinstance(stmt, Compute) and all(is_barrier(e.eqn) for e in stmt.unit.eqns)


def dependencies(graph: Sequence[Node]) -> list[set[int]]:
    """For each node, those before it that it must follow.

    A read follows the last write, and a write the last write and the reads since.  Who
    reads or writes an alias does so with what it is a part of.
    """
    aliases = Aliases(stmt for node in graph for stmt in node.stmts)

    def names(node: Node, buffers: Sequence[Buffer]) -> set[str]:
        found = {buffer.name for buffer in buffers}
        # Making an alias is no access: its memory may be written later.
        if aliases.selects and not isinstance(node.stmt, Select):
            found |= aliases.memories(buffers)
        return found

    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    before: list[set[int]] = []
    for number, node in enumerate(graph):
        read, written = names(node, node.reads), names(node, node.writes)
        needs = {writer[name] for name in read | written if name in writer}
        for name in written:
            needs.update(readers.pop(name, ()))
            writer[name] = number
        for name in read:
            readers.setdefault(name, []).append(number)
        before.append(needs - {number})
    return before


def merge_groups(
    graph: Sequence[Node],
    before: Sequence[Set[int]],
    should_merge: ShouldMerge,
    kind_of: KindOf = lambda node: (),
) -> list[Group]:
    """Merge nodes into convex groups as far as the predicate lets; groups in order.

    `before` has the `dependencies` of each node, and more where there is more to keep.
    The predicate is asked about nodes of one kind.
    Nodes come in program order, so nothing depends on the one at hand yet: it may join
    a group unless another group that it needs depends, through others, on that group.
    """
    groups = _Groups()
    for number, node in enumerate(graph):
        needed, kind = groups.of(before[number]), kind_of(node)
        fitting = (
            group
            for group in groups.free(needed, kind)
            if should_merge(groups.members[group], (node,))
        )
        groups.add(node, kind, next(fitting, None), needed)
    return [tuple(groups.members[group]) for group in groups.order()]


class _Groups:
    """Groups of nodes while they are put together.

    A set of groups is an integer with a bit for each, the later ones higher.
    """

    # A whole step has thousands of groups, and `|` of two integers is one operation.

    def __init__(self) -> None:
        self.members: list[list[Node]] = []
        self.group_of: list[int] = []  # of each node, in order
        self.of_kind: dict[Hashable, int] = {}
        self.needs: list[int] = []  # the groups that some member needs
        self.readers: list[int] = []  # the groups that need it
        self.upstream: list[int] = []  # what it needs, through others too

    def of(self, numbers: Iterable[int]) -> int:
        """The groups that these nodes are in."""
        found = 0
        for number in numbers:
            found |= 1 << self.group_of[number]
        return found

    def free(self, needed: int, kind: Hashable) -> Iterator[int]:
        """Groups of a kind on which no other group of `needed` depends, last first."""
        free = 0 if kind is None else self.of_kind.get(kind, 0)
        for group in _bits(needed) if free else ():
            free &= ~self.upstream[group]
        return _bits(free)

    def add(self, node: Node, kind: Hashable, group: int | None, needed: int) -> None:
        """Put the next node, which needs some groups, into one, or into a new one."""
        if group is None:
            group = len(self.members)
            self.of_kind[kind] = self.of_kind.get(kind, 0) | 1 << group
            self.members.append([])
            for sets in (self.needs, self.readers, self.upstream):
                sets.append(0)
        self.members[group].append(node)
        self.group_of.append(group)
        needed &= ~(1 << group)
        self.needs[group] |= needed
        above = needed
        for other in _bits(needed):
            self.readers[other] |= 1 << group
            above |= self.upstream[other]
        # Most nodes need nothing new, and the walk downstream is what takes time.
        if above & ~self.upstream[group]:
            for other in self.downstream(group):
                self.upstream[other] |= above

    def downstream(self, group: int) -> set[int]:
        """A group and all that need it, through others too."""
        found, waiting = {group}, [group]
        while waiting:
            new = set(_bits(self.readers[waiting.pop()])) - found
            found |= new
            waiting += new
        return found

    def order(self) -> Iterator[int]:
        """Groups after those they need, otherwise in the order of their first nodes."""
        waiting = [needs.bit_count() for needs in self.needs]
        # A group is numbered when its first node comes.
        ready = [group for group, count in enumerate(waiting) if not count]
        while ready:
            group = heapq.heappop(ready)
            yield group
            for reader in _bits(self.readers[group]):
                waiting[reader] -= 1
                if not waiting[reader]:
                    heapq.heappush(ready, reader)


def _bits(number: int) -> Iterator[int]:
    """The bits that are set, the highest first."""
    while number:
        bit = number.bit_length() - 1
        yield bit
        number ^= 1 << bit
