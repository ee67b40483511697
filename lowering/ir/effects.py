"""What a statement reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from jhost.lowering.ir.statements import (
    Allocate,
    Buffer,
    Communicate,
    Compute,
    Deallocate,
    For,
    If,
    Recv,
    Reshard,
    Select,
    Send,
    Set,
    Stmt,
)


def touched(stmt: Stmt) -> tuple[list[Buffer], list[Buffer]]:
    """The buffers that `stmt` reads, and those that it writes or makes."""
    match stmt:
        case Compute(ins=ins, outs=outs, reducer=reducer):
            return [*ins, *(outs if reducer else ())], [*outs]
        case Set() | Reshard() | Select() | Communicate():
            return [stmt.source], [stmt.out]
        case Allocate(buffer=buffer) | Recv(buffer=buffer):
            return [], [buffer]
        case Send(buffer=buffer) | Deallocate(buffer=buffer):
            return [buffer], []
        case For(body=body):
            return _touched_by_all(body)
        case If(predicate=predicate, then=then, otherwise=otherwise):
            reads, writes = _touched_by_all((*then, *otherwise))
            return [
                *([predicate] if isinstance(predicate, Buffer) else ()),
                *reads,
            ], writes
        case _:
            return [], []


def _touched_by_all(body: Sequence[Stmt]) -> tuple[list[Buffer], list[Buffer]]:
    """What a loop or branch touches outside: writing an alias writes its source."""
    sources: dict[str, Buffer] = {}
    reads: list[Buffer] = []
    writes: list[Buffer] = []
    for stmt in body:
        if isinstance(stmt, Select):
            source = sources.get(stmt.source.name, stmt.source)
            sources[stmt.out.name] = source
            continue
        inner_reads, inner_writes = touched(stmt)
        reads += [sources.get(buffer.name, buffer) for buffer in inner_reads]
        writes += [sources.get(buffer.name, buffer) for buffer in inner_writes]
    return reads, writes


def written(stmt: Stmt) -> list[Buffer]:
    """The buffers that a statement, not counting those it holds, makes or writes."""
    return [] if isinstance(stmt, For | If) else touched(stmt)[1]
