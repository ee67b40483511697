"""How many bytes a communication moves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np

from jhost.lowering.ir.index import LoopIndex, leaves
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.ir.statements import Communicate, CommunicationKind

ScheduledKind: TypeAlias = CommunicationKind | Literal["Broadcast"]
"""What XLA may run: jhost makes no broadcast, a user's `shard_map` may."""

SHORT_TRANSFER = 1 << 20
"""Transfers of fewer bytes than this take no longer than their latency."""


def larger_side(stmt: Communicate) -> int:
    """The bytes of a gather's result, or of a sum's terms, on a device."""
    return max(bytes_of(stmt.source), bytes_of(stmt.out))


def received_bytes(kind: ScheduledKind, held: int, devices: int) -> int:
    """The bytes that each device receives, if each device holds `held` bytes.

    A ring moves (D-1)/D of the whole for a gather or a scatter and twice that for an
    all-reduce (Thakur, Rabenseifner and Gropp, 2005).
    """
    match kind:
        case "AllGather":
            return held * (devices - 1)
        case "AllReduce":
            return 2 * held * (devices - 1) // devices
        # A device does not move its own part.
        case "ReduceScatter" | "AllToAll":
            return held * (devices - 1) // devices
        case "CollectivePermute" | "SwapAxes" | "Broadcast":
            return held


def sent_to_others(
    stmt: Communicate, ranks: Ranks, loops: Mapping[str, int]
) -> Fraction:
    """The share of what a permute sends that does not stay on its device.

    Where it stands in `loops`, of so many iterations, that is the share of all.
    """
    if stmt.shift is None:
        return Fraction(1)
    devices, used = ranks.extent(stmt.axes), leaves(stmt.shift)
    over = {name: n for name, n in loops.items() if LoopIndex(name) in used}
    moved: list[bool] = []
    for numbers in itertools.product(*map(range, over.values())):
        shift = ranks.value(stmt.shift, dict(zip(over, numbers, strict=True)))
        moved += np.ravel(np.asarray(shift) % devices != 0).tolist()
    return Fraction(sum(moved), len(moved))
