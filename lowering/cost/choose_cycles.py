"""Choose which scans are cycles: with transfers that stand in another iteration.

A cycle hides the first gather of an iteration and its last sum.  It carries what they
bring or take, and its first and last iterations stand outside of the scan.  What no
iteration changes is gathered once, in front of the scan.

Within a process that is done where it is predicted to gain.  Between processes a link
may be slower than any that was measured, and it is always done.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jhost.lowering.cost.choose_transfers import ChooseTransfers, Weighed
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.statements import Communicate, Scan, While
from jhost.lowering.schedule.cycle import Cycle, MovableTransfers, cycle_of
from jhost.lowering.schedule.intervals import IsOpen
from jhost.lowering.schedule.once import Once, once_of, with_once
from jhost.lowering.schedule.with_cycle import with_cycle

_GAIN = 0.995
"""What the time must be below, as a share of that without the cycle."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChooseCycles(EachProgram):
    """Scans -> cycles, where that gains; `transfers` decides of what they then hold."""

    name: ClassVar[str] = "choose_cycles"

    transfers: ChooseTransfers

    def change(self, program: Program) -> Program:
        can_hide = functools.partial(self.can_hide, mesh=dict(program.mesh.shape))
        # The last one first, as a cycle gives the statements behind it other operands.
        for stmt in reversed(program.body):
            if isinstance(stmt, Scan):
                program = self.with_transfers_moved(program, stmt, can_hide)
            elif isinstance(stmt, While):
                exposed = MovableTransfers(stmt, can_hide).exposed()
                program = _noted(program, _said_kept(stmt, exposed))
        return program

    def with_transfers_moved(
        self, program: Program, scan: Scan, can_hide: IsOpen
    ) -> Program:
        """`program`, whose scan may gather once, and be a cycle."""
        found = MovableTransfers(scan, can_hide)
        if (once := once_of(scan, found)) is not None:
            other, changed = with_once(program, once)
            if self.is_better(program, other, once):
                program, scan = _noted(other, _said_once(once)), changed
                found = MovableTransfers(scan, can_hide)
        if (cycle := cycle_of(scan, found)) is not None:
            other = with_cycle(program, cycle)
            if self.is_better(program, other, cycle):
                program = _noted(other, _said(cycle))
        return _noted(program, _said_kept(scan, found.bound()))

    def can_hide(self, transfer: Communicate, mesh: Mapping[str, int]) -> bool:
        way = self.transfers.way(transfer, mesh)
        return way is not None and self.transfers.is_open(transfer)

    def is_better(self, program: Program, other: Program, moved: Cycle | Once) -> bool:
        """Whether the `other` program is asked for, or done earlier."""
        if not self.is_weighed(moved):
            return True
        # With all transfers beside work, as a cycle wants them.  Were they chosen for
        # each of the two, that would be most of lowering: 30 of 40 s for four layers
        # with marks over two axes.
        every = dataclasses.replace(self.transfers, pipeline="p2p")
        ordered = (Weighed(every.apply(each)) for each in (program, other))
        return self.transfers.gains(*ordered, most=_GAIN)

    def is_weighed(self, moved: Cycle | Once) -> bool:
        if self.transfers.rates is None or self.transfers.pipeline != "auto":
            return False
        axes = {axis for stmt in moved.stmts for axis in stmt.axes}
        return self.transfers.between.isdisjoint(axes)


def _noted(program: Program, note: Note | None) -> Program:
    if note is None:
        return program
    return dataclasses.replace(program, remarks=(*program.remarks, note))


def _said_kept(loop: Scan | While, kept: Sequence[Communicate]) -> Note | None:
    """Why transfers stay in their iteration, though they have nothing beside them."""
    if not kept:
        return None
    names = _names(loop.body, kept)
    if isinstance(loop, Scan):
        where, why = f"scan of {loop.length}", "each iteration waits for the one before"
    else:
        where, why = "while loop", "nothing says whether another iteration follows"
    form = f"in the {where}: transfers of {names} stay in their iteration: {why}"
    return Note(form=form, where=loop.where)


def _said_once(once: Once) -> Note:
    names = _names(once.scan.body, once.stmts)
    form = f"in front of the scan of {once.scan.length}: {names} gathered once for all"
    return Note(form=form, where=once.scan.where)


def _said(cycle: Cycle) -> Note:
    early, late = (
        _names(cycle.scan.body, [each.stmt for each in moved])
        for moved in (cycle.early, cycle.late)
    )
    said = [f"{early} gathered an iteration early"] * bool(early)
    said += [f"{late} summed an iteration late"] * bool(late)
    where = cycle.scan.where
    return Note(
        form=f"in the scan of {cycle.scan.length}: {' and '.join(said)}", where=where
    )


def _names(body: Program, stmts: Sequence[Communicate]) -> str:
    """What messages call the values of transfers in a body."""
    names = (display_name(body, stmt.out.name) for stmt in stmts)
    return ", ".join(dict.fromkeys(names))
