"""Transfers of one value as one row, for a screen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jhost._text import bytes_text, counted, seconds_text
from jhost.lowering.communication_report import CommunicationReport

_MOSTLY = 0.9
"""A transfer counts as beside nothing if this share of its time is exposed."""

NOTHING = 1e-9
"""Fewer seconds than this are rounding errors."""


def stands_beside_work(report: CommunicationReport) -> bool:
    return report.chunks > 1 or report.beside > 0 or bool(report.between)


@dataclasses.dataclass(frozen=True, slots=True)
class FoldedTransfer:
    """Transfers of one value, of one kind, over the same axes."""

    reports: tuple[CommunicationReport, ...]

    @property
    def bytes(self) -> int:
        return sum(report.bytes for report in self.reports)

    @property
    def times(self) -> int:
        """How often it runs; all chunks of a loop count as once."""
        return sum(report.times for report in self.reports)

    @property
    def seconds(self) -> float | None:
        return _sum(report.seconds for report in self.reports)

    @property
    def exposed(self) -> float | None:
        return _sum(report.exposed for report in self.reports)

    @property
    def stands_beside_work(self) -> bool:
        return all(map(stands_beside_work, self.reports))

    @property
    def weight(self) -> tuple[float, int]:
        """The key by which transfers are sorted."""
        return (self.exposed or 0.0, self.bytes)

    @property
    def text(self) -> str:
        first = self.reports[0]
        many = f"{self.times} x " if self.times > 1 else ""
        axes = ", ".join(first.axes)
        moved = f"{bytes_text(self.bytes)} a device"
        what = f"{many}{first.kind} of {first.value} over {axes}, {moved}"
        return f"{self.time_text}{what}; {first.lane}, {self.hidden_by}"

    @property
    def time_text(self) -> str:
        if self.seconds is None or self.exposed is None:
            return ""
        if self.exposed <= NOTHING:
            return f"0 of {seconds_text(self.seconds)} exposed: "
        exposed, seconds = seconds_text(self.exposed), seconds_text(self.seconds)
        return f"{exposed} of {seconds} exposed: "

    @property
    def hidden_by(self) -> str:
        """The work beside these transfers."""
        return " or ".join(dict.fromkeys(map(_beside_text, self.reports)))


def _beside_text(report: CommunicationReport) -> str:
    if report.written:
        return "as written"
    if report.chunks > 1:
        return f"in {report.chunks} chunks beside the loop's work"
    if report.beside:
        return f"beside {counted(report.beside, 'matmul')}"
    if report.between:
        return f"beside {report.between[0]}"
    if report.seconds and report.exposed is not None:
        if report.exposed < _MOSTLY * report.seconds:
            return "beside what XLA finds"
    return "beside nothing"


def _sum(parts: Iterable[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def folded_transfers(
    reports: Sequence[CommunicationReport],
) -> Sequence[FoldedTransfer]:
    """The transfers of each value as one, the longest exposed one first."""
    groups: dict[object, list[CommunicationReport]] = {}
    for report in reports:
        # By name: a layer that is written out 24 times has one row.
        key = report.kind, report.axes, report.value, report.written, report.lane
        groups.setdefault(key, []).append(report)
    folded = [FoldedTransfer(tuple(group)) for group in groups.values()]
    return sorted(folded, key=lambda each: each.weight, reverse=True)
