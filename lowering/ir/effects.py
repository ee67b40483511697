"""What a statement reads and writes, and which memory that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.accumulate import accumulators

if TYPE_CHECKING:
    from jhost.lowering.ir.program import Program


def reads_writes(stmt: ir.Stmt) -> tuple[list[ir.Buffer], list[ir.Buffer]]:
    """The buffers that `stmt` reads, and those that it writes or makes."""
    if isinstance(stmt, ir.Compute):  # most statements are, and passes ask often
        outs = stmt.outs
        # Adding to a sum reads it: such a statement must follow all earlier writes.
        added = [outs[number] for number in accumulators(stmt)] if stmt.reducer else []
        return [*stmt.ins, *added], [*outs]
    match stmt:
        case ir.Scan() | ir.While() | ir.Cond():
            return [*stmt.ins], [*stmt.outs]
        # A `Select` moves nothing, but it must stay behind its source and before its
        # readers.
        case ir.Set() | ir.Reshard() | ir.Select() | ir.Communicate():
            return [stmt.source], [stmt.out]
        case ir.Neighbours(sources=sources, out=out):
            return [*sources], [out]
        case ir.Allocate(buffer=buffer):
            return [], [buffer]
        case ir.Deallocate(buffer=buffer):
            return [buffer], []
        case ir.For(body=body):
            return _reads_writes_of_body(body)
        case _:
            return [], []


def _reads_writes_of_body(
    body: Sequence[ir.Stmt],
) -> tuple[list[ir.Buffer], list[ir.Buffer]]:
    """What a loop touches outside: writing an alias writes its source."""
    aliases = Aliases(body)
    reads: list[ir.Buffer] = []
    writes: list[ir.Buffer] = []
    for stmt in body:
        if not isinstance(stmt, ir.Select):
            inner_reads, inner_writes = reads_writes(stmt)
            # What the body makes for itself is among them; outside nobody has its
            # names.
            reads += map(aliases.memory, inner_reads)
            writes += map(aliases.memory, inner_writes)
    return reads, writes


def read_and_made(
    body: Sequence[ir.Stmt],
) -> tuple[dict[str, ir.Buffer], dict[str, ir.Buffer]]:
    """The buffers that statements read from others, and those they make, in order."""
    read: dict[str, ir.Buffer] = {}
    made: dict[str, ir.Buffer] = {}
    for stmt in body:
        reads, writes = reads_writes(stmt)
        read |= {b.name: b for b in reads if b.name not in made}
        made |= {b.name: b for b in writes}
    return read, made


def written(stmt: ir.Stmt) -> list[ir.Buffer]:
    """The buffers that a statement, not counting those it holds, makes or writes."""
    return [] if isinstance(stmt, ir.For) else reads_writes(stmt)[1]


def read_whole(program: Program) -> frozenset[str]:
    """The buffers that something reads by their own names, not by an alias."""
    names = {buffer.name for buffer in program.results}
    for stmt in ir.walk(program.body):
        # A loop's statements come by themselves, and naming a part reads nothing.
        if not isinstance(stmt, ir.Select | ir.Deallocate | ir.For):
            names |= {buffer.name for buffer in reads_writes(stmt)[0]}
    return frozenset(names)


class Aliases:
    """The aliases that some statements make, and what they are parts of."""

    def __init__(self, body: Iterable[ir.Stmt]) -> None:
        # Those in loops too: an iteration's aliases are of memory outside.
        selects = ir.every(ir.Select, ir.walk(tuple(body)))
        self.selects = {stmt.out.name: stmt for stmt in selects}

    def through(self, name: str) -> Iterator[ir.Select]:
        """The `Select`s by which a name reaches memory, its own first."""
        while (select := self.selects.get(name)) is not None:
            yield select
            name = select.source.name

    def memory(self, buffer: ir.Buffer) -> ir.Buffer:
        """The buffer that `buffer` is a part of, which may be itself."""
        # Not by `through`: this is asked for every operand.
        while (select := self.selects.get(buffer.name)) is not None:
            buffer = select.source
        return buffer

    def memories(self, buffers: Iterable[ir.Buffer]) -> set[str]:
        """The names of the buffers that some are parts of."""
        if not self.selects:  # as outside of loops, mostly
            return {buffer.name for buffer in buffers}
        return {self.memory(buffer).name for buffer in buffers}
