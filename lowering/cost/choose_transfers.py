"""Choose whether transfers outside of loops are permutes beside other work.

Two kinds qualify: shards of weights, which are there long before they are read, and
sums of gradients, which nothing reads for long.  A collective runs alone.  Permutes run
beside other work, but what they bring has to be put together or added.  So all gathers
of a program go by permutes if that is predicted to gain, and so do all its sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

from jhost._text import bytes_text
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import between_processes
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.statements import Communicate, PipelineKind
from jhost.lowering.loops.gathers_early import gathers_beside_work, with_gathers_early
from jhost.lowering.loops.sums_later import sums_beside_work, with_sums_later
from jhost.lowering.units.segment import Segment

_GAIN = 0.99
"""What the time must be below, as a share of that with collectives."""

_LEAST = 1 << 20
"""Bytes below which any transfer takes its latency."""

_GATHERED = "{{}}: {} gathered over {} by permutes, beside what is computed before"
_SUMMED = "{{}}: {} summed over {} by permutes, beside what is computed next"


@dataclasses.dataclass(frozen=True, slots=True)
class ChooseTransfers(EachProgram):
    """Collectives with work before or behind them -> permutes beside it, and copies.

    They are weighed by `rates` where the function's `pipeline` is open, and asked for
    where that is "p2p".
    """

    name: ClassVar[str] = "choose_transfers"

    rates: Rates | None = None
    pipeline: PipelineKind | Literal["auto"] = "auto"

    def change(self, program: Program) -> Program:
        return self.with_sums(self.with_gathers(program))

    def with_gathers(self, program: Program) -> Program:
        gathers = [each for each in gathers_beside_work(program) if self.is_open(each)]
        if not gathers:
            return program
        early = with_gathers_early(program, {each.name for each in gathers})
        return self.better(program, early, _said(_GATHERED, gathers))

    def with_sums(self, program: Program) -> Program:
        sums = [each for each in sums_beside_work(program) if self.is_open(each)]
        if not sums:
            return program
        later, sent = with_sums_later(program, {each.name for each in sums})
        return self.better(program, later, _said(_SUMMED, sent))

    def is_open(self, stmt: Communicate) -> bool:
        """Whether one may be made by permutes, as far as it stands for itself."""
        rates = self.rates
        if bytes_of(stmt.source) < _LEAST:
            return False
        # Between processes a permute is an NCCL kernel too, and gains nothing.
        if rates is not None and between_processes(stmt.axes, rates.reach):
            return False
        if rates is None or self.pipeline != "auto":
            return self.pipeline == "p2p"
        # Collectives that run beside matmuls need no permutes in their place.
        alone = not rates.link(stmt.kind, stmt.axes).beside_compute
        return alone and rates.permute.beside_compute

    def better(self, program: Program, other: Program, note: Note) -> Program:
        """The `other` program, with a note, if that is asked for or gains."""
        if self.pipeline == "auto" and not self.gains(program, other):
            return program
        return dataclasses.replace(other, remarks=(*program.remarks, note))

    def gains(self, program: Program, other: Program) -> bool:
        """Whether the `other` program is done earlier.

        In both, collectives run alone, as they do in bodies.  XLA has each of these set
        out right before a matmul, for whose end NCCL's kernels then wait: four layers
        of Llama 8B with their weights sharded over two H100s took 48.4 ms so, where
        computations and collectives one after another make 48.
        """
        assert self.rates is not None
        before, after = (
            predict(Segment().apply(each), self.rates, in_body=True).total
            for each in (program, other)
        )
        return after < _GAIN * before


def _said(form: str, stmts: Sequence[Communicate]) -> Note:
    axes = " and ".join(dict.fromkeys(axis for stmt in stmts for axis in stmt.axes))
    wholes = (max(bytes_of(stmt.source), bytes_of(stmt.out)) for stmt in stmts)
    return Note(
        form=form.format(bytes_text(sum(wholes)), axes),
        values=tuple(stmt.out.name for stmt in stmts),
    )
