"""Stretches of arrays that devices send to each other, a permute for each round."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.layouts.permutations import Sources, permutations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NeededStretch:
    """Elements of an array that a device needs and another one has.

    `place` is where they begin in the device's window.
    """

    device: int
    sender: int
    array: int
    elements: range
    place: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """The receiver, the sender, and which of its pieces."""
        return self.device, self.sender, self.place, self.array


PermuteRound: TypeAlias = tuple[Sources, Mapping[int, NeededStretch]]
"""A permutation of the devices, and what each device receives in it."""


def rounds_of(stretches: Sequence[NeededStretch], devices: int) -> list[PermuteRound]:
    """Permutations that move all stretches once."""
    left: dict[tuple[int, int], list[NeededStretch]] = {}
    # The largest of a pair is in the first permutation that has the pair.
    for each in sorted(stretches, key=lambda each: (len(each.elements), -each.place)):
        left.setdefault((each.device, each.sender), []).append(each)
    sizes = {each.key: len(each.elements) for each in stretches}
    made: list[PermuteRound] = []
    for sources in permutations(sizes, devices):
        pairs = [pair for pair in enumerate(sources) if left.get(pair)]
        if pairs:
            made.append((sources, {pair[0]: left[pair].pop() for pair in pairs}))
    return made


def received_in(rounds: Sequence[PermuteRound]) -> int:
    """How many elements a device receives."""
    pieces = ([len(each.elements) for each in found.values()] for _, found in rounds)
    return sum(map(max, pieces))
