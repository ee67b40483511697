"""What the devices ran and when, from a profile that `jax.profiler` recorded.

A GPU has a plane of its own, with a line a stream; XLA's CPU devices share the host's
plane, where each event says which device it is of.  Both name the instruction of the
compiled module that an event belongs to.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from jhost import errors

_CALL = "jhost.profile"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that ran on a device; `start` and `end` are seconds of one clock.

    `operation` is XLA's instruction, in the module of that name; both are empty where
    the profiler does not know.  `name` is the kernel's, or the profiler's word.
    `stream` is empty where the device has none.
    """

    device: int
    stream: str
    name: str
    operation: str
    module: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of several calls in a row; `calls` are the times at which they began.

    A call begins after the one before has ended on all devices.
    """

    platform: str
    calls: tuple[float, ...]
    events: tuple[Event, ...]


def record(calls: Iterable[Callable[[], Any]]) -> Any:
    """The `jax.profiler.ProfileData` of `calls`, each waited for before the next.

    Raises:
        ProfileError: another profile is being recorded, or none can be.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what is measured
    with tempfile.TemporaryDirectory(prefix="jhost-profile-") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise errors.ProfileError(
                "jhost.profile records with jax.profiler, which cannot start: end the "
                "jax.profiler.trace around it first.",
                [str(error)],
            ) from error
        try:
            _run(calls)
        finally:
            jax.profiler.stop_trace()
        return ProfileData.from_file(str(_file(Path(folder))))


def _run(calls: Iterable[Callable[[], Any]]) -> None:
    for call in calls:
        with TraceAnnotation(_CALL):
            jax.block_until_ready(call())


def _file(folder: Path) -> Path:
    for path in folder.rglob("*.xplane.pb"):
        return path
    raise errors.ProfileError("jax.profiler has written no profile.", [str(folder)])


def read_trace(profile: Any) -> Trace:
    """What the devices of a `ProfileData` ran, and when its calls began."""
    # jaxlib makes its types when they are first used; before 0.12 each says that it has
    # no module, and ends the process where warnings are errors.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return _read(profile)


def _read(profile: Any) -> Trace:
    events: list[Event] = []
    host: list[Event] = []
    calls: list[float] = []
    for plane in profile.planes:
        if match := re.fullmatch(r"/device:GPU:(\d+)", plane.name):
            events += _of_gpu(plane.lines, int(match[1]))
        elif plane.name == "/host:CPU":
            for line in plane.lines:
                calls += [e.start_ns * 1e-9 for e in line.events if e.name == _CALL]
                host += _of_cpu(line.events)
    events.sort(key=_start)
    return Trace(
        platform="gpu" if events else "cpu",
        calls=tuple(sorted(calls)),
        events=tuple(events or sorted(host, key=_start)),
    )


def _start(event: Event) -> float:
    return event.start


def _of_gpu(lines: Iterable[Any], device: int) -> Iterator[Event]:
    """The events on the streams of a GPU; other lines sum them up."""
    for line in lines:
        if match := re.match(r"Stream #(\d+)", line.name):
            for event in line.events:
                yield _event(event, dict(event.stats), device, f"stream {match[1]}")


def _of_cpu(events: Iterable[Any]) -> Iterator[Event]:
    """The events in a host's thread that a device of XLA's CPU backend ran there."""
    for event in events:
        stats = dict(event.stats)
        if "hlo_op" in stats and "device_ordinal" in stats:
            yield _event(event, stats, stats["device_ordinal"], "")


def _event(event: Any, stats: dict[str, Any], device: int, stream: str) -> Event:
    return Event(
        device=device,
        stream=stream,
        name=event.name,
        operation=str(stats.get("hlo_op", "")),
        module=str(stats.get("hlo_module", "")),
        start=event.start_ns * 1e-9,
        end=event.end_ns * 1e-9,
    )


def in_lanes(events: Iterable[Event]) -> Iterator[Event]:
    """Events in order, those without a stream in as few lanes as hold a device's.

    XLA's threads take turns on the CPU: which of them ran something says nothing.
    """
    free: dict[int, list[float]] = {}
    for event in events:
        if event.stream:
            yield event
            continue
        ends = free.setdefault(event.device, [])
        lane = next((n for n, end in enumerate(ends) if end <= event.start), len(ends))
        ends[lane : lane + 1] = [event.end]
        yield dataclasses.replace(event, stream=f"lane {lane}")
