"""What `jhost.stream` marks ask for, with the function's settings and together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from jhost.lowering.ir import Program, StreamMark


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What was measured to be best for a mark; None in both: no pipeline."""

    pipeline: str | None = None
    chunks: int | None = None
    streams: int | None = None
    why: str = ""
    measured: tuple[tuple[str, float], ...] = ()

    def settle(self, mark: StreamMark) -> StreamMark:
        """`mark` asking for that, as if by name: it stands where it was measured."""
        return dataclasses.replace(mark, **_fields(self), by_name=True)


Tunings: TypeAlias = Mapping[str, Mapping[int, Tuned]]
"""By fingerprint of a program and number of a mark among all of the program's."""


def _fields(tuned: Tuned) -> dict[str, Any]:
    return {f.name: getattr(tuned, f.name) for f in dataclasses.fields(tuned)}


def resolved_mark(
    mark: StreamMark, chunks: int | Literal["auto"], pipeline: str
) -> StreamMark:
    """`mark`, with the function's settings where it has none; None is "auto"."""
    count = chunks if mark.chunks is None else mark.chunks
    kind = pipeline if mark.pipeline is None else mark.pipeline
    return dataclasses.replace(
        mark,
        chunks=None if count == "auto" else count,
        pipeline=None if kind == "auto" else kind,
    )


def resolved_marks(
    program: Program, chunks: int | Literal["auto"], pipeline: str
) -> list[StreamMark]:
    """The stream marks of `program`, with the function's settings."""
    marks = [mark for mark in program.marks if isinstance(mark, StreamMark)]
    return [resolved_mark(mark, chunks, pipeline) for mark in marks]


def merge_marks(one: StreamMark, other: StreamMark) -> StreamMark | None:
    """What two marks ask for together, or None where they contradict each other."""
    merged: dict[str, Any] = {}
    for field in ("chunks", "pipeline"):
        asked = {getattr(one, field), getattr(other, field)} - {None}
        if len(asked) > 1:
            return None
        merged[field] = asked.pop() if asked else None
    where = one.where if one.where == other.where else f"{one.where}, {other.where}"
    # The reason for a choice goes with what was chosen.
    says = next((m for m in (one, other) if m.chunks or m.pipeline), one)
    return dataclasses.replace(
        says, buffer=one.buffer, dim=one.dim, where=where, **merged
    )
