"""The elements that each device needs of other devices' parts, for windows of a dim.

Device r may need some elements of device s, for any kind of window.  All pairs with one
distance between r and s make one permute.  If windows are as far apart as parts are,
all devices need the same elements of the neighbour at one distance.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jhost.lowering.rules.reads import WindowReads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HaloPiece:
    """A stretch of a device's part that other devices need.

    Attributes:
        distance: device r gets it from device `r + distance`, or from `distance - r` if
            it is mirrored, modulo the number of devices.
        mirrored: whether the dim is reversed.
        size: the number of elements.
        starts: for each device, where the stretch that it sends begins in its part.
        places: for each device, where it puts the elements in its window.  A device
            that needs none puts them behind the window.
    """

    distance: int
    mirrored: bool
    size: int
    starts: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def stays(self) -> bool:
        """Whether each device takes it from its own part."""
        return self.distance == 0 and not self.mirrored


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
    found: dict[int, dict[int, range]] = {}
    for device in range(devices):
        needed = reads.needed(device * count, count)
        for other in range(needed.start // part, -(-needed.stop // part)):
            own = range(other * part, (other + 1) * part)
            shared = range(max(own.start, needed.start), min(own.stop, needed.stop))
            if shared:
                distance = other + device if reads.stride < 0 else other - device
                found.setdefault(distance % devices, {})[device] = shared
    pieces = [
        _piece(distance, found[distance], reads, count, part, devices)
        for distance in sorted(found)
    ]
    return Halo(window=reads.window(count), pieces=tuple(pieces))


def _piece(
    distance: int,
    shared: Mapping[int, range],
    reads: WindowReads,
    count: int,
    part: int,
    devices: int,
) -> HaloPiece:
    """The piece for one distance; `shared` has the elements by receiver."""
    mirrored, window = reads.stride < 0, reads.window(count)
    size = max(map(len, shared.values()))

    def sender(device: int) -> int:
        return (distance - device if mirrored else distance + device) % devices

    def place(device: int, start: int) -> int:
        return sender(device) * part + start - reads.start(device * count, count)

    starts = {d: each.start - sender(d) * part for d, each in shared.items()}
    ends = {d: each.stop - sender(d) * part for d, each in shared.items()}
    start = max(0, max(ends.values()) - size)
    alike = start <= min(starts.values())
    sent = {sender(d): min(each, part - size) for d, each in starts.items()}
    if alike:
        sent = dict.fromkeys(range(devices), start)
    # What a device keeps is not cut out first: what reads it may cut it as it reads.
    elif not distance and not mirrored:
        size, sent = part, dict.fromkeys(range(devices), 0)
    placed = {d: place(d, sent[sender(d)]) for d in shared}
    # If windows are as far apart as parts are, pieces never overlap.  Devices that need
    # nothing then put the elements in the same place as others, and never read them:
    # one static place for all devices.
    regular = abs(reads.stride) * count == part * reads.dilation
    others = window
    if alike and regular and len(set(placed.values())) == 1:
        others = next(iter(placed.values()))
    return HaloPiece(
        distance=distance,
        mirrored=mirrored,
        size=size,
        starts=tuple(sent.get(device, 0) for device in range(devices)),
        places=tuple(placed.get(device, others) for device in range(devices)),
    )
