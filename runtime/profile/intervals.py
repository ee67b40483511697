"""Arithmetic of time intervals: unions, differences and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Interval: TypeAlias = tuple[float, float]
"""From a start to an end, in seconds."""

Cover: TypeAlias = tuple[Interval, ...]
"""Intervals in order, none empty, with a gap between each and the next."""


def union(intervals: Iterable[Interval]) -> Cover:
    """The time that at least one interval covers."""
    cover: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        # Intervals that only touch are one as well: a gap of nothing is no gap.
        if cover and start <= cover[-1][1]:
            cover[-1] = (cover[-1][0], max(end, cover[-1][1]))
        else:
            cover.append((start, end))
    return tuple(cover)


def subtract(cover: Cover, taken: Cover) -> Cover:
    """The time in `cover` that is not in `taken`."""
    left: list[Interval] = []
    for start, end in cover:
        for first, last in taken:
            if last <= start or end <= first:
                continue
            if start < first:
                left.append((start, first))
            # Later intervals may cut the rest of it again.
            start = min(last, end)
        if start < end:
            left.append((start, end))
    return tuple(left)


def length(cover: Sequence[Interval]) -> float:
    """The seconds of all intervals, without the gaps."""
    return sum(end - start for start, end in cover)
