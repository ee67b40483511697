"""How much of a device's time no computation runs in, by PyTorch's profiler."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

CALLS = 3

Span = tuple[str, float, float]
"""What ran on the device: its name, start and end."""

# Collectives, copies between devices, and the barriers of symmetric memory.
_COMMUNICATION = ("nccl", "memcpy", "memset", "barrier", "signal")


def without_computation(call: Callable[[int], Any]) -> float | None:
    """The share of a few calls in a row; None where the profiler saw nothing."""
    torch: Any = importlib.import_module("torch")
    profiler: Any = importlib.import_module("torch.profiler")
    kinds = [profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=kinds) as found:
        for number in range(CALLS):
            call(number)
        torch.cuda.synchronize()
    return share(
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        if not getattr(event, "is_user_annotation", False)
    )


def share(spans: Iterable[Span]) -> float | None:
    """The part of the time from first to last in which no computation runs."""
    ran = sorted((start, end, name) for name, start, end in spans)
    if not ran:
        return None
    total = max(end for _, end, _ in ran) - ran[0][0]
    computing, until = 0.0, ran[0][0]
    for start, end, name in ran:
        if not any(word in name.lower() for word in _COMMUNICATION):
            computing += max(0.0, end - max(start, until))
            until = max(until, end)
    return 1 - computing / total
