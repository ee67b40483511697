"""A stream that nobody marked, and which of several is the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jhost.lowering.ir.marks import StreamChoice


@dataclasses.dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream that could hide communications.

    Attributes:
        marks: the marks that would ask for it.  A group marks values alike, such as one
            value of each layer.
        moved: the names of the communications.
        hidden: the most seconds that loops could gain: the communications take no
            longer, or the contractions do not.
        evened: the part of `hidden` for which the last device works longer than the
            average.  Loops in zigzag order give each device the same work.
        work: the seconds of the contractions.
        beside: the seconds of the products that work on rows of the dim.
        place: orders dims: later dims are higher, but the last dim is lowest.
        nodes: for each marked value, the contraction that the mark is there for.
        blocks: for each marked value, the first such contraction that no transfer
            parts from its own; loops work on blocks.
    """

    marks: tuple[tuple[StreamChoice, ...], ...]
    moved: frozenset[str]
    hidden: float
    evened: float
    work: float
    beside: float
    place: int
    nodes: Mapping[str, int]
    blocks: Mapping[str, int]

    @property
    def every_mark(self) -> list[StreamChoice]:
        return [mark for group in self.marks for mark in group]

    @property
    def lines(self) -> tuple[str, ...]:
        """The user's lines of its marks, each once."""
        lines = (line for mark in self.every_mark for line in mark.lines)
        return tuple(dict.fromkeys(lines))


def overlap(stream: FoundStream, other: FoundStream) -> bool:
    """Whether two streams exclude each other."""
    if not stream.moved.isdisjoint(other.moved):
        return True
    # A value is cut along one dim.
    return not {m.buffer for m in stream.every_mark}.isdisjoint(
        m.buffer for m in other.every_mark
    )


_EQUAL = 0.9
"""Two streams count as equal if one could hide this share of what the other could."""


def best_of(found: Sequence[FoundStream]) -> FoundStream:
    """The stream that could hide most, and among equals the one with most products.

    Among equals of these, the one along the last dim but one.  The last dim has
    features, which products contract, and earlier dims are short where axes shard
    sequences.
    """
    most = max(each.hidden for each in found)
    found = [each for each in found if each.hidden >= _EQUAL * most]
    most = max(each.beside for each in found)
    found = [each for each in found if each.beside >= _EQUAL * most]
    return max(found, key=lambda each: each.place)
