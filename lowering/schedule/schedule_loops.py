"""When transfers in loops over chunks are issued, and when they are waited for.

The rule of `order.py` holds inside of an iteration.  A transfer is issued as soon as
its source is there, and the computations of the source go before work that no transfer
needs.  It is waited for right before its first reader.  So if an iteration gathers two
values that were there before it began, the second moves while the first is worked on.
A chunk that is sent moves while the gradient of a weight is added up.

Then iterations are staggered: see `stages.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.effects import Aliases, reads_writes, written
from jhost.lowering.ir.program import Program
from jhost.lowering.schedule.stages import in_stages

_BORDERS = ir.GetCurrentStream | ir.SetCurrentStream | ir.Synchronize | ir.For
"""Statements that nothing is moved across."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleLoops(EachProgram):
    """Loops -> loops that issue early and wait late, with staggered iterations."""

    name: ClassVar[str] = "schedule_loops"

    def change(self, program: Program) -> Program:
        if not any(isinstance(stmt, ir.For) for stmt in program.body):
            return program
        memory = {buffer.name: buffer.name for buffer in program.params}
        body = tuple(_with_loops(program.body, memory))
        return dataclasses.replace(program, body=body)


def _with_loops(body: Sequence[ir.Stmt], memory: dict[str, str]) -> Iterator[ir.Stmt]:
    """The statements, with loops in order; `memory` has the memory of each name."""
    for stmt in body:
        if isinstance(stmt, ir.For):
            inner = [*_with_loops(_stretches(stmt.body), dict(memory))]
            stmt = in_stages(dataclasses.replace(stmt, body=tuple(inner)), memory)
        yield stmt
        for buffer in written(stmt):
            source = stmt.source if isinstance(stmt, ir.Select) else buffer
            memory[buffer.name] = memory.get(source.name, source.name)


def _stretches(body: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """`body` with the statements between each two borders in order."""
    ordered: list[ir.Stmt] = []
    stretch: list[ir.Stmt] = []
    aliases = Aliases(body)
    for stmt in body:
        if isinstance(stmt, _BORDERS):
            ordered += [*_BetweenBorders(aliases, stretch).in_order(), stmt]
            stretch = []
        else:
            stretch.append(stmt)
    return [*ordered, *_BetweenBorders(aliases, stretch).in_order()]


class _BetweenBorders:
    """Statements of an iteration on one stream."""

    def __init__(self, aliases: Aliases, stmts: Sequence[ir.Stmt]) -> None:
        self.aliases = aliases
        self.stmts = stmts
        self.transfers = {s.name: s for s in stmts if isinstance(s, ir.Communicate)}

    def in_order(self) -> Sequence[ir.Stmt]:
        if not self.transfers:
            return self.stmts
        return self.waiting_late(self.issued_early())

    def issued_early(self) -> list[ir.Stmt]:
        """Each transfer, and each maker of a source, right behind what it needs."""
        ordered: list[ir.Stmt] = []
        urgent = self.sources()
        for stmt in self.stmts:
            place = len(ordered)
            if isinstance(stmt, ir.Communicate):
                # Transfers keep their order, because the first is needed first.
                place = _behind(ordered, stmt, self.holds_transfer)
            elif stmt in urgent:
                place = _behind(ordered, stmt, partial(self.holds_source, urgent))
            self.insert(ordered, place, stmt)
        return ordered

    def sources(self) -> list[ir.Stmt]:
        """The computations whose results are sent, directly or through others."""
        found: list[ir.Stmt] = []
        wanted: set[str] = set()
        for stmt in reversed(self.stmts):
            reads, writes = self.memories(stmt)
            if isinstance(stmt, ir.Communicate):
                wanted |= reads
            elif isinstance(stmt, ir.Compute) and wanted & writes:
                found.append(stmt)
                wanted |= reads
        return found

    def holds_transfer(self, before: ir.Stmt, stmt: ir.Stmt) -> bool:
        """Whether a transfer cannot be issued ahead of a statement."""
        return isinstance(before, ir.Communicate) or self.needs(before, stmt)

    def holds_source(
        self, urgent: Sequence[ir.Stmt], before: ir.Stmt, stmt: ir.Stmt
    ) -> bool:
        """Whether the maker of a source cannot move ahead of the statement `before`.

        It stays behind a wait too, because the work before the wait hides its transfer.
        """
        moves = isinstance(before, ir.Communicate | ir.Wait)
        return moves or before in urgent or self.needs(before, stmt)

    def insert(self, ordered: list[ir.Stmt], place: int, stmt: ir.Stmt) -> None:
        """Put a statement at a place, and its aliases right before it."""
        through = {
            select.out.name
            for buffer in (b for buffers in reads_writes(stmt) for b in buffers)
            for select in self.aliases.through(buffer.name)
        }
        moved = [
            other
            for other in ordered[place:]
            if isinstance(other, ir.Select) and other.out.name in through
        ]
        rest = [other for other in ordered[place:] if other not in moved]
        ordered[place:] = [*moved, stmt, *rest]

    def waiting_late(self, stmts: Sequence[ir.Stmt]) -> list[ir.Stmt]:
        """Each wait right before the first statement that needs its transfer."""
        ordered: list[ir.Stmt] = []
        waits: list[ir.Wait] = []
        for stmt in stmts:
            if isinstance(stmt, ir.Wait):
                waits.append(stmt)
                continue
            needed = [wait for wait in waits if self.needs(wait, stmt)]
            ordered += [*needed, stmt]
            waits = [wait for wait in waits if wait not in needed]
        return [*ordered, *waits]

    def needs(self, before: ir.Stmt, stmt: ir.Stmt) -> bool:
        """Whether a statement has to stay behind the statement `before`.

        It does if both touch the same memory and one of them writes it.  A wait counts
        as the statement that writes what its transfer brings.
        """
        if isinstance(before, ir.Wait):
            transfer = self.transfers.get(before.communication)
            return transfer is None or self.needs(transfer, stmt)
        # An alias is no access, and `insert` moves it with the statement that uses it.
        if isinstance(before, ir.Select) or isinstance(stmt, ir.Select):
            return False
        reads, writes = self.memories(stmt)
        read, wrote = self.memories(before)
        if wrote & reads or read & writes:
            return True
        pairs = itertools.product(reads_writes(before)[1], reads_writes(stmt)[1])
        return any(self.is_one_place(one, other) for one, other in pairs)

    def is_one_place(self, buffer: ir.Buffer, other: ir.Buffer) -> bool:
        """Whether two written buffers may share an element."""
        # Loops never write one element through two aliases in one iteration.
        memory = self.aliases.memory(buffer).name
        whole = memory in (buffer.name, other.name)
        same = memory == self.aliases.memory(other).name
        return same and (whole or buffer.name == other.name)

    def memories(self, stmt: ir.Stmt) -> tuple[set[str], set[str]]:
        """The memories that a statement reads and writes."""
        reads, writes = reads_writes(stmt)
        return self.aliases.memories(reads), self.aliases.memories(writes)


def _behind(
    stmts: Sequence[ir.Stmt],
    stmt: ir.Stmt,
    holds: Callable[[ir.Stmt, ir.Stmt], bool],
) -> int:
    """The place for a statement right behind the last that holds it back."""
    places = (n + 1 for n, before in enumerate(stmts) if holds(before, stmt))
    return max(places, default=0)
