"""Choose how a program's permutes move: by copies from peer to peer, or by NCCL's puts.

XLA has one way for a whole executable.  A put takes longer on the devices.  A peer copy
keeps the host's threads busy, because they meet for each one.  So puts win where
launches are the limit.  Both ways are predicted for the whole program, and peer copies
stay unless puts gain.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import PermuteKind, PermuteReport, Prediction

_GAIN = 0.97
"""The time with puts must be below this share of the time with peer copies."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChoosePermutes:
    """A finished program -> the same, with a remark that says how its permutes move.

    There is no remark where no loop permutes, or where NCCL cannot put (by `rates`).
    """

    name: ClassVar[str] = "choose_permutes"

    rates: Rates | None = None

    def apply(self, program: Program) -> Program:
        if self.rates is None or self.rates.put is None or not _permutes(program):
            return program
        ranked = ranked_kinds(program, self.rates)
        report = PermuteReport(kind=ranked[0][0], predicted=tuple(ranked))
        return dataclasses.replace(program, remarks=(*program.remarks, report))


def _permutes(program: Program) -> bool:
    """Whether a loop moves chunks from device to device."""
    return any(
        isinstance(stmt, ir.Communicate) and stmt.kind == "CollectivePermute"
        for stmt in statements(program)
    )


def ranked_kinds(
    program: Program, rates: Rates, **how: Any
) -> list[tuple[PermuteKind, Prediction]]:
    """The prediction for each kind of permutes that there is, the better one first."""
    found: list[tuple[PermuteKind, Prediction]] = [
        (kind, predict(program, each, **how)) for kind, each in kinds_of(rates)
    ]
    copied, *puts = found
    if puts and puts[0][1].total < _GAIN * copied[1].total:
        return [*puts, copied]
    return [copied, *puts]


def kinds_of(rates: Rates) -> list[tuple[PermuteKind, Rates]]:
    """Each kind of permutes that there is, with the rates of a program that has it."""
    copies: tuple[PermuteKind, Rates] = ("peer copies", rates)
    if rates.put is None:
        return [copies]
    # All permutes or none: XLA has one option for the whole program.
    return [copies, ("puts", dataclasses.replace(rates, permute=rates.put))]
