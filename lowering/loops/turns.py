"""In which turn a loop with windows makes each chunk of each value.

The chunks of all devices stand in a ring.  In turn t a device gets the chunk t places
on from its first one.  So a window has the chunk before it at hand, and waits a turn
for the chunk behind it.  But the one before the device's first comes last of all, so
what reads windows makes the device's own chunks last.  What reads windows of such
values begins a place later, and makes one more chunk last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.graph import Group, Node
from jhost.lowering.streams.halos import ChunkHalo

Halos: TypeAlias = Mapping[int, Mapping[int, ChunkHalo]]
"""By a node's identity, the halos of its operands."""

PlacedNode: TypeAlias = tuple[Node, int]
"""A node, and the place of the chunk that it works on."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Timing:
    """A node makes the chunk at place `first` first, in turn `first + late`.

    One turn later it makes the next, and so on around the ring.
    """

    first: int = 0
    late: int = 0

    @property
    def begins(self) -> int:
        """The node's first turn."""
        return self.first + self.late


@dataclasses.dataclass(frozen=True)
class Turns:
    """The turns of a loop's nodes over `chunks`, of which each device has `own`.

    `turned`: the ring is taken from behind, so chunks behind a chunk come before it.
    """

    nodes: Group
    halos: Halos
    chunks: int
    own: int
    turned: bool
    timings: Mapping[int, Timing]

    @classmethod
    def fewest(cls, nodes: Group, halos: Halos, chunks: int, own: int) -> Turns:
        """The turns in the direction in which the nodes wait less."""
        ways = (
            cls(nodes, halos, chunks, own, turned, timings)
            for turned in (False, True)
            for timings in [_timings(nodes, halos, chunks, own, turned)]
        )
        return min(ways, key=lambda turns: turns.begins)

    @property
    def begins(self) -> int:
        """The first turn in which all nodes work."""
        return max(timing.begins for timing in self.timings.values())

    def of(self, node: Node) -> Timing:
        """When a node works."""
        return self.timings[id(node)]

    def kept(self) -> set[str]:
        """The values of which a chunk of another device is read in a later turn."""
        makers = {b.name: self.of(node) for node in self.nodes for b in node.writes}
        return {
            buffer.name
            for node in self.nodes
            for buffer in node.reads
            if (maker := makers.get(buffer.name)) is not None
            and (
                self.of(node).late > maker.late
                or self.of(node).first > max(maker.first, self.own)
            )
        }

    def head(self) -> list[PlacedNode]:
        """The work on the device's own chunks before all others."""
        return [
            (node, place)
            for place in range(self.own)
            for node in self.nodes
            if not self.of(node).first
        ]

    def runs(self) -> Iterator[tuple[range, Sequence[Node]]]:
        """Turns in which chunks of other devices come, and the nodes that all do."""
        starts = {t.begins for t in self.timings.values() if t.begins < self.chunks}
        cuts = sorted({self.own, *(each for each in starts if each > self.own)})
        for start, end in zip(cuts, [*cuts[1:], self.chunks], strict=True):
            yield (
                range(start, end),
                [node for node in self.nodes if self.of(node).begins <= start],
            )

    def tail(self) -> list[PlacedNode]:
        """The work in later turns, with what chunks of other devices need first."""
        works = [
            (node, (turn - timing.late) % self.chunks)
            for turn in range(self.chunks, self.chunks + self.begins)
            for node in sorted(self.nodes, key=self.of)
            if (timing := self.of(node)).begins <= turn < self.chunks + timing.begins
        ]
        urgent = self._urgent(works)
        return [*urgent, *(work for work in works if work not in urgent)]

    def is_own(self, work: PlacedNode) -> bool:
        """Whether some work is on a chunk of the device's own."""
        return work[1] < self.own

    def _urgent(self, works: Sequence[PlacedNode]) -> list[PlacedNode]:
        """The work on chunks of other devices, and what that needs."""
        found: list[PlacedNode] = []
        wanted: set[tuple[str, int]] = set()
        for node, place in reversed(works):
            made = {(buffer.name, place) for buffer in node.writes}
            if not self.is_own((node, place)) or made & wanted:
                found.append((node, place))
                beside = (-1, 0, 1) if id(node) in self.halos else (0,)
                wanted |= {
                    (buffer.name, (place + step) % self.chunks)
                    for buffer in node.reads
                    for step in beside
                }
        return found[::-1]


def _timings(
    nodes: Group, halos: Halos, chunks: int, own: int, turned: bool
) -> dict[int, Timing]:
    made: dict[str, Timing] = {}
    found: dict[int, Timing] = {}
    for node in nodes:
        first = late = 0
        for number, buffer in enumerate(node.reads):
            maker = made.get(buffer.name, Timing())
            halo = halos.get(id(node), {}).get(number)
            at_hand, waits = _sides(halo, chunks, turned)
            first = max(first, maker.first + at_hand)
            late = max(late, maker.late + waits)
        # The device's own chunks come last, beside the last sends.
        first = max(first, own) if first or late else 0
        found[id(node)] = Timing(first, late)
        made |= {buffer.name: found[id(node)] for buffer in node.writes}
    return found


def _sides(halo: ChunkHalo | None, chunks: int, turned: bool) -> tuple[bool, bool]:
    """Whether a window reads the chunk of the turn before, and that of the next."""
    if halo is None:
        return False, False
    sides = [count > 0 for count, _ in halo.sides]
    earlier, later = sides[::-1] if turned else sides
    # Of two chunks each is the neighbour on both sides.
    return (earlier or later, False) if chunks == 2 else (earlier, later)
