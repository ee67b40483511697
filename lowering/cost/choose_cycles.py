"""Choose which scans are cycles: with transfers that stand in another iteration.

A cycle hides the first gather of an iteration and its last sum.  It carries what they
bring or take, and its first and last iterations stand outside of the scan.

Within a process it is taken where it is predicted to gain.  Between processes a link
may be slower than any that was measured, and a cycle is always taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from jhost.lowering.cost.choose_transfers import ChooseTransfers, is_large
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir.bodies import EachProgram, statements
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.statements import Communicate, Scan, While
from jhost.lowering.schedule.cycle import Cycle, cycle_of, stays_in_iteration
from jhost.lowering.schedule.schedule_loops import ScheduleLoops
from jhost.lowering.schedule.with_cycle import with_cycle
from jhost.lowering.units.segment import Segment

_GAIN = 0.995
"""What the time must be below, as a share of that without the cycle."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChooseCycles(EachProgram):
    """Scans -> cycles, where that gains; `transfers` decides of what they then hold."""

    name: ClassVar[str] = "choose_cycles"

    transfers: ChooseTransfers

    def change(self, program: Program) -> Program:
        mesh = dict(program.mesh.shape)

        def can_hide(transfer: Communicate) -> bool:
            way = self.transfers.way(transfer, mesh)
            return way is not None and self.transfers.is_open(transfer)

        notes = tuple(_said_of_others(program))
        # The last one first, as a cycle gives the statements behind it other operands.
        for stmt in reversed(program.body):
            if not isinstance(stmt, Scan):
                continue
            cycle = cycle_of(stmt, can_hide)
            if cycle is not None:
                program = self.better(program, with_cycle(program, cycle), cycle)
        if not notes:
            return program
        return dataclasses.replace(program, remarks=(*program.remarks, *notes))

    def better(self, program: Program, other: Program, cycle: Cycle) -> Program:
        """The `other` program, with a note, if it is asked for or gains."""
        if self.is_weighed(cycle) and not self.gains(program, other):
            return program
        return dataclasses.replace(other, remarks=(*program.remarks, _said(cycle)))

    def is_weighed(self, cycle: Cycle) -> bool:
        if self.transfers.rates is None or self.transfers.pipeline != "auto":
            return False
        axes = {axis for stmt in cycle.stmts for axis in stmt.axes}
        return self.transfers.between.isdisjoint(axes)

    def gains(self, program: Program, other: Program) -> bool:
        rates = self.transfers.rates
        assert rates is not None
        before, after = (
            predict(
                ScheduleLoops().apply(Segment().apply(self.transfers.apply(each))),
                rates,
            ).total
            for each in (program, other)
        )
        return after < _GAIN * before


def _said(cycle: Cycle) -> Note:
    early, late = (
        [display_name(cycle.scan.body, name) for name in dict.fromkeys(names)]
        for names in (
            [each.stmt.out.name for each in cycle.early],
            [each.stmt.out.name for each in cycle.late],
        )
    )
    said = [f"{', '.join(early)} gathered an iteration early"] * bool(early)
    said += [f"{', '.join(late)} summed an iteration late"] * bool(late)
    where = cycle.scan.where
    return Note(
        form=f"in the scan of {cycle.scan.length}: {' and '.join(said)}", where=where
    )


def _said_of_others(program: Program) -> Iterator[Note]:
    """Of loops whose transfers stay in their own iteration, that they do, and why."""
    for stmt in program.body:
        if isinstance(stmt, While) and any(map(_moves, stmt.bodies)):
            form = (
                "in a while loop every transfer stays in its own iteration: nothing "
                "says which is the last"
            )
            yield Note(form=form, where=stmt.where)
        if isinstance(stmt, Scan) and (stuck := stays_in_iteration(stmt, is_large)):
            names = [display_name(stmt.body, each.source.name) for each in stuck]
            values = ", ".join(dict.fromkeys(names))
            form = (
                f"in the scan of {stmt.length} {values} cannot move in another "
                "iteration: each depends on the one before"
            )
            yield Note(form=form, where=stmt.where)


def _moves(body: Program) -> bool:
    return any(isinstance(stmt, Communicate) for stmt in statements(body))
