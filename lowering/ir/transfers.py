"""How many bytes a communication moves."""

from __future__ import annotations

from typing import Literal, TypeAlias

from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.statements import Communicate, CommunicationKind

ScheduledKind: TypeAlias = CommunicationKind | Literal["Broadcast"]
"""What XLA may run: jhost makes no broadcast, a user's `shard_map` may."""


def larger_side(stmt: Communicate) -> int:
    """The bytes of a gather's result, or of a sum's terms, on a device."""
    return max(bytes_of(stmt.source), bytes_of(stmt.out))


def received_bytes(kind: ScheduledKind, held: int, devices: int) -> int:
    """The bytes that each device receives, of a value of which each holds `held` bytes.

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
