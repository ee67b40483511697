"""How much of its communication a call hid, on each device and of each statement.

Communication is *hidden* while something computes on the same device, else *exposed*.
Sums count a moment once, however much goes on in it.
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

    `total` is from the call's first event on any device to its last: the sum of
    `computation`, `exposed` and `idle`, in which nothing runs.  `communication` is the
    sum of `hidden` and `exposed`.
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
        """How much of the shorter of the two is hidden: 1 all of it, 0 none.

        None without communication or computation.  With no idle time it is what the
        benchmarks call so: (computation + communication - total) / the shorter one.
        """
        shorter = min(self.communication, self.computation)
        return self.hidden / shorter if shorter else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatementOverlap:
    """A statement of the Host IR program, in all its iterations.

    `number` is its place in the program, None for what belongs to no statement;
    `values` are what the user calls those that it makes.
    `times` is in how many iterations it ran; `seconds` and `exposed` are the sums over
    its spans, on a device in the mean.
    """

    number: int | None
    text: str
    values: str
    activity: Activity
    times: int
    seconds: float
    exposed: float


def device_overlap(timeline: Timeline, number: int) -> DeviceOverlap:
    """What the call spent on the device of that number."""
    computing = _cover(timeline.of_device(number, "computation"))
    moving = _cover(timeline.of_device(number, "communication"))
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
    """What it spent on each of several, in the mean."""

    def mean(field: str) -> float:
        return statistics.fmean(getattr(device, field) for device in devices)

    return DeviceOverlap(device="mean", **{name: mean(name) for name in TIMES})


def predicted_overlap(prediction: Prediction) -> DeviceOverlap:
    """The cost model's numbers.

    The part of the total that is not computation is exposed communication.  If the host
    decides the total, it is idle time.
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
    """The rows with spans, in the order of the program; then what has no statement."""
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
