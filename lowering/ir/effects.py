"""What a statement reads and writes, and which memory that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
    walk,
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
    aliases = Aliases(body)
    reads: list[Buffer] = []
    writes: list[Buffer] = []
    for stmt in body:
        if not isinstance(stmt, Select):
            inner_reads, inner_writes = touched(stmt)
            reads += map(aliases.memory, inner_reads)
            writes += map(aliases.memory, inner_writes)
    return reads, writes


def written(stmt: Stmt) -> list[Buffer]:
    """The buffers that a statement, not counting those it holds, makes or writes."""
    return [] if isinstance(stmt, For | If) else touched(stmt)[1]


class Aliases:
    """The aliases that some statements make, and what they are parts of."""

    def __init__(self, body: Iterable[Stmt]) -> None:
        selects = (stmt for stmt in walk(tuple(body)) if isinstance(stmt, Select))
        self.selects = {select.out.name: select for select in selects}

    def through(self, name: str) -> Iterator[Select]:
        """The `Select`s by which a name reaches memory, its own first."""
        while (select := self.selects.get(name)) is not None:
            yield select
            name = select.source.name

    def memory(self, buffer: Buffer) -> Buffer:
        """The buffer that `buffer` is a part of, which may be itself."""
        for select in self.through(buffer.name):
            buffer = select.source
        return buffer
