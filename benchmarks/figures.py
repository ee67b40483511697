"""The figures of a case, from the times of its arms.  Times are milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PEERS: Mapping[str, Sequence[str]] = {
    "async_tp": ("torch_async",),
    "torch": ("torch_nccl",),
    "xla": ("xla", "xla_windowed", "xla_windowed_multi"),
    "recipe": ("recipe",),
    "ring": ("ring", "ring_zigzag"),
    "pallas": ("pallas",),
}
"""Of several arms of one peer, its best counts."""


def ceiling(compute: float, communication: float) -> float:
    """The speedup if the shorter of the two hid behind the longer."""
    ratio = communication / compute
    return (1 + ratio) / max(1.0, ratio)


def efficiency(time: float, compute: float, communication: float) -> float:
    """How much of the shorter of the two is hidden: 1 all, 0 none, below 0 harm."""
    return (communication + compute - time) / min(communication, compute)


def figures(times: Mapping[str, float], arm: str = "jhost") -> dict[str, float]:
    """Those figures of an arm for which its rivals were measured."""
    if arm not in times:
        return {}
    time, found = times[arm], dict[str, float]()
    if "plain" in times:
        found["speedup"] = times["plain"] / time
    if "compute" in times:
        found["over_compute"] = time / times["compute"]
    if "compute" in times and "communication" in times:
        alone = times["compute"], times["communication"]
        found["to_the_limit"] = time / max(alone)
        found["efficiency"] = efficiency(time, *alone)
        found["ceiling"] = ceiling(*alone)
    for peer, arms in PEERS.items():
        best = [times[each] for each in arms if each in times]
        if best:
            found[f"versus_{peer}"] = min(best) / time
    return found


def minima(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The minimum over blocks of each arm that was timed."""
    return {name: each["min_ms"] for name, each in measured.items() if "min_ms" in each}


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
