"""Match the sends and receives of one coalesced group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jhost import errors
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.ir.statements import CommunicationKind, Recv, Send


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """What each device sends, where it arrives, and from whom each device receives.

    `sources` has the linear rank of the sender for each device in linear order.
    """

    send: Send
    recv: Recv
    sources: tuple[int, ...]


def match_transfers(
    group: Sequence[Send | Recv], ranks: Ranks, loops: Mapping[str, int]
) -> list[Transfer]:
    """Each send with the first receive left that it fits on every device.

    Raises:
        VerifyError: a send or receive that has no other side.
    """
    receives = [stmt for stmt in group if isinstance(stmt, Recv)]
    transfers: list[Transfer] = []
    for stmt in group:
        if isinstance(stmt, Send):
            transfers.append(_match(stmt, receives, ranks, loops))
            receives.remove(transfers[-1].recv)
    if receives:
        raise _unmatched(f"the receive of {receives[0].buffer.name}", "send")
    return transfers


def _match(
    send: Send, receives: Sequence[Recv], ranks: Ranks, loops: Mapping[str, int]
) -> Transfer:
    targets = _partners(send, ranks, loops)
    for recv in receives:
        sources = _partners(recv, ranks, loops)
        if (
            recv.axis == send.axis
            and (sources[targets] == np.arange(ranks.count)).all()
        ):
            return Transfer(send, recv, tuple(int(source) for source in sources))
    raise _unmatched(f"the send of {send.buffer.name}", "receive")


def _partners(stmt: Send | Recv, ranks: Ranks, loops: Mapping[str, int]) -> np.ndarray:
    peer = ranks.value(stmt.peer, loops)
    size = ranks.sizes[stmt.axis]
    if np.any(np.asarray(peer) < 0) or np.any(np.asarray(peer) >= size):
        raise errors.VerifyError(
            f"expected peers 0 to {size - 1} along {stmt.axis}, got {stmt.peer} = "
            f"{np.asarray(peer).ravel().tolist()}"
        )
    return ranks.partners(stmt.axis, peer)


def _unmatched(what: str, other: str) -> errors.VerifyError:
    return errors.VerifyError(
        f"expected a {other} for {what}, got none that fits on every device: "
        "in a group each send is some device's receive, and the other way round"
    )


def received_bytes(kind: CommunicationKind, held: int, devices: int) -> int:
    """The bytes that each device receives, of a value of which each holds `held` bytes.

    A ring moves (D-1)/D of the whole for a gather or a scatter and twice that for an
    all-reduce (Thakur, Rabenseifner and Gropp, 2005).
    """
    match kind:
        case "AllGather" | "Gather":
            return held * (devices - 1)
        case "AllReduce":
            return 2 * held * (devices - 1) // devices
        case "ReduceScatter" | "AllToAll" | "Scatter":
            return held * (devices - 1) // devices
        case "Broadcast" | "Reduce" | "CollectivePermute" | "SwapAxes":
            return held
