"""End the life of every buffer after its last use (nvFuser's AllocateAndDeallocate).

Results and parameters are the caller's and are never freed; aliases own no memory.  A
buffer made inside a loop is freed in the same iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.effects import Aliases, reads_writes
from jhost.lowering.ir.program import Program


@dataclasses.dataclass(frozen=True, slots=True)
class InsertDeallocations(EachProgram):
    """A program without `Deallocate` -> each buffer lives as long as needed."""

    name: ClassVar[str] = "insert_deallocations"

    def change(self, program: Program) -> Program:
        aliases = Aliases(program.body)
        # An alias owns no memory, so it is never freed by itself.
        kept = {b.name for b in (*program.params, *program.results)} | {
            *aliases.selects
        }
        return dataclasses.replace(program, body=_free(program.body, kept, aliases))


def _free(
    body: Sequence[ir.Stmt], kept: set[str], aliases: Aliases
) -> tuple[ir.Stmt, ...]:
    """`body` with its own buffers, but not those `kept`, freed after their last use."""
    made: dict[str, ir.Buffer] = {}
    last: dict[str, int] = {}
    in_flight: dict[str, list[str]] = {}
    inner: list[ir.Stmt] = []
    for number, stmt in enumerate(body):
        reads, writes = reads_writes(stmt)
        used = [aliases.memory(buffer).name for buffer in (*reads, *writes)]
        match stmt:
            case ir.Communicate(name=name):
                in_flight[name] = used
            case ir.Wait(communication=name):
                # Up to the wait the communication may read its source and write its
                # result, so both are used here.
                used = in_flight.pop(name, used)
            case _:
                pass
        last |= dict.fromkeys(used, number)
        if isinstance(stmt, ir.For):
            # A loop makes nothing that outlives an iteration: what it fills for others
            # was allocated before it.
            freed = _free(stmt.body, kept | set(made), aliases)
            stmt = dataclasses.replace(stmt, body=freed)
        else:
            fresh = (buffer for buffer in writes if buffer.name not in kept)
            made.update((b.name, b) for b in fresh if b.name not in made)
        inner.append(stmt)
    return tuple(_with_frees(inner, made, last))


def _with_frees(
    body: Sequence[ir.Stmt], made: dict[str, ir.Buffer], last: dict[str, int]
) -> Iterator[ir.Stmt]:
    freed: dict[int, list[ir.Stmt]] = {}
    for name, buffer in made.items():
        freed.setdefault(last[name], []).append(ir.Deallocate(buffer=buffer))
    for number, stmt in enumerate(body):
        yield stmt
        yield from freed.get(number, ())
