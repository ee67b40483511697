"""One call of a program on its devices: what ran when, of which statement and chunk."""

from __future__ import annotations

import bisect
import dataclasses
import re
import statistics
from collections.abc import Collection, Mapping, Sequence

from jhost import errors
from jhost.runtime.intervals import Cover, Interval, subtract, union
from jhost.runtime.origins import Activity, Operation
from jhost.runtime.trace import Event, Trace, in_lanes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that ran, from `start` to `end`: seconds since the call's first event.

    `operation` is XLA's instruction, and `kernel` the profiler's name for it.
    `statement` is a place in the timeline's statements, or None for what XLA does on
    its own account; `iterations` are those of the loops around it.  `exposed` is the
    part of a communication beside which nothing computes on its device.
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

    `calls` has how long each of the recorded calls took, in seconds; this is the one
    in the middle, and `total` its time.
    """

    name: str
    platform: str
    statements: tuple[str, ...]
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
        """Those of a device, in the order of their numbers."""
        found = {span.stream for span in self.of_device(device)}
        return tuple(sorted(found, key=lambda stream: (len(stream), stream)))

    def text_of(self, span: Span) -> str:
        """The statement that a span is of."""
        if span.statement is None or span.statement >= len(self.statements):
            return "(of no statement)"
        return self.statements[span.statement]

    def only(self, devices: Collection[int] | None) -> Timeline:
        """The same call on some of its devices; None is all.

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
    trace: Trace,
    operations: Mapping[str, Operation],
    *,
    name: str,
    module: str,
    statements: Sequence[str],
) -> Timeline:
    """The call in the middle, of those in `trace`.

    Args:
        trace: what was recorded.
        operations: what the instructions of the compiled module do.
        name: the function's.
        module: the compiled module's name; events of others are left out.
        statements: the text of each statement of the Host IR program.

    Raises:
        ProfileError: the trace has nothing of the module.
    """
    calls = [_spans(call, operations) for call in _calls(trace, module)]
    calls = [spans for spans in calls if spans]
    if not calls:
        raise errors.ProfileError(
            f"The profile of {name} has no event of a device. On GPUs, jax.profiler "
            "needs NVIDIA's CUPTI, and the right to use it (NVreg_"
            "RestrictProfilingToAdminUsers=0, or a container with SYS_ADMIN).",
            [f"{len(trace.events)} events, none of {module}"],
        )
    times = tuple(max(span.end for span in spans) for spans in calls)
    middle = times.index(statistics.median_low(times))
    return Timeline(
        name=name,
        platform=trace.platform,
        statements=tuple(statements),
        calls=times,
        total=times[middle],
        spans=_with_exposed(calls[middle]),
    )


def _calls(trace: Trace, module: str) -> list[list[Event]]:
    """The events of `module` by the call that they are of."""
    calls: list[list[Event]] = [[] for _ in trace.calls]
    for event in trace.events:
        number = bisect.bisect_right(trace.calls, event.start) - 1
        if number >= 0 and event.module in ("", module):
            calls[number].append(event)
    return calls


def _spans(call: Sequence[Event], operations: Mapping[str, Operation]) -> list[Span]:
    """What works in a call, since its first event; loops and the like only hold it."""
    works = [(event, _operation(event, operations)) for event in call]
    works = [(event, operation) for event, operation in works if operation.activity]
    events = in_lanes(event for event, _ in works)
    first = min((event.start for event, _ in works), default=0.0)
    return [
        _span(event, operation, first)
        for event, (_, operation) in zip(events, works, strict=True)
    ]


# The names of what no instruction is known for: NCCL's kernels, copies between GPUs.
_COMMUNICATES = re.compile(r"nccl|P2P|peer", re.IGNORECASE)


def _operation(event: Event, operations: Mapping[str, Operation]) -> Operation:
    if event.operation in operations:
        return operations[event.operation]
    moves = _COMMUNICATES.search(event.name)
    return Operation("communication" if moves else "computation", None)


def _span(event: Event, operation: Operation, first: float) -> Span:
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
    """The spans, with what of each communication nothing hides."""
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
