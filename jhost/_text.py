"""Quantities, and what changed, as one would say them."""

from __future__ import annotations

import dataclasses
from typing import Any


def seconds_text(seconds: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def bytes_text(count: int) -> str:
    """`count` bytes as one would say it."""
    # Powers of ten, in which makers of devices give bandwidths.
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def counted(count: object, noun: str) -> str:
    """`1 step`, `2 steps`."""
    # As text: a count may be a `Fraction`, which prints as an int does.
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"


def flops_text(count: int) -> str:
    """`count` operations as one would say them."""
    for unit, size in (("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} FLOP"


def changes(was: Any, now: Any) -> list[str]:
    """Each field of a dataclass that is different now, as `jax: 0.11 -> 0.12`."""
    names = [field.name for field in dataclasses.fields(was)]
    pairs = [(name, getattr(was, name), getattr(now, name)) for name in names]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]
