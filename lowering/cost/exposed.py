"""How long each transfer of a program takes, and how much of it is exposed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from jhost.lowering.cost.clock import ends_of
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.simulate import predict
from jhost.lowering.cost.tasks import unrolled
from jhost.lowering.ir.derived import derived_with
from jhost.lowering.ir.program import Program

_NOTHING = 1e-9
"""Fewer seconds than this are rounding errors of sums and differences."""


@dataclasses.dataclass(frozen=True, slots=True)
class TransferTime:
    """The predicted seconds of a communication, in all chunks of one run.

    The device computes nothing during the `exposed` seconds of them.
    """

    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: TransferTime) -> TransferTime:
        return TransferTime(self.seconds + other.seconds, self.exposed + other.exposed)

    def __mul__(self, times: int) -> TransferTime:
        return TransferTime(self.seconds * times, self.exposed * times)


@derived_with
def transfer_times(program: Program, rates: Rates) -> Mapping[str, TransferTime]:
    """The times of a program's own communications by name, without those in its bodies.

    A loop or branch with a body counts as computation for all of its time.
    """
    tasks = unrolled(program, rates, partial(predict, rates=rates))
    spans = {
        number: _ExposedStretch(end - tasks[number].seconds, end)
        for number, end in ends_of(tasks).items()
        if tasks[number].seconds
    }
    # A union of spans: a second in which two kernels compute counts once.
    busy = _union(span for n, span in spans.items() if not tasks[n].transfer)
    found: dict[str, TransferTime] = {}
    for number, span in spans.items():
        if name := tasks[number].name:
            exposed = span.seconds - sum(_common(span, other) for other in busy)
            exposed = exposed if exposed > _NOTHING else 0.0
            known = found.get(name, TransferTime())
            found[name] = known + TransferTime(span.seconds, exposed)
    return found


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _ExposedStretch:
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def _common(stretch: _ExposedStretch, other: _ExposedStretch) -> float:
    """The seconds that two have in common."""
    return max(min(stretch.end, other.end) - max(stretch.start, other.start), 0.0)


def _union(spans: Iterable[_ExposedStretch]) -> Sequence[_ExposedStretch]:
    """The same moments, with none in two spans."""
    found: list[_ExposedStretch] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = _ExposedStretch(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found
