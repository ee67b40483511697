"""How much of its communication a call hid, on each device and for each statement.

Communication is *hidden* while something computes on the same device, and *exposed*
otherwise.  A sum counts each moment once, however many things run in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence

from jhost.lowering.ir.remarks import Prediction
from jhost.runtime.profile.intervals import Cover, length, subtract, union
from jhost.runtime.profile.origins import Activity
from jhost.runtime.profile.timeline import Span, Timeline

TIMES = ("total", "computation", "communication", "hidden", "exposed", "idle")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOverlap:
    """The seconds of a call on one device.

    `total` is the time from the call's first event on any device to its last.  It is
    the sum of `computation`, `exposed`, and `idle` (nothing runs).  `communication` is
    the sum of `hidden` and `exposed`.
    """

    device: str
    total: float
    computation: float
    communication: float
    hidden: float
    exposed: float
    idle: float

    @property
    def efficiency(self) -> float | None:
        """The hidden time divided by the shorter of communication and computation.

        1 is the best possible, and None says that one of the two is 0.  Without idle
        time it is the efficiency of the benchmarks: (computation + communication -
        total) / the shorter one.
        """
        shorter = min(self.communication, self.computation)
        return self.hidden / shorter if shorter else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatementOverlap:
    """A statement of the Host IR program, in all its iterations.

    Attributes:
        number: its place in the program; None for work of no statement.
        text: its text.
        values: the user's names of the values that it makes.
        activity: whether it computes or communicates.
        times: in how many iterations it ran.
        seconds: the sum over its spans, as a mean of the devices.
        exposed: the exposed part of that.
    """

    number: int | None
    text: str
    values: str
    activity: Activity
    times: int
    seconds: float
    exposed: float


def device_overlap(timeline: Timeline, number: int) -> DeviceOverlap:
    """The times of the call on the device of that number."""
    computing = _cover(timeline.of_device(number, "computation"))
    moving = _cover(timeline.of_device(number, "communication"))
    # Over all queues: two transfers at one time are exposed once.
    exposed = subtract(moving, computing)
    return DeviceOverlap(
        device=f"{timeline.platform} {number}",
        total=timeline.total,
        computation=length(computing),
        communication=length(moving),
        hidden=length(subtract(moving, exposed)),
        exposed=length(exposed),
        idle=timeline.total - length(union((*computing, *moving))),
    )


def _cover(spans: Iterable[Span]) -> Cover:
    return union((span.start, span.end) for span in spans)


def mean_overlap(devices: Sequence[DeviceOverlap]) -> DeviceOverlap:
    """The mean of the times of several devices."""

    def mean(field: str) -> float:
        return statistics.fmean(getattr(device, field) for device in devices)

    return DeviceOverlap(device="mean", **{name: mean(name) for name in TIMES})


def predicted_overlap(prediction: Prediction) -> DeviceOverlap:
    """The predicted times, in the same form.

    The total less the computation is exposed communication, up to all communication.
    The rest is idle time, in which devices wait for the host.
    """
    over = prediction.total - prediction.compute
    exposed = min(over, prediction.communication)
    return DeviceOverlap(
        device="predicted",
        total=prediction.total,
        computation=prediction.compute,
        communication=prediction.communication,
        hidden=prediction.communication - exposed,
        exposed=exposed,
        idle=over - exposed,
    )


def statement_overlaps(timeline: Timeline) -> Iterator[StatementOverlap]:
    """The statements that ran, in the order of the program; work of none comes last."""
    # All devices count, also those that never ran the statement: rows can be added.
    count = len(timeline.devices)
    ordered = sorted(timeline.spans, key=_key)
    for (*_, activity), spans in itertools.groupby(ordered, key=_key):
        found = list(spans)
        yield StatementOverlap(
            number=found[0].statement,
            text=timeline.text_of(found[0]),
            values=timeline.values_of(found[0]),
            activity=activity,
            times=len({span.iterations for span in found}),
            seconds=sum(span.end - span.start for span in found) / count,
            exposed=sum(length(span.exposed) for span in found) / count,
        )


def _key(span: Span) -> tuple[bool, int, Activity]:
    return span.statement is None, span.statement or 0, span.activity
