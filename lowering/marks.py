"""What `jhost.stream` marks ask for, with the function's settings and together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from jhost import errors
from jhost.lowering.ir import Compute, Mark, Program, StreamMark

REFUSALS = (errors.StreamDimError, errors.ChunksError, errors.PipelineError)
"""What says that a mark cannot be followed."""


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


# --- Those that leave something open ----------------------------------------------- #


def open_marks(program: Program) -> dict[int, StreamMark]:
    """The stream marks that leave something open, by their number among all."""
    return {
        number: mark
        for number, mark in enumerate(program.marks)
        if isinstance(mark, StreamMark) and not _is_settled(mark)
    }


def marks_alike(program: Program) -> list[tuple[int, ...]]:
    """The open marks by number; those of equal values made on one line go together.

    So the layers of a model, written one after another by a loop, have one choice.
    """
    makers = {
        buffer.name: stmt
        for stmt in program.body
        if isinstance(stmt, Compute)
        for buffer in stmt.outs
    }
    groups: dict[Any, list[int]] = {}
    for number, mark in open_marks(program).items():
        maker = makers.get(mark.buffer)
        made = maker and (
            maker.unit.eqns[0].eqn.primitive.name,
            *(buffer.shape for buffer in (*maker.ins, *maker.outs)),
        )
        key = (mark.where, mark.dim, mark.pipeline, mark.chunks, made)
        groups.setdefault(key, []).append(number)
    return [tuple(numbers) for numbers in groups.values()]


def settle(marks: list[Mark], numbers: Sequence[int], choice: StreamMark) -> None:
    """Put what was chosen for one mark in the place of those alike."""
    for number in numbers:
        marks[number] = dataclasses.replace(choice, buffer=marks[number].buffer)


def _is_settled(mark: StreamMark) -> bool:
    known = mark.pipeline is not None and mark.chunks is not None
    return known or mark.pipeline == "off"
