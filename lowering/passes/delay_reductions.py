"""Keep partial sums partial through linear operations where that saves communication.

`x @ w + y @ v` of two partial sums needs one reduction, of their sum.  A reduction is
carried behind the operations that distribute over it (`rules_linear.py`), as far as
the bytes received or the number of communications falls and neither grows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from jhost.lowering.delayed import Body, behind
from jhost.lowering.ir import (
    BarrierMark,
    Buffer,
    Compute,
    Program,
    Remark,
    Set,
    ShardMark,
    StreamMark,
)
from jhost.lowering.layout import layout_of
from jhost.lowering.layout_costs import NOTHING, Moved, moved_by
from jhost.lowering.layout_remarks import layout_remark, line_of, made_text
from jhost.lowering.marks import resolved_marks
from jhost.lowering.names import Names
from jhost.lowering.operations import operation
from jhost.lowering.reshard import plan_reshard
from jhost.lowering.rules import axes_size
from jhost.lowering.specs import spec_text
from jhost.lowering.streamed_dims import StreamedDim, streamed_dims


@dataclasses.dataclass(frozen=True, slots=True)
class DelayReductions:
    """`Set`s of partial values -> fewer or smaller ones, behind linear computations.

    `chunks` and `pipeline` hold for stream marks that do not say: what a pipeline hides
    does not give way to what it does not.
    """

    name: ClassVar[str] = "delay_reductions"

    chunks: int | Literal["auto"] = "auto"
    pipeline: str = "auto"

    def apply(self, program: Program) -> Program:
        asked = resolved_marks(program, self.chunks, self.pipeline)
        delayer = _Delayer(program, streamed_dims(program, asked))
        program = delayer.delay()
        marks = tuple(m for m in program.marks if not isinstance(m, ShardMark))
        return dataclasses.replace(program, marks=marks)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cost:
    moved: Moved
    communications: int

    def improves(self, other: _Cost) -> bool:
        """Whether something falls and nothing grows."""
        mine, others = self.terms(), other.terms()
        return mine != others and all(a <= b for a, b in zip(mine, others, strict=True))

    def terms(self) -> tuple[int, int, int]:
        exposed, hidden = self.moved.exposed, self.moved.hidden
        return exposed, exposed + hidden, self.communications


class _Delayer:
    def __init__(self, program: Program, streamed: Mapping[str, StreamedDim]) -> None:
        self.program = program
        self.mesh = dict(program.mesh.shape)
        self.streamed = streamed
        self.names = Names.of(program)
        self.given = [m for m in program.marks if not isinstance(m, BarrierMark)]
        fixed = [mark for mark in self.given if not isinstance(mark, StreamMark)]
        self.fixed = {mark.buffer for mark in fixed}

    def delay(self) -> Program:
        program = self.program
        needed = {result.name for result in program.results}
        body = Body(program.body, needed, {mark.buffer for mark in self.given})
        started: set[str] = set()
        while starts := [n for n in body.reductions if n not in started]:
            started.add(starts[0])
            new = self.carried(starts[0], body)
            if new is not body:
                program = self.rewritten(program, body, new)
                body = new
                started.clear()
        return program

    def carried(self, start: str, body: Body) -> Body:
        """`body` with one reduction, and those that it meets, as far on as is best."""
        reached, trial = {start}, body
        best, least = body, self.cost(body)
        for stmt in body.stmts:
            if not isinstance(stmt, Compute):
                continue
            if reached.isdisjoint(buffer.name for buffer in stmt.ins):
                continue
            new = behind(stmt, trial, self.fixed, self.mesh, self.names)
            if new is None:
                continue
            trial = new
            reached |= _new_reductions(new, body).keys()
            cost = self.cost(trial)
            if cost.improves(least):
                best, least = trial, cost
        return best

    # --- What it costs -------------------------------------------------------- #

    def cost(self, body: Body) -> _Cost:
        moved, count = NOTHING, 0
        for stmt in body.stmts:
            if isinstance(stmt, Set):
                one = self.cost_of(stmt)
                moved, count = moved + one.moved, count + one.communications
        return _Cost(moved, count)

    def cost_of(self, stmt: Set) -> _Cost:
        have, want = layout_of(stmt.source), layout_of(stmt.out)
        partial = stmt.source.partial
        if have == want and not partial:
            return _Cost(NOTHING, 0)
        streamed = self.streamed.get(stmt.out.name)
        streamed = streamed or self.streamed.get(stmt.source.name)
        steps = plan_reshard(have, want, partial, self.mesh)
        moved = moved_by(steps, have, self.whole(stmt.source), self.mesh, streamed)
        return _Cost(moved, sum(step.kind != "Select" for step in steps))

    def whole(self, buffer: Buffer) -> Buffer:
        """`buffer` with its global shape."""
        shards = [axes_size(dim.axes, self.mesh) for dim in buffer.dims]
        shape = [size * n for size, n in zip(buffer.shape, shards, strict=True)]
        return dataclasses.replace(buffer, shape=tuple(shape))

    # --- What becomes of it --------------------------------------------------- #

    def rewritten(self, program: Program, old: Body, new: Body) -> Program:
        """The program with the statements of `new`; marks and remarks follow."""
        gone = {n: s for n, s in old.reductions.items() if n not in new.makers}
        made = _new_reductions(new, old)
        marks = tuple(
            dataclasses.replace(mark, buffer=gone[mark.buffer].source.name)
            if isinstance(mark, StreamMark | BarrierMark) and mark.buffer in gone
            else mark
            for mark in program.marks
        )
        stale = {*gone, *made}
        remarks = [
            remark
            for remark in program.remarks
            if remark.kind != "layout" or dict(remark.facts)["value"] not in stale
        ]
        remarks += [self.remark(stmt, new, [*gone]) for stmt in made.values()]
        return dataclasses.replace(
            program, body=new.stmts, marks=marks, remarks=tuple(remarks)
        )

    def remark(self, stmt: Set, body: Body, gone: Sequence[str]) -> Remark:
        maker = body.makers[stmt.source.name]
        assert isinstance(maker, Compute), "only computations make partial values"
        before = made_text(stmt.source, operation(maker))
        after = spec_text(layout_of(stmt.out))
        reason = f"{' and '.join(gone)} stayed partial until here" if gone else ""
        moved, where = self.cost_of(stmt).moved, line_of(operation(maker))
        return layout_remark(stmt.out.name, before, after, moved, [reason], where)


def _new_reductions(new: Body, old: Body) -> dict[str, Set]:
    before = old.reductions
    return {n: s for n, s in new.reductions.items() if s is not before.get(n)}
