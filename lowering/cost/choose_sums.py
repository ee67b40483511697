"""Choose whether sums that nothing waits for are made by permutes, beside other work.

All of a program's are, if that is predicted to gain: a collective runs alone, and what
comes by permutes has to be added, but is on its way while other work is done.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jhost._text import bytes_text
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import apart
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.statements import Communicate, PipelineKind
from jhost.lowering.loops.sums_later import sums_beside_work, with_sums_later
from jhost.lowering.units.segment import Segment

_GAIN = 0.99
"""What the time must be below, as a share of that with collectives."""

_LEAST = 1 << 20
"""Bytes below which any transfer takes its latency."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChooseSums(EachProgram):
    """All-reduces with work behind them -> permutes beside it, and additions.

    They are weighed by `rates` where the function's `pipeline` is open, and asked for
    where that is "p2p".
    """

    name: ClassVar[str] = "choose_sums"

    rates: Rates | None = None
    pipeline: PipelineKind | Literal["auto"] = "auto"

    def change(self, program: Program) -> Program:
        sums = [stmt for stmt in sums_beside_work(program) if self.is_open(stmt)]
        if not sums:
            return program
        later, swapped = with_sums_later(program, {stmt.name for stmt in sums})
        if self.pipeline == "auto" and not self.gains(program, later):
            return program
        return dataclasses.replace(later, remarks=(*program.remarks, _said(swapped)))

    def is_open(self, stmt: Communicate) -> bool:
        """Whether a sum may be made by permutes, as far as it stands for itself."""
        rates = self.rates
        if bytes_of(stmt.source) < _LEAST:
            return False
        if rates is not None and apart(stmt.axes, rates.reach):
            return False
        if rates is None or self.pipeline != "auto":
            return self.pipeline == "p2p"
        alone = not rates.link(stmt.kind, stmt.axes).beside_compute
        return alone and rates.permute.beside_compute

    def gains(self, program: Program, later: Program) -> bool:
        """Whether a program with its sums later is done earlier."""
        assert self.rates is not None
        before, after = (
            predict(Segment().apply(each), self.rates).total
            for each in (program, later)
        )
        return after < _GAIN * before


def _said(sums: list[Communicate]) -> Note:
    axes = " and ".join(dict.fromkeys(axis for stmt in sums for axis in stmt.axes))
    moved = bytes_text(sum(bytes_of(stmt.source) for stmt in sums))
    return Note(
        form=f"{{}}: {moved} summed over {axes} by permutes, beside what is computed "
        "next",
        values=tuple(stmt.out.name for stmt in sums),
    )
