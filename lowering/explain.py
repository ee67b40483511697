"""What a Host IR program pipelines and communicates, and what it could not chunk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jhost.lowering.index import LoopIndex, evaluate, leaves
from jhost.lowering.ir import (
    Communicate,
    Compute,
    For,
    If,
    Program,
    Remark,
    Select,
    SetCurrentStream,
    Stmt,
    Synchronize,
    walk,
)
from jhost.lowering.layout import size_in_bytes
from jhost.lowering.layout_costs import bytes_text
from jhost.lowering.reshard import received_bytes
from jhost.lowering.rules import axes_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """One stream: what was asked for, what was chosen, and why.

    `chunks` is 1 and `pipeline` "off" where it was not pipelined; `extent` is the
    number of steps that could be cut.  `predicted` has the seconds that the program
    would take with each choice that was weighed, the best first; of a stream that
    follows a `jhost.Tuning`, `measured` has those that it took, the chosen one first.
    """

    stream: str
    axis: int
    pipeline: str
    chunks: int
    extent: int
    reason: str
    where: str
    predicted: tuple[tuple[str, float], ...] = ()
    measured: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        how = f"{self.pipeline} pipeline" if self.chunks > 1 else "not pipelined"
        return f"{self.stream} on axis {self.axis}: {how}: {self.reason} [{self.where}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """A value that changes its layout, and why it had to or was chosen to.

    `bytes` is what each device receives; a later pass may find a cheaper way.
    """

    value: str
    before: str
    after: str
    bytes: int
    reason: str
    text: str
    where: str

    def __str__(self) -> str:
        return self.text + (f" [{self.where}]" if self.where else "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationReport:
    """One communication of the program; `bytes` is what each device receives in all.

    `chunks` is how many pieces it goes in (1 outside a loop).
    """

    kind: str
    axes: tuple[str, ...]
    value: str
    bytes: int
    chunks: int

    def __str__(self) -> str:
        times = f" in {self.chunks} chunks" if self.chunks > 1 else ", not in a loop"
        return (
            f"{self.kind} of {self.value} over {', '.join(self.axes)}: "
            f"{bytes_text(self.bytes)} a device{times}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer of `jhost.explain`; `str` of it reads well.

    `options` are those that XLA is given for the overlap, applied, refused and missed;
    `schedule` is there once XLA has compiled the program: `Compiled.schedule` as text.
    """

    name: str
    loops: int
    streams: tuple[StreamReport, ...]
    layouts: tuple[LayoutReport, ...]
    communications: tuple[CommunicationReport, ...]
    notes: tuple[str, ...]
    options: tuple[str, ...] = ()
    schedule: str = ""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.loops} loop{'' if self.loops == 1 else 's'}"]
        for title, rows in (
            ("streams", self.streams),
            ("layouts", self.layouts),
            ("communications", self.communications),
            ("notes", self.notes),
            ("XLA options", self.options),
        ):
            if rows:
                lines += [f"  {title}:", *(f"    {row}" for row in rows)]
        lines += [f"  {line}" for line in self.schedule.splitlines()]
        return "\n".join(lines)


def explain_program(program: Program) -> Explanation:
    """What `program` does, from its statements and from what its passes remarked."""
    mesh = dict(program.mesh.shape)
    communications = tuple(
        CommunicationReport(
            kind=stmt.kind,
            axes=stmt.axes,
            value=stmt.source.name,
            bytes=int(_received(stmt, mesh) * worth),
            chunks=math.ceil(worth),
        )
        for stmt, worth in _communications(program.body, Fraction(1))
    )
    return Explanation(
        name=program.name,
        loops=count_loops(program),
        streams=tuple(
            StreamReport(where=remark.where, **_facts(remark))
            for remark in program.remarks
            if remark.kind == "stream"
        ),
        layouts=tuple(
            LayoutReport(text=remark.text, where=remark.where, **_facts(remark))
            for remark in program.remarks
            if remark.kind == "layout"
        ),
        communications=communications,
        notes=tuple(
            remark.text + (f" [{remark.where}]" if remark.where else "")
            for remark in program.remarks
            if remark.kind not in ("stream", "layout")
        ),
    )


def count_loops(program: Program) -> int:
    """The loops of `program` over chunks: none, where nothing is pipelined."""
    return sum(isinstance(s, For) and _works(s) for s in program.body)


def adds_up_in_loops(program: Program) -> bool:
    """Whether a loop adds to a sum chunk by chunk."""
    return any(isinstance(s, Compute) and s.reducer for s in walk(program.body))


def _communications(
    body: Sequence[Stmt], repeats: Fraction
) -> Iterator[tuple[Communicate, Fraction]]:
    """Each communication, and how many of its first chunk it moves altogether."""
    for stmt in body:
        match stmt:
            case Communicate():
                yield stmt, repeats
            case For():
                yield from _communications(stmt.body, repeats * _chunks_worth(stmt))
            case If(then=then, otherwise=otherwise):
                yield from _communications((*then, *otherwise), repeats)
            case _:
                pass


def _chunks_worth(loop: For) -> Fraction:
    """The iterations of `loop` by work: a ragged last one counts as the part it is."""
    index = LoopIndex(loop.index)
    for stmt in walk(loop.body):
        chunk = getattr(stmt, "chunk", None)
        size = chunk.size if chunk else stmt.size if isinstance(stmt, Select) else None
        if size is not None and leaves(size) <= {index}:
            sizes = [evaluate(size, {index: i}) for i in range(loop.extent)]
            return Fraction(sum(sizes), sizes[0])
    return Fraction(loop.extent)


def _received(stmt: Communicate, mesh: Mapping[str, int]) -> int:
    held = size_in_bytes(stmt.source.shape, stmt.source.dtype.itemsize)
    return received_bytes(stmt.kind, held, axes_size(stmt.axes, mesh))


def _facts(remark: Remark) -> dict[str, Any]:
    return dict(remark.facts)


def _works(loop: For) -> bool:
    """Whether the iterations of a loop take turns on streams, and do work there."""
    ordering = [isinstance(s, SetCurrentStream | Synchronize) for s in loop.body]
    inner = any(isinstance(s, For) and _works(s) for s in loop.body)
    return inner or (ordering[0] and not all(ordering))
