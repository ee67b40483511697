"""Cheap values are computed where they are first read, if that keeps no more bytes.

JAX computes in the forward what the backward needs, so the derivatives of all
activations come first.  With streams, these would join the first loop that works on the
same rows, and would be kept from there to the loop that reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import ClassVar

from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.layout import bytes_in
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.statements import Compute, Stmt
from jhost.lowering.schedule.recompute.loops import with_copies
from jhost.lowering.streams.plan import with_plan_of


@dataclasses.dataclass(frozen=True, slots=True)
class ComputeLate(EachProgram):
    """Programs with streams -> the same, with cheap statements before their readers.

    A contraction is work that may hide a transfer, so it stays where it is.
    """

    name: ClassVar[str] = "compute_late"

    def sees(self, program: Program) -> object:
        return all(mark.spec.pipeline == "off" for mark in stream_choices(program))

    def change(self, program: Program) -> Program:
        if not stream_choices(program):
            return program
        copied, late = with_copies(program)
        places = _places(copied, late)
        order = sorted(range(len(copied.body)), key=lambda n: (places[n], n))
        body = tuple(copied.body[number] for number in order)
        return with_plan_of(program, dataclasses.replace(program, body=body))


def _places(program: Program, late: Container[str]) -> list[int]:
    """For each statement, the number of the statement that it moves before.

    A statement that stays has its own number.  Values in `late` always move to their
    readers.
    """
    end = len(program.body)
    first = {result.name: end for result in program.results}
    last = dict.fromkeys((b.name for b in (*program.params, *program.results)), end)
    places = list(range(end))
    # From the last to the first: a statement has to know where its readers have moved.
    for number in reversed(range(end)):
        stmt = program.body[number]
        reads, writes = reads_writes(stmt)
        if _can_wait(stmt) or any(buffer.name in late for buffer in writes):
            reader = min(first.get(buffer.name, number) for buffer in writes)
            kept = [b for b in reads if last.get(b.name, number) < reader]
            # Moved, the statement keeps its operands alive until then, and not its
            # result.
            if writes[0].name in late or bytes_in(kept) <= bytes_in(writes):
                places[number] = reader
        place = places[number]
        for buffer in reads:
            first[buffer.name] = min(place, first.get(buffer.name, end))
            last[buffer.name] = max(place, last.get(buffer.name, 0))
    return places


def _can_wait(stmt: Stmt) -> bool:
    return isinstance(stmt, Compute) and all(
        not (eqn.eqn.effects or eqn.rule.is_closed or eqn.rule.reduces)
        for eqn in stmt.unit.eqns
    )
