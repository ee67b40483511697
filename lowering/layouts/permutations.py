"""Pieces that devices send to each other, as few permutations of the devices.

In a permute each device sends to one, and receives from one.  Pieces are the edges of a
bipartite graph of receivers and senders, and a permute is a color of edges.  As many
colors do as one device has edges (König, 1916).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

PieceSizes: TypeAlias = Mapping[tuple[int, ...], int]
"""The size of each piece, by its receiver and its sender.

If a device has several pieces from one sender, a third number tells them apart.
"""

Sources: TypeAlias = tuple[int, ...]
"""For each device, the one that it receives from."""


def most_pieces(sizes: PieceSizes) -> int:
    """The most pieces that one device sends, or that one receives."""
    ends = (Counter(pair[side] for pair in sizes) for side in (0, 1))
    return max((n for counts in ends for n in counts.values()), default=0)


def permutations(sizes: PieceSizes, devices: int) -> list[Sources]:
    """Permutations that have each piece once; the largest pieces are in the first."""
    coloring = _Coloring(most_pieces(sizes))
    # Among equals, those with the least third number are in the same one if they can.
    for key in sorted(sizes, key=lambda key: (-sizes[key], key[2:], key)):
        coloring.add(*key[:2])
    return [_completed(color, devices) for color in coloring.senders]


class _Coloring:
    """Edges of so many colors, no two of one color at one device."""

    def __init__(self, colors: int) -> None:
        # Of each color, the sender by receiver, and the receiver by sender.
        self.senders: list[dict[int, int]] = [{} for _ in range(colors)]
        self.receivers: list[dict[int, int]] = [{} for _ in range(colors)]

    def add(self, receiver: int, sender: int) -> None:
        here = [c for c, taken in enumerate(self.senders) if receiver not in taken]
        there = [c for c, taken in enumerate(self.receivers) if sender not in taken]
        both = [c for c in here if c in there]
        if both:
            color = both[0]
        else:
            color = here[0]
            self.swap(color, there[0], sender)
        self.put(color, receiver, sender)

    def put(self, color: int, receiver: int, sender: int) -> None:
        self.senders[color][receiver] = sender
        self.receivers[color][sender] = receiver

    def swap(self, color: int, other: int, sender: int) -> None:
        """Exchange two colors along the path that begins at a sender with `color`."""
        path: list[tuple[int, int]] = []
        at, now, by = sender, color, other
        while at in self.receivers[now]:
            receiver = self.receivers[now][at]
            path.append((receiver, at))
            if receiver not in self.senders[by]:
                break
            at = self.senders[by][receiver]
            path.append((receiver, at))
        for number, (receiver, at) in enumerate(path):
            old = (color, other)[number % 2]
            del self.senders[old][receiver], self.receivers[old][at]
        for number, pair in enumerate(path):
            self.put((other, color)[number % 2], *pair)


def _completed(color: Mapping[int, int], devices: int) -> Sources:
    """A permutation; a device that needs nothing keeps its own if it can."""
    found, senders = dict(color), set(color.values())
    alone = {d for d in range(devices) if d not in found and d not in senders}
    found |= zip(alone, alone, strict=True)
    receivers = (d for d in range(devices) if d not in found)
    left = (d for d in range(devices) if d not in senders | alone)
    found |= zip([*receivers], left, strict=True)
    return tuple(found[device] for device in range(devices))
