"""The elements that each device needs of other devices' parts, for windows of a dim.

Device r may need some elements of device s, for any kind of window.  All pairs with one
distance between r and s make one permute, unless other permutations move less.  If
windows are as far apart as parts are, all devices need the same elements of the
neighbour at one distance.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.layouts.permutations import (
    PieceSizes,
    Sources,
    most_pieces,
    permutations,
)
from jhost.lowering.rules.reads import WindowReads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HaloPiece:
    """A stretch of a device's part that other devices need.

    Attributes:
        sources: for each device, the device that sends the stretch to it.
        size: the number of elements.
        starts: for each device, where the stretch that it sends begins in its part.
        places: for each device, where it puts the elements in its window.  A device
            that needs none puts them behind the window.
        arrays: for each device, the array whose stretch it sends; empty if there is one
            array only.
        lengths: for each device, how many elements it puts there; none if all.
    """

    sources: Sources
    size: int
    starts: tuple[int, ...]
    places: tuple[int, ...]
    arrays: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def stays(self) -> bool:
        """Whether each device takes it from its own part."""
        return all(device == source for device, source in enumerate(self.sources))

    @property
    def sent(self) -> tuple[Sources, int, tuple[int, ...], tuple[int, ...]]:
        """What moves, wherever it is put."""
        return self.sources, self.size, self.starts, self.arrays


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """The pieces that make windows of `window` elements."""

    window: int
    pieces: tuple[HaloPiece, ...]

    def is_own(self, part: int) -> bool:
        """Whether the windows are the parts themselves."""
        return self.window == part and all(
            piece.stays and set(piece.starts) == set(piece.places) == {0}
            for piece in self.pieces
        )


@functools.lru_cache(maxsize=1024)
def plan_halo(reads: WindowReads, count: int, part: int, devices: int) -> Halo:
    """How each device gets the window of its `count` steps, from parts of that size."""
    shared: _SharedElements = {}
    for device in range(devices):
        needed = reads.needed(device * count, count)
        for other, elements in elements_by_part(needed, part):
            shared[device, other] = elements
    pieces: list[HaloPiece] = []
    for sources in _permutations(shared, reads.stride < 0, devices):
        pairs = [pair for pair in enumerate(sources) if pair in shared]
        elements = {device: shared.pop((device, other)) for device, other in pairs}
        pieces.append(_piece(sources, elements, reads, count, part))
    return Halo(window=reads.window(count), pieces=tuple(pieces))


def elements_by_part(needed: range, part: int) -> Iterator[tuple[int, range]]:
    """The parts of that size that have some needed elements, and these elements."""
    for number in range(needed.start // part, -(-needed.stop // part)):
        start, stop = number * part, (number + 1) * part
        elements = range(max(start, needed.start), min(stop, needed.stop))
        if elements:
            yield number, elements


_SharedElements: TypeAlias = dict[tuple[int, int], range]
"""The elements that a device needs, by the device and by the one that has them."""


def _permutations(
    shared: _SharedElements, mirrored: bool, devices: int
) -> list[Sources]:
    """The permutations by which pieces move: those by one distance, if none move less.

    A device keeps its own piece, if it needs any of it.
    """
    sign, every = -1 if mirrored else 1, range(devices)
    by_distance = [
        tuple((n + sign * d) % devices for d in every)
        for n in sorted({(s - sign * d) % devices for d, s in shared})
    ]
    sizes = {pair: len(elements) for pair, elements in shared.items()}
    moved = {pair: size for pair, size in sizes.items() if pair[0] != pair[1]}
    if len(by_distance) <= most_pieces(moved):
        return by_distance
    fewest = permutations(moved, devices)
    if len(moved) < len(sizes):
        fewest = [tuple(every), *fewest]
    return min(by_distance, fewest, key=lambda each: _moved(each, moved))


def _moved(found: Sequence[Sources], sizes: PieceSizes) -> int:
    """How many elements a device receives."""
    pieces = ([sizes.get(pair, 0) for pair in enumerate(each)] for each in found)
    return sum(map(max, pieces))


def _piece(
    sources: Sources,
    shared: Mapping[int, range],
    reads: WindowReads,
    count: int,
    part: int,
) -> HaloPiece:
    """The piece of one permutation; `shared` has the elements by receiver."""
    devices, window = len(sources), reads.window(count)
    size = max(map(len, shared.values()))

    def place(device: int, start: int) -> int:
        return sources[device] * part + start - reads.start(device * count, count)

    starts = {d: each.start - sources[d] * part for d, each in shared.items()}
    ends = {d: each.stop - sources[d] * part for d, each in shared.items()}
    start = max(0, max(ends.values()) - size)
    alike = start <= min(starts.values())
    sent = {sources[d]: min(each, part - size) for d, each in starts.items()}
    if alike:
        sent = dict.fromkeys(range(devices), start)
    # What a device keeps is not cut out first: what reads it may cut it as it reads.
    elif sources == tuple(range(devices)):
        size, sent = part, dict.fromkeys(range(devices), 0)
    placed = {d: place(d, sent[sources[d]]) for d in shared}
    # If windows are as far apart as parts are, pieces never overlap.  Devices that need
    # nothing then put the elements in the same place as others, and never read them:
    # one static place for all devices.
    regular = abs(reads.stride) * count == part * reads.dilation
    others = window
    if alike and regular and len(set(placed.values())) == 1:
        others = next(iter(placed.values()))
    return HaloPiece(
        sources=sources,
        size=size,
        starts=tuple(sent.get(device, 0) for device in range(devices)),
        places=tuple(placed.get(device, others) for device in range(devices)),
    )
