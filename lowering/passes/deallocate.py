"""End the life of every buffer after its last use (nvFuser's AllocateAndDeallocate).

Results and parameters are the caller's and are never freed; aliases own no memory.  A
buffer made inside a loop is freed in the same iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jhost.lowering.graph import touched
from jhost.lowering.ir import Buffer, Deallocate, For, If, Program, Select, Stmt, Wait


@dataclasses.dataclass(frozen=True, slots=True)
class InsertDeallocations:
    """A program without `Deallocate` -> each buffer lives as long as needed."""

    name: ClassVar[str] = "insert_deallocations"

    def apply(self, program: Program) -> Program:
        owned = {b.name for b in (*program.params, *program.results)}
        return dataclasses.replace(program, body=_free(program.body, owned, {}))


def _free(
    body: Sequence[Stmt], kept: set[str], sources: dict[str, str]
) -> tuple[Stmt, ...]:
    """`body` with what is made in it and not `kept` freed after its last use."""
    made: dict[str, Buffer] = {}
    last: dict[str, int] = {}
    sources = dict(sources)
    inner: list[Stmt] = []
    for number, stmt in enumerate(body):
        if isinstance(stmt, Select):
            sources[stmt.out.name] = sources.get(stmt.source.name, stmt.source.name)
            kept = kept | {stmt.out.name}
        reads, writes = touched(stmt)
        for buffer in (*reads, *writes):
            last[sources.get(buffer.name, buffer.name)] = number
        if isinstance(stmt, For):
            # It makes nothing that outlives an iteration, only writes what is there.
            freed = _free(stmt.body, kept | set(made), sources)
            stmt = dataclasses.replace(stmt, body=freed)
        elif not isinstance(stmt, If):
            fresh = (buffer for buffer in writes if buffer.name not in kept)
            made.update((b.name, b) for b in fresh if b.name not in made)
        inner.append(stmt)
    return tuple(_with_frees(inner, made, last))


def _with_frees(
    body: Sequence[Stmt], made: dict[str, Buffer], last: dict[str, int]
) -> list[Stmt]:
    freed: dict[int, list[Stmt]] = {}
    for name, buffer in made.items():
        freed.setdefault(last[name], []).append(Deallocate(buffer=buffer))
    out: list[Stmt] = []
    pending: list[Stmt] = []
    for number, stmt in enumerate(body):
        out.append(stmt)
        pending += freed.get(number, [])
        # A communication reads its source until it has been waited for.
        following = body[number + 1] if number + 1 < len(body) else None
        if not isinstance(following, Wait):
            out += pending
            pending = []
    return out
