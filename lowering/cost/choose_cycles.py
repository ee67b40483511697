"""Choose which scans become cycles: scans with transfers moved to another iteration.

A cycle hides the first gather of an iteration and its last sum.  It carries what they
bring or take, and its first and last iterations stand outside of the scan.  What no
iteration changes is gathered once, in front of the scan.  Products that nothing waits
for may be an iteration late as well.

Within a process that is done where it is predicted to gain.  Between processes a link
may be slower than any that was measured, and it is always done.  Work moves only where
that is predicted to gain, and not for transfers between processes: there NCCL's kernels
take from the products beside them about what hiding them gains, at NVLink's speed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from jhost._text import bytes_text
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.remembering import FollowingPass
from jhost.lowering.cost.stream_bounds import StreamBounds, in_bodies
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.derived import Shared
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.statements import Buffer, Communicate, Scan, While
from jhost.lowering.schedule.cycle import Cycle
from jhost.lowering.schedule.intervals import IsOpen
from jhost.lowering.schedule.late_work import late_work
from jhost.lowering.schedule.movable_transfers import MovableTransfers, cycle_of
from jhost.lowering.schedule.once import Once, once_of, with_once
from jhost.lowering.schedule.with_cycle import with_cycle
from jhost.lowering.schedule.written_cycle import WrittenCycle

_GAIN = 0.998
"""A cycle's time must be below this share of the time without it."""

_GAIN_OF_WORK = 0.995
"""The same with late work, which takes longer to lower."""


@dataclasses.dataclass(slots=True)
class _Decision:
    """Whether it gains to move transfers of a scan; None if that is not known yet.

    `written` has the cycle as it was written into other programs.
    """

    moved: Cycle | Once
    gains: bool | None = None
    written: list[WrittenCycle] = dataclasses.field(default_factory=list[WrittenCycle])

    @property
    def most(self) -> float:
        """The time must be below this share of the time without it."""
        works = isinstance(self.moved, Cycle) and self.moved.beside_work
        return _GAIN_OF_WORK if works else _GAIN

    def is_of(self, moved: Cycle | Once) -> bool:
        """Whether it is about the same transfers, moved in the same way."""
        alike = type(self.moved) is type(moved) and self.moved.stmts == moved.stmts
        return alike and self.moved.scan.length == moved.scan.length


@dataclasses.dataclass(frozen=True, slots=True)
class ChooseCycles(EachProgram):
    """Scans -> cycles, where that gains; `transfers` says what can be hidden."""

    name: ClassVar[str] = "choose_cycles"

    transfers: ChooseForms
    every: FollowingPass
    """A pass that moves all transfers beside work, for programs that are compared."""
    moves_work: bool = True
    """Whether work may be late as well."""
    decided: Shared[_Decision] | None = None
    """Decisions for other programs that have the same scans; None decides anew.

    Candidates of pipelines share the scans that their marks do not stand in.
    """

    def of_candidates(self) -> ChooseCycles:
        """The pass for candidates of pipelines, which decides once for a scan.

        Late work takes long to weigh, and gains less than pipelines do.
        """
        return dataclasses.replace(self, moves_work=False, decided=Shared())

    def change(self, program: Program) -> Program:
        mesh = dict(program.mesh.shape)
        can_hide = functools.partial(self.transfers.can_hide, mesh=mesh)
        # The last one first, as a cycle gives the statements behind it other operands.
        for stmt in reversed(program.body):
            if isinstance(stmt, Scan):
                program = self.with_transfers_moved(program, stmt, can_hide)
            elif isinstance(stmt, While):
                exposed = MovableTransfers(stmt, can_hide).exposed()
                why = "nothing says whether another iteration follows"
                program = _noted(program, _said_kept(stmt, exposed, why))
        return program

    def with_transfers_moved(
        self, program: Program, scan: Scan, can_hide: IsOpen
    ) -> Program:
        """`program` with a scan that may gather once in front, and may be a cycle."""
        found = MovableTransfers(scan, can_hide)
        if (once := once_of(scan, found)) is not None:
            other, changed = with_once(program, once)
            if self.is_better(program, other, self.decision(once)):
                program, scan = _noted(other, _said_once(once)), changed
                found = MovableTransfers(scan, can_hide)
        best, note, kept = program, None, found.bound()
        for cycle in self.cycles(program, scan, found):
            decision = self.decision(cycle)
            if decision.gains is False:
                continue  # it is not even written
            other = with_cycle(program, cycle, decision.written)
            if self.is_better(best, other, decision):
                best, note = other, _said(cycle)
                kept = [each for each in kept if each not in cycle.beside_work]
        why = "each iteration waits for the one before"
        return _noted(_noted(best, note), _said_kept(scan, kept, why))

    def cycles(
        self, program: Program, scan: Scan, found: MovableTransfers
    ) -> Iterator[Cycle]:
        """The cycles of transfers alone, and the one with late work, if they are any.

        A sum with a little work behind it may stay there: it then gives the iterations
        before and behind the scan nothing to wait for, and carries no terms.
        """
        if (cycle := cycle_of(scan, found)) is not None:
            has_little = any(each.little for each in cycle.late)
            if has_little and self.is_weighed(cycle):
                fewer = cycle_of(scan, found, little=False)
                if fewer is not None:
                    yield fewer
            yield cycle
        work = late_work(found) if self.moves_work else []
        cycle = cycle_of(scan, found, work) if work else None
        if cycle is not None and self.may_move_work(program, cycle):
            yield cycle

    def most_saved(self, program: Program) -> float:
        """The most seconds that moving transfers of scans could save."""
        bodies = sum(in_bodies(stmt, self.most_saved) for stmt in program.body)
        scans = (stmt for stmt in program.body if isinstance(stmt, Scan))
        return bodies + sum(s.length * self.most_saved_by(program, s) for s in scans)

    def most_saved_by(self, program: Program, scan: Scan) -> float:
        """The seconds of all transfers that could move to another iteration."""
        rates, mesh = self.transfers.rates, dict(program.mesh.shape)
        assert rates is not None
        can_hide = functools.partial(self.transfers.can_hide, mesh=mesh)
        found = MovableTransfers(scan, can_hide)
        once, cycles = once_of(scan, found), self.cycles(program, scan, found)
        moved = (each.stmts for each in (once, *cycles) if each is not None)
        stmts = {stmt.name: stmt for each in moved for stmt in each}
        bounds = StreamBounds(rates, self.transfers.can_hide)
        return sum(bounds.seconds(stmt, mesh) for stmt in stmts.values())

    def decision(self, moved: Cycle | Once) -> _Decision:
        """The earlier decision about the same transfers of a scan, or a new one."""
        known = [] if self.decided is None else self.decided.of(moved.scan.body)
        for each in known:
            if each.is_of(moved):
                return each
        known.append(decision := _Decision(moved))
        return decision

    def is_better(self, program: Program, other: Program, decision: _Decision) -> bool:
        """Whether the `other` program is asked for, or predicted to take less time."""
        if not self.is_weighed(decision.moved):
            return True
        if decision.gains is None:
            decision.gains = self.gains(program, other, decision.most)
        return decision.gains

    def gains(self, program: Program, other: Program, most: float) -> bool:
        """Whether the `other` program takes less than `most` of the predicted time."""
        # All transfers are put beside work, as a cycle wants them, instead of chosen
        # for both programs.  The choice took most of lowering: 30 of 40 s for four
        # layers with marks over two axes.
        before, after = map(self.every.apply, (program, other))
        return self.transfers.gains(before, after, most)

    def may_move_work(self, program: Program, cycle: Cycle) -> bool:
        """Whether late work is weighed, and could hide as much as it has to gain."""
        rates, mesh = self.transfers.rates, dict(program.mesh.shape)
        if rates is None or not self.is_weighed(cycle):
            return False
        bounds = StreamBounds(rates, self.transfers.can_hide)
        hidden = sum(bounds.seconds(stmt, mesh) for stmt in cycle.beside_work)
        # Work that moves doubles the time of lowering where both programs are timed.
        return cycle.scan.length * hidden > (1 - _GAIN_OF_WORK) * bounds.work(program)

    def is_weighed(self, moved: Cycle | Once) -> bool:
        if self.transfers.rates is None or self.transfers.pipeline != "auto":
            return False
        axes = {axis for stmt in moved.stmts for axis in stmt.axes}
        return self.transfers.between.isdisjoint(axes)


def moving_all(transfers: ChooseForms) -> ChooseForms:
    """The pass that moves all transfers which can be hidden, without weighing any."""
    return dataclasses.replace(transfers, pipeline="p2p")


def _noted(program: Program, note: Note | None) -> Program:
    if note is None:
        return program
    return dataclasses.replace(program, remarks=(*program.remarks, note))


def _said_kept(
    loop: Scan | While, kept: Sequence[Communicate], why: str
) -> Note | None:
    """That exposed transfers stay in their iteration, and why."""
    if not kept:
        return None
    names = _names(loop.body, kept)
    where = f"scan of {loop.length}" if isinstance(loop, Scan) else "while loop"
    form = f"in the {where}: transfers of {names} stay in their iteration: {why}"
    return Note(form=form, where=loop.where)


def _said_once(once: Once) -> Note:
    names = _names(once.scan.body, once.stmts)
    form = f"in front of the scan of {once.scan.length}: {names} gathered once for all"
    return Note(form=form, where=once.scan.where)


def _said(cycle: Cycle) -> Note:
    body, where = cycle.scan.body, cycle.scan.where
    early = _names(body, [each.stmt for each in cycle.early])
    said = [f"{early} gathered an iteration early"] * bool(early)
    sums = _values(body, [each.out for each in cycle.late if not each.beside])
    said += [f"{sums} summed an iteration late"] * bool(sums)
    work = _values(body, [each.out for each in cycle.late if each.beside])
    beside = _names(body, cycle.beside_work)
    said += [f"{work} computed an iteration late, beside what moves {beside}"] * bool(
        work
    )
    more = f"an iteration hands on {bytes_text(cycle.bytes)} more a device"
    form = f"in the scan of {cycle.scan.length}: {' and '.join(said)}; {more}"
    return Note(form=form, where=where)


def _names(body: Program, stmts: Iterable[Communicate]) -> str:
    """What messages call the values of transfers in a body."""
    return _values(body, [stmt.out for stmt in stmts])


def _values(body: Program, values: Iterable[Buffer]) -> str:
    names = (display_name(body, value.name) for value in values)
    return ", ".join(dict.fromkeys(names))
