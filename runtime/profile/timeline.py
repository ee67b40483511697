"""One call of a program on its devices: what ran when, of which statement and chunk."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Collection, Sequence

from jhost import errors
from jhost.runtime.profile.intervals import Cover, Interval, subtract, union
from jhost.runtime.profile.origins import Activity, DeviceOperation, Operations
from jhost.runtime.profile.trace import Event, ProfilerTrace, in_lanes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that ran on a device.

    Attributes:
        device: the device's number.
        stream: the queue.
        activity: whether it computes or communicates.
        operation: XLA's instruction.
        kernel: the profiler's name for what ran.
        statement: a place in the timeline's statements; None for work that XLA adds.
        iterations: the iterations of the loops around the statement.
        start: seconds since the call's first event.
        end: the same.
        exposed: when nothing computed on the device beside this communication.
    """

    device: int
    stream: str
    activity: Activity
    operation: str
    kernel: str
    statement: int | None
    iterations: tuple[int, ...]
    start: float
    end: float
    exposed: Cover = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A call on `platform`'s devices, with the statements of its Host IR program.

    `calls` has the seconds of each recorded call.  This is the call with the median,
    and `total` is its time.
    """

    name: str
    platform: str
    statements: tuple[str, ...]
    values: tuple[str, ...]
    calls: tuple[float, ...]
    total: float
    spans: tuple[Span, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that ran anything."""
        return tuple(sorted({span.device for span in self.spans}))

    def of_device(self, device: int, activity: Activity | None = None) -> list[Span]:
        """The spans of a device, of one activity or of both."""
        return [
            span
            for span in self.spans
            if span.device == device and activity in (None, span.activity)
        ]

    def streams(self, device: int) -> tuple[str, ...]:
        """The queues of a device, in the order of their numbers."""
        found = {span.stream for span in self.of_device(device)}
        # By length first: as texts alone, "queue 10" stands before "queue 9".
        return tuple(sorted(found, key=lambda stream: (len(stream), stream)))

    def text_of(self, span: Span) -> str:
        """The text of the statement that a span belongs to."""
        if span.statement is None or span.statement >= len(self.statements):
            return "(of no statement)"
        return self.statements[span.statement]

    def values_of(self, span: Span) -> str:
        """The user's names of the values that a span makes; "" if unknown."""
        known = span.statement is not None and span.statement < len(self.values)
        return self.values[span.statement or 0] if known else ""

    def only(self, devices: Collection[int] | None) -> Timeline:
        """This call on some of its devices; None is all.

        Raises:
            OptionError: a device that ran nothing.
        """
        if devices is None:
            return self
        if unknown := set(devices) - set(self.devices):
            raise errors.OptionError(
                f"The call of {self.name} ran on devices "
                f"{', '.join(map(str, self.devices))}.",
                [f"device {number!r}" for number in unknown],
            )
        spans = tuple(span for span in self.spans if span.device in devices)
        return dataclasses.replace(self, spans=spans)


def timeline(
    trace: ProfilerTrace,
    operations: Operations,
    *,
    calls: int,
    name: str,
    module: str,
    statements: Sequence[str],
    values: Sequence[str] = (),
) -> Timeline:
    """The call with the median time, of the calls in `trace`.

    Args:
        trace: the recorded events.
        operations: what the instructions of the compiled module do.
        calls: how many calls were made.
        name: the function's name.
        module: the compiled module's name; events of other modules are left out.
        statements: the text of each statement of the Host IR program.
        values: for each statement, the user's names of the values that it makes.

    Raises:
        ProfileError: the trace has nothing of the module, or has lost much of it.
    """
    events = [
        event
        for event in trace.events
        if not module or event.module in ("", module)
        if _operation(event, operations).activity  # loops only hold what works
    ]
    if not events:
        raise errors.ProfileError(
            f"The profile of {name} has no event of a device: nothing ran there, or "
            "the profiler cannot see it. On GPUs, jax.profiler needs NVIDIA's CUPTI, "
            "and the right to use it (the driver's option "
            "NVreg_RestrictProfilingToAdminUsers=0, or SYS_ADMIN in a container).",
            [f"{len(trace.events)} events, none of {module}"],
        )
    found = [_spans(call, operations) for call in _by_call(events, calls, name)]
    times = tuple(max(span.end for span in spans) for spans in found)
    # A call that ran, and no mean of two, because its spans are shown.
    middle = times.index(statistics.median_low(times))
    return Timeline(
        name=name,
        platform=trace.platform,
        statements=tuple(statements),
        values=tuple(values),
        calls=times,
        total=times[middle],
        spans=_with_exposed(found[middle]),
    )


def _by_call(events: Sequence[Event], calls: int, name: str) -> list[list[Event]]:
    """The events of each call, on all devices.

    On one device calls follow one another, but two devices may be in different calls.
    """
    found: list[list[Event]] = [[] for _ in range(calls)]
    for device in {event.device for event in events}:
        mine = [event for event in events if event.device == device]
        begins = _begins(mine, calls)
        if not begins:
            raise errors.ProfileError(
                f"The profile of {name} has lost events: nothing in it ran as often as "
                f"it was called. Close what else uses the devices, and try again.",
                [f"device {device}: {len(mine)} events of {calls} calls"],
            )
        for event in mine:
            # What ran before the first known beginning belongs to the first call.
            found[max(bisect.bisect(begins, event.start) - 1, 0)].append(event)
    return found


def _begins(events: Sequence[Event], calls: int) -> list[float]:
    """When each call began on a device, by the instructions that ran once in each call.

    If there are none, by instructions that ran equally often in each call.  Two kinds
    do not count, because they may have run in the first call only.  One are events of
    no instruction, such as a fill that a library asks for.  The other are some events
    of captured graphs, which follow each other faster than most others do.
    """
    starts: dict[tuple[str, str], list[float]] = {}
    named = [event for event in events if event.operation]
    for event in sorted(named or events, key=lambda event: event.start):
        starts.setdefault((event.operation, event.name), []).append(event.start)
    once = [times for times in starts.values() if len(times) == calls]
    often = [t[:: len(t) // calls] for t in starts.values() if not len(t) % calls]
    found = [(_least_step(times), times) for times in once or often]
    usual = statistics.median(step for step, _ in found) if found else 0
    regular = [times for step, times in found if step >= usual / 2]
    return [min(times) for times in zip(*regular, strict=True)]


def _least_step(times: Sequence[float]) -> float:
    return min((b - a for a, b in itertools.pairwise(times)), default=0.0)


def _spans(call: Sequence[Event], operations: Operations) -> list[Span]:
    """The events of a call, since the first of them."""
    ordered = sorted(call, key=lambda event: event.start)
    first = ordered[0].start
    return [
        _span(event, _operation(event, operations), first)
        for event in in_lanes(ordered)
    ]


def _operation(event: Event, operations: Operations) -> DeviceOperation:
    return operations.find(event.operation, event.op_name, event.name)


def _span(event: Event, operation: DeviceOperation, first: float) -> Span:
    assert operation.activity is not None
    origin = operation.origin
    return Span(
        device=event.device,
        stream=event.stream,
        activity=operation.activity,
        operation=event.operation,
        kernel=event.name,
        statement=None if origin is None else origin.statement,
        iterations=() if origin is None else origin.iterations,
        start=event.start - first,
        end=event.end - first,
    )


def _with_exposed(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans, with the exposed part of each communication."""
    computing: dict[int, list[Interval]] = {span.device: [] for span in spans}
    for span in spans:
        if span.activity == "computation":
            computing[span.device].append((span.start, span.end))
    covers = {device: union(intervals) for device, intervals in computing.items()}

    def exposed(span: Span) -> Cover:
        if span.activity == "computation":
            return ()
        return subtract(union([(span.start, span.end)]), covers[span.device])

    return tuple(dataclasses.replace(span, exposed=exposed(span)) for span in spans)
