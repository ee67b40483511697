"""A timeline as a trace that https://ui.perfetto.dev and `chrome://tracing` open.

The format is Chrome's, as in the document "Trace Event Format".  A process stands for a
device and a thread for a queue.  One more thread has the exposed communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jhost.runtime.profile.intervals import Interval, union
from jhost.runtime.profile.timeline import Span, Timeline

_MICROSECONDS = 1e6  # the unit of `ts` and `dur`, whatever `displayTimeUnit` says
_EXPOSED = "exposed communication"


def perfetto_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as objects for `json`."""
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [
            event
            for device in timeline.devices
            for event in _of_device(timeline, device)
        ],
    }


def _of_device(timeline: Timeline, device: int) -> Iterator[dict[str, Any]]:
    spans = timeline.of_device(device)
    threads = [*timeline.streams(device), _EXPOSED]
    yield _name("process_name", f"{timeline.platform} {device}", device, 0)
    for number, thread in enumerate(threads):
        yield _name("thread_name", thread, device, number)
    for span in spans:
        arguments = {
            "statement": timeline.text_of(span),
            "iterations": list(span.iterations),
            "instruction": span.operation,
            "kernel": span.kernel,
        }
        thread = threads.index(span.stream)
        yield {
            **_complete(_label(span), (span.start, span.end), device, thread),
            "cat": span.activity,
            "args": arguments,
        }
    # On a track of its own, where time counts once however much is exposed in it.
    for part in union(part for span in spans for part in span.exposed):
        yield _complete("exposed", part, device, len(threads) - 1)


def _label(span: Span) -> str:
    """The instruction, and the iterations of the loops around its statement."""
    indices = "".join(f"[{i}]" for i in span.iterations)
    return f"{span.operation or span.kernel}{indices}"


def _name(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": kind,
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def _complete(
    name: str, interval: Interval, process: int, thread: int
) -> dict[str, Any]:
    start, end = interval
    return {
        "ph": "X",
        "name": name,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "pid": process,
        "tid": thread,
    }
