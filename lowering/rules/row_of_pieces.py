"""Pieces of windows in one row, which is the same on all devices.

The devices' windows differ in where they begin, but a halo stands beside the part that
it belongs to on all of them.  So each device has the same row of pieces, and cuts its
own window out of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowOfPieces:
    """Where pieces stand in a row of `length` elements.

    `places` has pairs of a piece and its place, from the first to the last.  A piece
    may stand on either side of another one, for different devices.  `starts` has the
    first element of each device's window.
    """

    length: int
    places: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]


def plan_row(
    places: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> RowOfPieces | None:
    """The row for windows of that size, if there is one of at most twice the size.

    `places` has the place of each piece in each device's window.
    """
    starts: dict[int, int] = {}
    found: set[tuple[int, int]] = set()
    for number, users in _neighbours_first(places, lengths, size):
        at = places[number]
        known = [device for device in users if device in starts]
        here = {starts[device] + at[device] for device in known} or {0}
        found |= {(number, place) for place in here}
        for device in users:
            starts.setdefault(device, min(here) - at[device])
    first, last = (m(starts.values(), default=0) for m in (min, max))
    length = last - first + size
    in_order = sorted(found, key=lambda each: each[1])
    written = sum(lengths[number] for number, _ in found)
    again = written - sum(lengths[number] for number in {n for n, _ in found})
    # A large piece on both sides of another one is better selected than written twice.
    if length > 2 * size or 4 * again > size or _overlap(in_order, lengths):
        return None
    return RowOfPieces(
        length=length,
        places=tuple((number, place - first) for number, place in in_order),
        starts=tuple(
            starts.get(device, first) - first for device in range(len(places[0]))
        ),
    )


def _neighbours_first(
    places: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> Iterator[tuple[int, frozenset[int]]]:
    """Pieces and the devices that use them: if possible, next to one that came before.

    The longest comes first, because it is what most devices have.
    """
    left = {
        number: users
        for number, (at, length) in enumerate(zip(places, lengths, strict=True))
        if (users := frozenset(d for d, n in enumerate(at) if -length < n < size))
    }
    placed: set[int] = set()
    while left:
        beside = [number for number in left if left[number] & placed]
        number = max(beside or left, key=lambda number: lengths[number])
        yield number, left[number]
        placed |= left.pop(number)


def _overlap(in_order: Sequence[tuple[int, int]], lengths: Sequence[int]) -> bool:
    """Whether a piece of a row begins before the one ahead of it ends."""
    pairs = zip(in_order[1:], in_order[:-1], strict=True)
    return any(
        place < before + lengths[number] for (_, place), (number, before) in pairs
    )
