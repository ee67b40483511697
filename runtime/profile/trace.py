"""What the devices ran and when, from a profile that `jax.profiler` recorded.

A GPU has a plane of its own in the profile, with a line for each stream.  XLA's CPU
devices share the host's plane, where each event names its device.  Both name the
instruction of the compiled module that an event belongs to.
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
from jax.profiler import ProfileData, ProfileOptions

from jhost import errors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that ran on a device.

    Attributes:
        device: the device's number.
        stream: the queue; "" on CPUs.
        name: the name of the kernel.
        operation: XLA's instruction; "" if the profiler does not know it.
        op_name: the metadata of the instruction, or "".
        module: the module of the instruction, or "".
        start: seconds on one clock for all events.
        end: the same.
    """

    device: int
    stream: str
    name: str
    operation: str
    op_name: str
    module: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerTrace:
    """What the devices of a `platform` ran, in the order of the starts."""

    platform: str
    events: tuple[Event, ...]


def record(run: Callable[[], Any]) -> Any:
    """The `jax.profiler.ProfileData` of a run, until its results are there.

    Raises:
        ProfileError: another profile is being recorded, or none can be.
    """
    options = ProfileOptions()
    options.python_tracer_level = 0  # tracing Python slows down the calls measured
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
            jax.block_until_ready(run())
        finally:
            jax.profiler.stop_trace()
        # From the file: `stop_trace` gives nothing (JAX 0.10 to 0.12).
        return ProfileData.from_file(str(_file(Path(folder))))


def _file(folder: Path) -> Path:
    for path in folder.rglob("*.xplane.pb"):
        return path
    raise errors.ProfileError("jax.profiler has written no profile.", [str(folder)])


def read_trace(profile: Any) -> ProfilerTrace:
    """What the devices of a `ProfileData` ran."""
    # jaxlib makes its types when they are first used.  Before 0.12 Python warns that
    # they have no module, and the process ends where warnings are errors.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        of_gpus, of_host = _events(profile)
    return ProfilerTrace(
        platform="gpu" if of_gpus else "cpu",
        events=tuple(sorted(of_gpus or of_host, key=lambda event: event.start)),
    )


def _events(profile: Any) -> tuple[list[Event], list[Event]]:
    """The events of GPUs, and the events of the host's threads."""
    of_gpus: list[Event] = []
    of_host: list[Event] = []
    for plane in profile.planes:
        if match := re.fullmatch(r"/device:GPU:(\d+)", plane.name):
            of_gpus += _of_gpu(plane.lines, int(match[1]))
        elif plane.name == "/host:CPU":
            for line in plane.lines:
                of_host += _of_cpu(line.events)
    return of_gpus, of_host


def _of_gpu(lines: Iterable[Any], device: int) -> Iterator[Event]:
    """The events on the streams of a GPU; other lines repeat them in summaries."""
    for line in lines:
        # A stream by its number: names of kinds of work may follow it.
        if match := re.match(r"Stream #(\d+)", line.name):
            for event in line.events:
                yield _event(event, dict(event.stats), device, f"queue {match[1]}")


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
        op_name=str(stats.get("name", "")),
        module=str(stats.get("hlo_module", "")),
        start=event.start_ns * 1e-9,
        end=event.end_ns * 1e-9,
    )


def in_lanes(events: Iterable[Event]) -> Iterator[Event]:
    """Events in order; those without a stream get as few lanes as a device needs."""
    # Threads of XLA's CPU backend take turns, so the thread of an event means nothing.
    free: dict[int, list[float]] = {}
    for event in events:
        if event.stream:
            yield event
            continue
        ends = free.setdefault(event.device, [])
        lane = next((n for n, end in enumerate(ends) if end <= event.start), len(ends))
        ends[lane : lane + 1] = [event.end]
        yield dataclasses.replace(event, stream=f"lane {lane}")
