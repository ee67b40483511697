"""The pieces of several arrays that devices exchange to join them along a dim.

Each place of a device's window takes one element of one array.  So one permute may
bring a device a piece of one array, and another device a piece of another: together
the permutes bring each device about as much as its window has.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.halo import Halo, HaloPiece, elements_by_part
from jhost.lowering.layouts.permutations import Sources
from jhost.lowering.layouts.stretches import NeededStretch, received_in, rounds_of
from jhost.lowering.rules.reads import WindowReads


def planned_join(
    op: Operation, assignment: Assignment, sizes: Sequence[int], mesh: Mapping[str, int]
) -> Halo:
    """The pieces for the result of an operation, from operands of such sizes."""
    assert op.joined is not None
    windowed = {window.operand for window in op.windows}
    numbers, reads = zip(*op.joined.reads, strict=True)
    parts = tuple(sizes[n] if n in windowed else None for n in numbers)
    factor = op.joined.factor
    devices = axes_size(assignment[factor], mesh)
    count = op.sizes[factor] // devices
    return plan_join(reads, parts, count, devices)


@functools.lru_cache(maxsize=1024)
def plan_join(
    reads: tuple[WindowReads, ...],
    parts: tuple[int | None, ...],
    count: int,
    devices: int,
) -> Halo:
    """How each device gets its `count` places of arrays joined along a dim.

    Devices have parts of such sizes of the arrays, or (None) all of them.  Each step
    reads one element of one array.
    """
    return _Join(reads, parts, count, devices).halo()


class _Join:
    def __init__(
        self,
        reads: tuple[WindowReads, ...],
        parts: tuple[int | None, ...],
        count: int,
        devices: int,
    ) -> None:
        self.reads, self.parts = reads, parts
        self.count, self.devices = count, devices

    def halo(self) -> Halo:
        stretches = [*self.stretches()]
        own = [each for each in stretches if each.device == each.sender]
        others = [each for each in stretches if each.device != each.sender]
        rounds, every = (
            rounds_of(others, self.devices),
            rounds_of(stretches, self.devices),
        )
        # A device may send a piece to itself: that is one piece less in each window.
        if received_in(every) <= received_in(rounds):
            own, rounds = [], every
        pieces = [
            *(
                self.whole(array)
                for array, part in enumerate(self.parts)
                if part is None and self.reads[array].size
            ),
            *map(self.kept, _kept_together(own)),
            *(self.moved(sources, found) for sources, found in rounds),
        ]
        return Halo(window=self.count, pieces=tuple(pieces))

    def stretches(self) -> Iterator[NeededStretch]:
        """What devices need of arrays that they have parts of."""
        for device in range(self.devices):
            for array, (reads, part) in enumerate(
                zip(self.reads, self.parts, strict=True)
            ):
                if not part:
                    continue
                needed = reads.needed(device * self.count, self.count)
                for sender, elements in elements_by_part(needed, part):
                    yield NeededStretch(
                        device=device,
                        sender=sender,
                        array=array,
                        elements=elements,
                        place=self.place(device, array, elements.start),
                    )

    def place(self, device: int, array: int, element: int) -> int:
        """The place of an array's element in a device's window."""
        return element - self.reads[array].start(device * self.count, self.count)

    def whole(self, array: int) -> HaloPiece:
        """The piece of an array that all devices have: as much as a window takes."""
        every, left = range(self.devices), self.reads[array].size
        size = min(left, self.count)
        starts = [
            min(max(-self.place(device, array, 0), 0), left - size) for device in every
        ]
        return HaloPiece(
            sources=tuple(every),
            size=size,
            starts=tuple(starts),
            places=tuple(map(self.place, every, [array] * self.devices, starts)),
            arrays=(array,) * self.devices,
        )

    def kept(self, own: Sequence[NeededStretch]) -> HaloPiece:
        """A piece of one array that each device has itself."""
        (array,) = {each.array for each in own}
        size = self.parts[array]
        # It is not cut out first: what reads it may cut it as it reads.
        starts = {each.device: 0 for each in own}
        found = {each.device: each for each in own}
        return self.piece(tuple(range(self.devices)), found, starts, size or 0)

    def moved(self, sources: Sources, found: Mapping[int, NeededStretch]) -> HaloPiece:
        """The piece of one permute, of whatever array each device is sent."""
        size = max(len(each.elements) for each in found.values())
        starts: dict[int, int] = {}
        for device, each in found.items():
            part = self.parts[each.array] or 0
            first = each.elements.start - each.sender * part
            starts[device] = min(first, max(part - size, 0))
        return self.piece(sources, found, starts, size)

    def piece(
        self,
        sources: Sources,
        found: Mapping[int, NeededStretch],
        starts: Mapping[int, int],
        size: int,
    ) -> HaloPiece:
        """A piece; `found` and `starts` are by receiver."""
        places, lengths = [self.count] * self.devices, [0] * self.devices
        sent = {each.sender: (each.array, starts[n]) for n, each in found.items()}
        for device, each in found.items():
            part = self.parts[each.array] or 0
            first = each.sender * part + starts[device]
            places[device] = self.place(device, each.array, first)
            left = min(part - starts[device], self.reads[each.array].size - first)
            lengths[device] = min(size, left)
        # A device that sends nothing takes the array that others take.
        other = next(iter(sent.values()))
        arrays, from_ = zip(
            *(sent.get(n, other) for n in range(self.devices)), strict=True
        )
        full = all(lengths[device] == size for device in found)
        return HaloPiece(
            sources=sources,
            size=size,
            starts=tuple(from_),
            places=tuple(places),
            arrays=tuple(arrays),
            lengths=() if full else tuple(lengths),
        )


def _kept_together(own: Sequence[NeededStretch]) -> list[list[NeededStretch]]:
    """What devices keep: of each array at most one stretch a device in a group."""
    groups: dict[tuple[int, int], list[NeededStretch]] = {}
    seen = Counter[tuple[int, int]]()
    for each in own:
        number = seen[each.device, each.array]
        seen[each.device, each.array] += 1
        groups.setdefault((each.array, number), []).append(each)
    return [*groups.values()]
