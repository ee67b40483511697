"""Keep partial sums partial through linear operations where that saves communication.

`x @ w + y @ v` of two partial sums needs one reduction, of their sum.  A reduction
moves behind the operations that distribute over it (`rules/linear.py`).  It stops where
the bytes received, or the number of communications, are least and neither has grown.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import ClassVar

from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.layout import axes_size, layout_of, spec_text
from jhost.lowering.ir.marks import (
    BarrierMark,
    Mark,
    ShardMark,
    StreamChoice,
    StreamRequest,
)
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.operation import operation
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport
from jhost.lowering.ir.statements import Buffer, Compute, Reshard, Stmt
from jhost.lowering.layouts.commute import commuted
from jhost.lowering.layouts.draft import Draft, is_reduction
from jhost.lowering.layouts.hidden_dims import streamed_where_moved
from jhost.lowering.layouts.remarks import layout_remark
from jhost.lowering.layouts.reshard import plan_reshard
from jhost.lowering.layouts.texts import line_of, made_text
from jhost.lowering.layouts.transfer_bytes import NOTHING, TransferBytes, moved_by


@dataclasses.dataclass(frozen=True, slots=True)
class DelayReductions(EachProgram):
    """Reductions of partial values -> fewer or smaller ones, behind linear operations.

    A transfer that a pipeline hides is not replaced by one that it does not hide.
    """

    name: ClassVar[str] = "delay_reductions"

    def sees(self, program: Program) -> object:
        return program.streamed if _reduces(program) else None

    def change(self, program: Program) -> Program:
        if _reduces(program):
            program = _Delayer(program).delay()
        # All constraints are met by now, and no later pass reads them.
        marks = tuple(m for m in program.marks if not isinstance(m, ShardMark))
        return dataclasses.replace(program, marks=marks)


def _reduces(program: Program) -> bool:
    return any(map(is_reduction, program.body))


@dataclasses.dataclass(frozen=True, slots=True)
class _ReductionCost:
    """The bytes and the number of communications of reshards, or a difference."""

    moved: TransferBytes = NOTHING
    communications: int = 0

    def __add__(self, other: _ReductionCost) -> _ReductionCost:
        count = self.communications + other.communications
        return _ReductionCost(self.moved + other.moved, count)

    def __sub__(self, other: _ReductionCost) -> _ReductionCost:
        count = self.communications - other.communications
        return _ReductionCost(self.moved - other.moved, count)

    def improves(self, other: _ReductionCost) -> bool:
        """Whether one of the terms is less, and none is more."""
        mine, others = self.terms(), other.terms()
        return mine != others and all(a <= b for a, b in zip(mine, others, strict=True))

    def terms(self) -> tuple[int, int, int]:
        # None of the three may grow.
        return self.moved.exposed, self.moved.all, self.communications


class _Delayer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.mesh = dict(program.mesh.shape)
        self.names = FreshNames.of(program)
        given = [m for m in program.marks if not isinstance(m, BarrierMark)]
        fixed = [m for m in given if not isinstance(m, StreamRequest | StreamChoice)]
        self.fixed = {mark.buffer for mark in fixed}
        needed = {result.name for result in program.results}
        self.body = Draft(program.body, needed, {mark.buffer for mark in given})
        self.gone: dict[str, Reshard] = {}
        self.stale: set[str] = set()
        self.remarks: dict[str, LayoutReport] = {}

    def delay(self) -> Program:
        """Carry each reduction on, and try those again that a change may have freed."""
        waiting = self.starts(self.program.body)
        queued = set(waiting)
        ended: dict[str, set[tuple[int, str]]] = {}
        while waiting:
            start = heapq.heappop(waiting)
            queued.remove(start)
            # Since it was queued, another step has carried it on or removed it.
            if start not in self.starts([self.body.makers.get(start[1])]):
                continue
            seen = self.carry(start[1])
            # The values that kept it from moving may change later.  Then it is tried
            # again.
            if not self.body.changed:
                for name in seen:
                    ended.setdefault(name, set()).add(start)
                continue
            changed = self.commit()
            again = set(self.starts(map(self.body.makers.get, changed)))
            again.update(*(ended.pop(name, ()) for name in changed))
            for other in again - queued:
                heapq.heappush(waiting, other)
            queued |= again
        return self.rewritten()

    def starts(self, stmts: Iterable[Stmt | None]) -> list[tuple[int, str]]:
        """The slot and the name of each reduction among statements."""
        return [
            (self.body.slot_of[id(stmt)], stmt.out.name)
            for stmt in stmts
            if stmt is not None and is_reduction(stmt)
        ]

    def carry(self, start: str) -> set[str]:
        """Carry one reduction, and those that it meets, to where that costs least.

        Returns the values that this depended on.
        """
        body, seen, reached = self.body, {start}, {start}
        waiting = self.readers(start)
        heapq.heapify(waiting)
        cost, least, best, last = _ReductionCost(), _ReductionCost(), 0, -1
        while waiting:
            slot = heapq.heappop(waiting)
            if slot == last:
                continue
            last = slot
            stmt = next(s for s in body.slots[slot] if isinstance(s, Compute))
            seen.update(buffer.name for buffer in (*stmt.ins, *stmt.outs))
            # Tried whatever it costs: the gain may come only behind several operations.
            changes = commuted(stmt, body, self.fixed, self.mesh, self.names)
            if changes is None:
                continue
            count = len(body.changed)
            body.replace(changes)
            # Only the changed slots are recounted: programs have thousands.
            cost += self.added_cost(count)
            for name in self.made(count).keys() - reached:
                reached.add(name)
                for other in self.readers(name):
                    heapq.heappush(waiting, other)
            if cost.improves(least):
                least, best = cost, len(body.changed)
        # Back to where it cost least.
        body.take_back(best)
        return seen

    def readers(self, name: str) -> list[int]:
        """The slots of the computations that read a value."""
        readers = self.body.readers.get(name, {}).values()
        return [self.body.slot_of[id(s)] for s in readers if isinstance(s, Compute)]

    # --- What it costs -------------------------------------------------------- #

    def added_cost(self, count: int) -> _ReductionCost:
        """The cost that the changes after the first `count` add."""
        grown = _ReductionCost()
        for slot, old in self.body.replaced(count).items():
            for stmt in self.body.slots[slot]:
                grown += self.cost_of(stmt)
            for stmt in old:
                grown -= self.cost_of(stmt)
        return grown

    def cost_of(self, stmt: Stmt) -> _ReductionCost:
        if not isinstance(stmt, Reshard):
            return _ReductionCost()
        have, want = layout_of(stmt.source), layout_of(stmt.out)
        partial = stmt.source.partial
        streamed = streamed_where_moved(self.program, stmt)
        steps = plan_reshard(have, want, partial, self.mesh)
        moved = moved_by(steps, have, self.whole(stmt.source), self.mesh, streamed)
        return _ReductionCost(moved, sum(step.kind != "Select" for step in steps))

    def whole(self, buffer: Buffer) -> Buffer:
        """`buffer` with its global shape."""
        shards = [axes_size(dim.axes, self.mesh) for dim in buffer.dims]
        shape = [size * n for size, n in zip(buffer.shape, shards, strict=True)]
        return dataclasses.replace(buffer, shape=tuple(shape))

    # --- What becomes of it --------------------------------------------------- #

    def made(self, count: int) -> dict[str, Reshard]:
        """The reductions that the changes after the first `count` made."""
        before = self.body.replaced(count)
        old = set(map(id, itertools.chain(*before.values())))
        return {
            stmt.out.name: stmt
            for slot in sorted(before)
            for stmt in self.body.slots[slot]
            if is_reduction(stmt) and id(stmt) not in old
        }

    def commit(self) -> set[str]:
        """Keep the changes, with remarks on them; return the values they affect."""
        before, made = self.body.replaced(0), self.made(0)
        old = list(itertools.chain(*(before[slot] for slot in sorted(before))))
        new = itertools.chain(*(self.body.slots[slot] for slot in before))
        gone = {
            stmt.out.name: stmt
            for stmt in old
            if is_reduction(stmt) and stmt.out.name not in self.body.makers
        }
        self.gone |= gone
        self.stale |= {*gone, *made}
        for name in (*gone, *made):
            self.remarks.pop(name, None)
        for name, stmt in made.items():
            self.remarks[name] = self.remark(stmt, [*gone])
        self.body.changed.clear()
        buffers = (
            b for stmt in (*old, *new) for b in itertools.chain(*reads_writes(stmt))
        )
        return {buffer.name for buffer in buffers}

    def rewritten(self) -> Program:
        """The program with the changes; marks and remarks follow them."""
        if not self.stale:
            return self.program
        remarks = [
            remark
            for remark in self.program.remarks
            if not (isinstance(remark, LayoutReport) and remark.value in self.stale)
        ]
        return dataclasses.replace(
            self.program,
            body=tuple(itertools.chain(*self.body.slots)),
            marks=tuple(map(self.followed, self.program.marks)),
            remarks=(*remarks, *self.remarks.values()),
        )

    def followed(self, mark: Mark) -> Mark:
        """A stream or barrier mark, moved to the value that replaced its own."""
        moves = StreamRequest | StreamChoice | BarrierMark
        while isinstance(mark, moves) and mark.buffer in self.gone:
            mark = dataclasses.replace(mark, buffer=self.gone[mark.buffer].source.name)
        return mark

    def remark(self, stmt: Reshard, gone: Sequence[str]) -> LayoutReport:
        maker = self.body.makers[stmt.source.name]
        assert isinstance(maker, Compute), "only computations make partial values"
        before = made_text(stmt.source, operation(maker))
        after = spec_text(layout_of(stmt.out))
        names = dict.fromkeys(display_name(self.program, name) for name in gone)
        reason = f"{' and '.join(names)} stayed partial until here" if gone else ""
        moved, where = self.cost_of(stmt).moved, line_of(operation(maker))
        return layout_remark(stmt.out.name, before, after, moved, reason, where)
