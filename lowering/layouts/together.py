"""The pieces of one array that devices exchange for several windows of it.

Where an array is split, a device needs a piece for each part of it, and no two devices
need the same.  So one permute may bring a device a piece for one window, and another
device a piece for another window.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from jhost.lowering.layouts.halo import Halo, HaloPiece, elements_by_part, plan_halo
from jhost.lowering.layouts.stretches import NeededStretch, PermuteRound, rounds_of
from jhost.lowering.rules.reads import WindowReads


@functools.lru_cache(maxsize=1024)
def plan_together(
    reads: tuple[WindowReads, ...], counts: tuple[int, ...], part: int, devices: int
) -> tuple[Halo, ...]:
    """The pieces of each window, of so many steps: those that move least."""
    alone = [
        plan_halo(*each, part, devices) for each in zip(reads, counts, strict=True)
    ]
    if len(reads) == 1 or not part:
        return tuple(alone)
    together = _WindowsTogether(reads, counts, part, devices).halos()
    return tuple(min(alone, together, key=_moved))


def _moved(halos: Sequence[Halo]) -> int:
    """How many elements a device receives, if no piece is sent twice."""
    pieces = (p for halo in halos for p in halo.pieces if not p.stays)
    return sum(size for _, size, *_ in {piece.sent for piece in pieces})


class _WindowsTogether:
    def __init__(
        self,
        reads: tuple[WindowReads, ...],
        counts: tuple[int, ...],
        part: int,
        devices: int,
    ) -> None:
        self.reads, self.counts = reads, counts
        self.part, self.devices = part, devices

    def halos(self) -> list[Halo]:
        stretches = [*self.stretches()]
        # What several windows need of one device is sent once: its window is a first.
        first = {(s.device, s.sender, s.elements): s for s in reversed(stretches)}
        moved = [s for s in first.values() if s.device != s.sender]
        rounds = rounds_of(moved, self.devices)
        halos: list[Halo] = []
        for window in range(len(self.reads)):
            needed = {
                (s.device, s.sender, s.elements) for s in stretches if s.array == window
            }
            pieces = [self.own(window, needed)]
            pieces += [self.moved(window, needed, each) for each in rounds]
            used = tuple(piece for piece in pieces if piece is not None)
            size = self.reads[window].window(self.counts[window])
            halos.append(Halo(window=size, pieces=used))
        return halos

    def stretches(self) -> Iterator[NeededStretch]:
        """What each device needs of each device, by window."""
        for window, (reads, count) in enumerate(
            zip(self.reads, self.counts, strict=True)
        ):
            for device in range(self.devices):
                needed = reads.needed(device * count, count)
                for sender, elements in elements_by_part(needed, self.part):
                    yield NeededStretch(
                        device=device,
                        sender=sender,
                        array=window,
                        elements=elements,
                        place=window,
                    )

    def place(self, window: int, device: int, element: int) -> int:
        """The place of an element in a device's window."""
        count = self.counts[window]
        return element - self.reads[window].start(device * count, count)

    def own(self, window: int, needed: set[tuple[int, int, range]]) -> HaloPiece | None:
        """What devices keep: their parts, and windows take from them."""
        keep = {device for device, sender, _ in needed if device == sender}
        if not keep:
            return None
        every = range(self.devices)
        return HaloPiece(
            sources=tuple(every),
            size=self.part,
            starts=(0,) * self.devices,
            places=tuple(
                self.place(window, n, n * self.part)
                if n in keep
                else self.behind(window)
                for n in every
            ),
        )

    def moved(
        self, window: int, needed: set[tuple[int, int, range]], received: PermuteRound
    ) -> HaloPiece | None:
        """What devices receive in a round, if some put it into this window."""
        sources, found = received
        size = max(len(each.elements) for each in found.values())
        starts, places = [0] * self.devices, [self.behind(window)] * self.devices
        used = False
        for device, each in found.items():
            first = each.elements.start - each.sender * self.part
            starts[each.sender] = start = min(first, self.part - size)
            if (device, each.sender, each.elements) in needed:
                used = True
                element = each.sender * self.part + start
                places[device] = self.place(window, device, element)
        if not used:
            return None
        return HaloPiece(
            sources=sources, size=size, starts=tuple(starts), places=tuple(places)
        )

    def behind(self, window: int) -> int:
        """The place behind a window, where a device puts what it does not need."""
        return self.reads[window].window(self.counts[window])
