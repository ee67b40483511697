"""A transfer outside of chunked loops, and the rounds that it has left."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.schedule.intervals import TransferInterval
from jhost.lowering.schedule.permutes import Permutes, Round

TransferForm: TypeAlias = Literal["permutes", "collective"]
"""How a transfer is made: by permutes, or as the collective that it is."""


@dataclasses.dataclass(slots=True, eq=False)
class ScheduledTransfer:
    """A transfer, with its rounds that have not ended yet."""

    interval: TransferInterval
    way: TransferForm
    rounds: list[Round]
    known: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    """What it has `added`, by the number of rounds that were left."""

    @property
    def sums(self) -> bool:
        return not self.interval.gathers

    @property
    def held(self) -> int:
        """The bytes of a sum's terms, and of the terms that come from other devices.

        XLA's own all-reduce works in place.
        """
        if self.way == "collective" and self.interval.stmt.kind == "AllReduce":
            return self.interval.bytes
        sent = (s for s in self.rounds[0].sends if isinstance(s, ir.Communicate))
        return self.interval.bytes + sum(bytes_of(stmt.out) for stmt in sent)

    @property
    def added(self) -> int:
        """The bytes that a sum by permutes holds under way, beyond the bytes of its
        result.

        XLA copies the parts of the terms that are sent.
        """
        if self.way != "permutes":
            return 0
        left = len(self.rounds)
        if left not in self.known:  # it is asked at each block
            sends = self.rounds[0].sends
            parts = sum(bytes_of(s.out) for s in sends if isinstance(s, ir.Select))
            self.known[left] = self.held + parts - bytes_of(self.interval.stmt.out)
        return self.known[left]


def rounds_of(
    stmt: ir.Communicate, ways: Mapping[str, TransferForm], permutes: Permutes
) -> list[Round]:
    if ways[stmt.name] == "permutes":
        return permutes.rounds(stmt)
    return [Round((stmt,))]


def sends_of(transfers: Sequence[ScheduledTransfer]) -> list[ir.Stmt]:
    return [stmt for each in transfers for stmt in each.rounds[0].sends]


def waits_of(transfers: Sequence[ScheduledTransfer]) -> list[ir.Stmt]:
    return [stmt for each in transfers for stmt in each.rounds[0].waits]


def ends_of(transfers: Sequence[ScheduledTransfer]) -> list[ir.Stmt]:
    return [stmt for each in transfers for stmt in each.rounds[0].ends]
