"""Pieces of windows in one row, which is the same on all devices.

The devices' windows differ in where they begin, but a halo stands beside the part that
it belongs to on all of them.  So each device has the same row of pieces, and cuts its
own window out of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowOfPieces:
    """Where pieces stand in a row of `length` elements, from the first to the last.

    `starts` has the first element of each device's window.
    """

    length: int
    places: Mapping[int, int]
    starts: tuple[int, ...]


def plan_row(
    places: Sequence[Sequence[int]], lengths: Sequence[int], size: int
) -> RowOfPieces | None:
    """The row for windows of that size, if there is one of at most twice the size.

    `places` has the place of each piece in each device's window.
    """
    devices = range(len(places[0]))
    users = [
        {d for d in devices if -length < at[d] < size}
        for at, length in zip(places, lengths, strict=True)
    ]
    found: dict[int, int] = {}
    starts: dict[int, int] = {}
    left = [number for number, each in enumerate(users) if each]
    while left:
        # Next to a piece whose place is known, if there is one.
        number = next((n for n in left if users[n] & starts.keys()), left[0])
        left.remove(number)
        at = places[number]
        known = next(iter(users[number] & starts.keys()), None)
        place = found[number] = 0 if known is None else starts[known] + at[known]
        for device in users[number]:
            if starts.setdefault(device, place - at[device]) != place - at[device]:
                return None
    first, last = (m(starts.values(), default=0) for m in (min, max))
    length = last - first + size
    in_order = sorted(found, key=lambda number: found[number])
    ends = [found[number] + lengths[number] for number in in_order]
    overlaps = any(
        found[behind] < end for behind, end in zip(in_order[1:], ends[:-1], strict=True)
    )
    if overlaps or length > 2 * size:
        return None
    return RowOfPieces(
        length=length,
        places={number: found[number] - first for number in in_order},
        starts=tuple(starts.get(device, first) - first for device in devices),
    )
