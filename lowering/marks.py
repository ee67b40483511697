"""What two `jhost.stream` marks ask for together."""

from __future__ import annotations

import dataclasses
from typing import Any

from jhost.lowering.ir import StreamMark


def merge_marks(one: StreamMark, other: StreamMark) -> StreamMark | None:
    """What two marks ask for together, or None where they contradict each other."""
    merged: dict[str, Any] = {}
    for field in ("chunks", "pipeline"):
        asked = {getattr(one, field), getattr(other, field)} - {None}
        if len(asked) > 1:
            return None
        merged[field] = asked.pop() if asked else None
    where = one.where if one.where == other.where else f"{one.where}, {other.where}"
    return dataclasses.replace(one, where=where, **merged)
