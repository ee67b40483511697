"""In loops, what comes from other devices is issued before anything is computed.

An iteration may need two values that were there before it began.  The second is then on
its way while the first is worked on, and is waited for where it is needed.  At the end
of an iteration everything is sent before anything sent is waited for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute, For, Select, Stmt, Wait


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiveEarly(EachProgram):
    """Loops whose iterations issue first what they receive, and at last what they send.

    Nothing is waited for between.
    """

    name: ClassVar[str] = "receive_early"

    def change(self, program: Program) -> Program:
        if not any(isinstance(stmt, For) for stmt in program.body):
            return program
        return dataclasses.replace(program, body=_in_loops(program.body))


def _in_loops(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    return tuple(
        dataclasses.replace(
            stmt, body=_in_loops(_sending_together(_receiving_early(stmt.body)))
        )
        if isinstance(stmt, For)
        else stmt
        for stmt in body
    )


def _receiving_early(body: Sequence[Stmt]) -> list[Stmt]:
    """`body` with the communications of what it does not make before its first wait."""
    work = Compute | For | Wait
    start = next((n for n, s in enumerate(body) if isinstance(s, work)), len(body))
    early = sorted(number for number in _independent(body) if number > start)
    rest = [stmt for n, stmt in enumerate(body) if n >= start and n not in early]
    return [*body[:start], *(body[number] for number in early), *rest]


def _sending_together(body: Sequence[Stmt]) -> Sequence[Stmt]:
    """`body` with the waits behind its last computation behind what is sent there."""
    issued = [n for n, stmt in enumerate(body) if isinstance(stmt, Communicate)]
    worked = [n for n, stmt in enumerate(body) if isinstance(stmt, Compute | For)]
    # A wait between two sends would hold back the second until the first has come.
    start = max(worked, default=-1) + 1
    end = max([start, *(number + 1 for number in issued)])
    sends = body[start:end]
    if not all(isinstance(stmt, Communicate | Select | Wait) for stmt in sends):
        return body
    come = {stmt.out.name for stmt in body if isinstance(stmt, Communicate)}
    if any(buffer.name in come for stmt in sends for buffer in reads_writes(stmt)[0]):
        return body  # what comes goes on
    waits = [stmt for stmt in sends if isinstance(stmt, Wait)]
    others = [stmt for stmt in sends if not isinstance(stmt, Wait)]
    return [*body[:start], *others, *waits, *body[end:]]


def _independent(body: Sequence[Stmt]) -> set[int]:
    """The communications that touch nothing made in `body`, with their aliases."""
    aliases: dict[str, int] = {}
    made: set[str] = set()
    found: set[int] = set()
    for number, stmt in enumerate(body):
        reads, writes = reads_writes(stmt)
        names = {buffer.name for buffer in (*reads, *writes)}
        # An alias of what is there from the start: it moves along with its reader.
        if isinstance(stmt, Select) and stmt.source.name not in made:
            aliases[stmt.out.name] = number
            continue
        if isinstance(stmt, Communicate) and made.isdisjoint(names):
            found |= {number, *_through(names, aliases, body)}
        made |= {buffer.name for buffer in writes}
    return found


def _through(
    names: set[str], aliases: Mapping[str, int], body: Sequence[Stmt]
) -> set[int]:
    """The aliases by which `names` reach memory from outside."""
    found: set[int] = set()
    for name in names:
        while (number := aliases.get(name)) is not None:
            found.add(number)
            (source,), _ = reads_writes(body[number])
            name = source.name
    return found
