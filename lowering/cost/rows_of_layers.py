"""Take a found stream apart where it runs through rows of layers.

Layers that are written out one after another are in one stream with what stands around
them, and with their backward.  A loop may gain in the layers and lose around them, and
one layer of a row can stand for all.  So each row is weighed by itself, as the body of
a scan would be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jhost.lowering.cost.sections import LAYERS
from jhost.lowering.streams.found_marks import MarksAlike
from jhost.lowering.streams.found_stream import FoundStream


def rows_apart(stream: FoundStream, seconds: Sequence[float]) -> list[FoundStream]:
    """The parts of a stream for each row of layers, and one for the rest.

    `seconds` has the seconds of each node of the program.  It is the stream itself if
    it runs through no row.
    """
    rows = list(_rows(stream.marks, stream.nodes))
    others = tuple(g for g in stream.marks if not any(g in row for row in rows))
    parts = [*rows, others] if others else rows
    if len(parts) < 2:
        return [stream]

    def work(groups: Sequence[MarksAlike]) -> float:
        return sum(seconds[stream.nodes[m.buffer]] for g in groups for m in g)

    every = work(stream.marks)
    return [_part(stream, part, work(part) / every) for part in parts]


def blocks_apart(stream: FoundStream) -> list[FoundStream]:
    """The parts of a stream for each block; none if it has only one."""
    blocks: dict[int, list[MarksAlike]] = {}
    for group in stream.marks:
        blocks.setdefault(stream.blocks[group[0].buffer], []).append(group)
    if len(blocks) < 2:
        return []
    share = 1 / len(stream.marks)
    return [_part(stream, tuple(b), len(b) * share) for b in blocks.values()]


def _part(
    stream: FoundStream, marks: tuple[MarksAlike, ...], share: float
) -> FoundStream:
    """A part of a stream that has this share of its work."""
    return dataclasses.replace(
        stream,
        marks=marks,
        hidden=share * stream.hidden,
        evened=share * stream.evened,
        work=share * stream.work,
        beside=share * stream.beside,
    )


def _rows(
    marks: Sequence[MarksAlike], nodes: Mapping[str, int]
) -> Iterator[tuple[MarksAlike, ...]]:
    """The groups that take turns: layer by layer, each has marks there."""
    places = {group: [nodes[mark.buffer] for mark in group] for group in marks}
    left = [group for group in marks if len(group) >= LAYERS]
    while left:
        row = [left.pop(0)]
        for each in row:
            turns = [g for g in left if _take_turns(places[each], places[g])]
            left = [group for group in left if group not in turns]
            row += turns
        # One group is no row: queries, keys and values may be alike in one layer.
        if len(row) > 1:
            yield tuple(group for group in marks if group in row)


def _take_turns(numbers: Sequence[int], others: Sequence[int]) -> bool:
    """Whether each of two groups has a mark between marks of the other."""
    return _has_between(numbers, others) and _has_between(others, numbers)


def _has_between(numbers: Sequence[int], others: Sequence[int]) -> bool:
    return any(min(others) < place < max(others) for place in numbers)
