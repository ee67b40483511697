"""What a Host IR program pipelines and communicates, and what it could not chunk."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jhost._text import bytes_text, counted
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, programs
from jhost.lowering.ir.index import LoopIndex, evaluate, leaves
from jhost.lowering.ir.layout import size_in_bytes
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import (
    LayoutReport,
    Note,
    StreamReport,
)
from jhost.lowering.ir.said import said, said_remarks
from jhost.lowering.ir.transfers import received_bytes
from jhost.lowering.rules.dim_rule import axes_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationReport:
    """One communication of the program.

    Attributes:
        kind: such as `"AllGather"`.
        axes: the mesh axes whose devices take part.
        value: what is communicated, as the user's lines call it.
        bytes: what each device receives in all.
        chunks: how many pieces it goes in; 1 outside a loop over chunks.
        times: how often it does in a `lax.scan`.
    """

    kind: str
    axes: tuple[str, ...]
    value: str
    bytes: int
    chunks: int
    times: int = 1

    def __str__(self) -> str:
        chunks = f" in {self.chunks} chunks" if self.chunks > 1 else ", not in a loop"
        times = f", {self.times} times" if self.times > 1 else ""
        return (
            f"{self.kind} of {self.value} over {', '.join(self.axes)}: "
            f"{bytes_text(self.bytes)} a device{chunks}{times}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer of `jhost.explain`; `str` of it reads well.

    Attributes:
        name: the function's, and what JAX derived of it.
        loops: how many loops over chunks there are.
        streams: what became of each mark, and why.
        layouts: each value that changes its layout, and what the other way would move.
        communications: all of them, with their bytes.
        notes: where streams stop, and what else there is to know.
        options: those that XLA is given for the overlap, applied, refused and missed.
        schedule: `Compiled.schedule` as text, once XLA has compiled the program.
        programs: those of a function around jhost functions; what each of them has is
            among the rows here, too.
        bodies: those of loops and branches in a program, likewise.
        calls: how often the function around it runs a program, in scans as well; the
            rows are of one run.
    """

    name: str
    loops: int
    streams: tuple[StreamReport, ...]
    layouts: tuple[LayoutReport, ...]
    communications: tuple[CommunicationReport, ...]
    notes: tuple[str, ...]
    options: tuple[str, ...] = ()
    schedule: str = ""
    programs: tuple[Explanation, ...] = ()
    bodies: tuple[Explanation, ...] = ()
    calls: int = 1

    def __str__(self) -> str:
        calls = f", run {self.calls} times" if self.calls > 1 else ""
        lines = [f"{self.name}{calls}: {counted(self.loops, 'loop')}"]
        inner = (*self.programs, *self.bodies)
        for title, field in _ROWS.items():
            inside = [row for each in inner for row in getattr(each, field)]
            if rows := _without(getattr(self, field), inside):
                lines += [f"  {title}:", *(f"    {row}" for row in rows)]
        lines += [f"  {line}" for each in inner for line in str(each).splitlines()]
        lines += [f"  {line}" for line in self.schedule.splitlines()]
        return "\n".join(lines)


_ROWS = {
    "streams": "streams",
    "layouts": "layouts",
    "communications": "communications",
    "notes": "notes",
    "XLA options": "options",
}
"""The fields of an explanation that hold rows, by what stands above them."""


def _without(rows: Sequence[Any], inside: Sequence[Any]) -> list[Any]:
    """The rows that are not among those `inside`, which may be equal to others."""
    left = Counter(inside)
    own: list[Any] = []
    for row in rows:
        if left[row]:
            left[row] -= 1
        else:
            own.append(row)
    return own


def joined(name: str, explanations: Sequence[Explanation]) -> Explanation:
    """What a function does that calls jhost functions, from that of each program."""

    def rows(field: str) -> tuple[Any, ...]:
        return tuple(row for each in explanations for row in getattr(each, field))

    return Explanation(
        name=name,
        loops=sum(each.loops for each in explanations),
        streams=rows("streams"),
        layouts=rows("layouts"),
        communications=rows("communications"),
        notes=rows("notes"),
        options=rows("options"),
        programs=tuple(explanations),
    )


def explain_program(program: Program) -> Explanation:
    """What `program` does, from its statements and from what its passes remarked."""
    return _explained(program, program.name, 1)


def _explained(program: Program, name: str, times: int) -> Explanation:
    """What a program does, or a body that is run so many `times`."""
    mesh, remarks = dict(program.mesh.shape), said_remarks(program)
    communications = tuple(
        CommunicationReport(
            kind=stmt.kind,
            axes=stmt.axes,
            value=said(holder, stmt.source.name),
            bytes=int(_received(stmt, mesh) * worth) * times,
            chunks=math.ceil(worth),
            times=times,
        )
        for holder, stmt, worth, times in _communications(
            program, program.body, Fraction(1), times
        )
    )
    return Explanation(
        name=name,
        loops=count_loops(program),
        streams=tuple(r for r in remarks if isinstance(r, StreamReport)),
        layouts=tuple(r for r in remarks if isinstance(r, LayoutReport)),
        communications=communications,
        notes=tuple(str(r) for r in remarks if isinstance(r, Note)),
        bodies=tuple(_bodies(program, times)),
    )


def _bodies(program: Program, times: int) -> Iterator[Explanation]:
    """Each body in a program that has something to say."""
    for stmt in program.body:
        if not isinstance(stmt, CONTROL_FLOW):
            continue
        length = stmt.length if isinstance(stmt, ir.Scan) else 1
        where = f" [{stmt.where}]" if stmt.where else ""
        for name, body in zip(_body_names(stmt), stmt.bodies, strict=True):
            found = _explained(body, name + where, times * length)
            if found.loops or any(getattr(found, field) for field in _ROWS.values()):
                yield found


def _body_names(stmt: ir.ControlFlow) -> Sequence[str]:
    match stmt:
        case ir.Scan(length=length):
            return [f"in a scan of {counted(length, 'iteration')}"]
        case ir.While():
            return ["in the condition of a while loop", "in a while loop"]
        case ir.Cond(branches=branches):
            count = len(branches)
            return [f"in branch {number} of {count}" for number in range(count)]


def count_loops(program: Program) -> int:
    """The loops of `program` over chunks: none, where nothing is pipelined."""
    return sum(
        isinstance(stmt, ir.For) and _works(stmt)
        for each in programs(program)
        for stmt in each.body
    )


def adds_up_in_loops(program: Program) -> bool:
    """Whether a loop adds to a sum chunk by chunk."""
    return any(
        isinstance(stmt, ir.Compute) and stmt.reducer
        for each in programs(program)
        for stmt in ir.walk(each.body)
    )


def _communications(
    program: Program, body: Sequence[ir.Stmt], repeats: Fraction, times: int
) -> Iterator[tuple[Program, ir.Communicate, Fraction, int]]:
    """Each communication in which program, how many of its first chunk, how often."""
    for stmt in body:
        match stmt:
            case ir.Communicate():
                yield program, stmt, repeats, times
            case ir.For():
                worth = repeats * _chunks_worth(stmt)
                yield from _communications(program, stmt.body, worth, times)
            case ir.If(then=then, otherwise=otherwise):
                both = (*then, *otherwise)
                yield from _communications(program, both, repeats, times)
            case ir.Scan() | ir.While() | ir.Cond():
                length = stmt.length if isinstance(stmt, ir.Scan) else 1
                for inner in stmt.bodies:
                    yield from _communications(
                        inner, inner.body, repeats, times * length
                    )
            case _:
                pass


def _chunks_worth(loop: ir.For) -> Fraction:
    """The iterations of `loop` by work: a ragged last one counts as the part it is."""
    index = LoopIndex(loop.index)
    for stmt in ir.walk(loop.body):
        chunk = getattr(stmt, "chunk", None)
        size = (
            chunk.size if chunk else stmt.size if isinstance(stmt, ir.Select) else None
        )
        if size is not None and leaves(size) <= {index}:
            sizes = [evaluate(size, {index: i}) for i in range(loop.extent)]
            return Fraction(sum(sizes), sizes[0])
    return Fraction(loop.extent)


def _received(stmt: ir.Communicate, mesh: Mapping[str, int]) -> int:
    held = size_in_bytes(stmt.source.shape, stmt.source.dtype.itemsize)
    return received_bytes(stmt.kind, held, axes_size(stmt.axes, mesh))


def _works(loop: ir.For) -> bool:
    """Whether the iterations of a loop take turns on streams, and do work there."""
    ordering = [isinstance(s, ir.SetCurrentStream | ir.Synchronize) for s in loop.body]
    inner = any(isinstance(s, ir.For) and _works(s) for s in loop.body)
    return inner or (ordering[0] and not all(ordering))
