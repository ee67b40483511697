"""What a Host IR program pipelines and communicates, and what it could not chunk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from jhost._text import bytes_text
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import all_remarks, programs
from jhost.lowering.ir.index import LoopIndex, evaluate, leaves
from jhost.lowering.ir.layout import size_in_bytes
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import (
    LayoutReport,
    Note,
    StreamReport,
)
from jhost.lowering.ir.transfers import received_bytes
from jhost.lowering.rules.dim_rule import axes_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationReport:
    """One communication of the program; `bytes` is what each device receives in all.

    `chunks` is how many pieces it goes in (1 outside a loop over chunks), and `times`
    how often it does in a `lax.scan`.
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
            bytes=int(_received(stmt, mesh) * worth) * times,
            chunks=math.ceil(worth),
            times=times,
        )
        for stmt, worth, times in _communications(program.body, Fraction(1), 1)
    )
    return Explanation(
        name=program.name,
        loops=count_loops(program),
        streams=tuple(r for r in all_remarks(program) if isinstance(r, StreamReport)),
        layouts=tuple(r for r in all_remarks(program) if isinstance(r, LayoutReport)),
        communications=communications,
        notes=tuple(str(r) for r in all_remarks(program) if isinstance(r, Note)),
    )


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
    body: Sequence[ir.Stmt], repeats: Fraction, times: int
) -> Iterator[tuple[ir.Communicate, Fraction, int]]:
    """Each communication, how many of its first chunk it moves, and how often."""
    for stmt in body:
        match stmt:
            case ir.Communicate():
                yield stmt, repeats, times
            case ir.For():
                worth = repeats * _chunks_worth(stmt)
                yield from _communications(stmt.body, worth, times)
            case ir.If(then=then, otherwise=otherwise):
                yield from _communications((*then, *otherwise), repeats, times)
            case ir.Scan() | ir.While() | ir.Cond():
                length = stmt.length if isinstance(stmt, ir.Scan) else 1
                for inner in stmt.bodies:
                    yield from _communications(inner.body, repeats, times * length)
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
