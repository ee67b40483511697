"""Times of several functions that take turns, block by block."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


@dataclasses.dataclass(frozen=True)
class Effort:
    """How often everything is called."""

    warmups: int = 10
    blocks: int = 5
    calls: int = 20
    lead_in: int = 40
    """Calls before each block that are not timed, so that the clocks are those of the
    block's own work: matmuls at the power limit run at 1.4 to 1.7 GHz, and after a
    pause or mere transfers at 1.9."""
    instances: int = 4
    """How many instances of a case are in one program."""
    settling_s: float = 4.0
    """Before the first block, seconds of the first function's calls: behind a pause the
    devices' power swings so long, with a period of one, and two H100s took 9.0 to 10.5
    ms for what takes them 9.6."""


FULL = Effort()
QUICK = Effort(warmups=3, blocks=3, calls=8, lead_in=16)
CODE_PATH = Effort(warmups=1, blocks=2, calls=2, lead_in=1, instances=2, settling_s=0)
"""On CPUs, where times mean nothing."""


class Deadline:
    """When to stop measuring; None for never."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float:
        """Seconds; infinite without a limit."""
        return float("inf") if self._end is None else self._end - time.monotonic()

    def passed(self) -> bool:
        """Whether time is up; for all processes when it is for process 0."""
        here = self.left() <= 0
        if jax.process_count() == 1:
            return here
        return bool(multihost_utils.broadcast_one_to_all(np.bool_(here)))


@dataclasses.dataclass
class Times:
    """Of one function: milliseconds per instance, host microseconds per call."""

    blocks_ms: list[float] = dataclasses.field(default_factory=list)
    host_us: list[float] = dataclasses.field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "min_ms": min(self.blocks_ms),
            "median_ms": statistics.median(self.blocks_ms),
            "blocks_ms": self.blocks_ms,
            "host_us": min(self.host_us),
        }


Call = Callable[[int], Any]
"""Calls a function with the given set of operands, without waiting."""


def measure(
    calls: Mapping[str, Call],
    effort: Effort,
    instances: int,
    deadline: Deadline,
    on_error: Callable[[str, Exception], None],
    idle: Collection[str] = (),
) -> dict[str, Times]:
    """Blocks of calls in turns A B C A B C; a function that fails is left out.

    Once the deadline has passed no further round begins, so all that take turns have
    the same number of blocks.  What leaves the devices `idle`, which is a pause, has
    its blocks after all others.
    """
    times = {name: Times() for name in calls}

    def attempt(name: str, block: Callable[[], None]) -> None:
        if name not in times:
            return
        try:
            block()
        except Exception as error:
            del times[name]
            on_error(name, error)

    for name, call in calls.items():
        attempt(name, lambda call=call: _warm_up(call, effort.warmups))
    busy = [name for name in times if name not in idle]
    if busy:
        attempt(busy[0], lambda: _settle(calls[busy[0]], effort.settling_s))
    for group in (busy, [name for name in times if name in idle]):
        for number in range(effort.blocks):
            if number and deadline.passed():
                break
            for name in group:
                attempt(
                    name,
                    lambda name=name: _block(
                        calls[name], effort, instances, times[name]
                    ),
                )
    return times


def _warm_up(call: Call, count: int) -> None:
    for number in range(count):
        jax.block_until_ready(call(number))


def _settle(call: Call, seconds: float) -> None:
    """Calls for about so long, as many in every process."""
    few = 4
    took, _ = _calls(call, few)
    count = int(few * seconds / took)
    if jax.process_count() > 1:
        count = int(multihost_utils.broadcast_one_to_all(np.int32(count)))
    _calls(call, count)


def _block(call: Call, effort: Effort, instances: int, times: Times) -> None:
    """One block: calls that nobody waits for, then the wait for all devices."""
    _calls(call, effort.lead_in)
    seconds, issued = _calls(call, effort.calls)
    times.blocks_ms.append(1e3 * seconds / effort.calls / instances)
    times.host_us.append(1e6 * issued / effort.calls)


def _calls(call: Call, count: int) -> tuple[float, float]:
    """The seconds of so many calls, and those until the last was issued."""
    result, start = None, time.perf_counter()
    for number in range(count):
        result = call(number)
    issued = time.perf_counter()
    jax.block_until_ready(result)
    return time.perf_counter() - start, issued - start
