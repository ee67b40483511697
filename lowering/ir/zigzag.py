"""Zigzag order: of 2 D equal parts of a sequence, device r has parts r and 2 D - 1 - r.

Under a causal mask all devices have equal work in this order, at every step of a ring
(as in Megatron-LM's context parallelism).  In order of position device r has parts 2 r
and 2 r + 1.  So two permutations lead from one order to the other: one of the even
parts, and one of the odd parts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jhost.lowering.ir.index import Index, minimum


def position(step: Any, size: int, devices: int) -> Any:
    """Where a step of zigzag order stands in a sequence of that size.

    A step is an integer, or an array of such.
    """
    part = size // (2 * devices)
    # A device has two parts, and the late one counts from the sequence's end.
    device, inside = step // (2 * part), step % (2 * part)
    late = inside // part
    return (device + late * (2 * devices - 1 - 2 * device)) * part + inside % part


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One permutation: each device's `half` in order of position goes to `target`.

    What comes is from `source`, and in zigzag order the half `slot`; 0 is early.
    """

    half: int
    slot: Index
    target: Index
    source: Index


def exchanges(rank: Index, devices: int) -> list[Exchange]:
    """The permutations of the even parts and of the odd ones, at the device `rank`."""
    last = 2 * devices - 1
    found: list[Exchange] = []
    for half in range(2):
        part, slot = rank * 2 + half, (rank + half) % 2
        # A part of the later half goes to the device that has its mirror image.
        target, source = minimum(part, last - part), rank + slot * (last - rank * 2)
        found.append(Exchange(half=half, slot=slot, target=target, source=source // 2))
    return found
