"""The arms of PyTorch, as entries beside those of the other arms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from benchmarks import torch_pool
from benchmarks.axes import Axes
from benchmarks.case import Case
from benchmarks.cases import RING
from benchmarks.timing import Deadline, Effort
from benchmarks.torch_pool import Pool, PoolError

MOST_SECONDS = 120.0
"""For one case; also for the start of the processes."""

Entry = dict[str, Any]


class Task(Protocol):
    """What the processes can be given."""

    def reason(self, arm: str) -> str | None:
        """Why an arm cannot do it, if so."""
        ...

    def job(self, arms: Sequence[str]) -> dict[str, Any]:
        """What they are told."""
        ...


@dataclasses.dataclass(frozen=True)
class Block:
    """One case of `benchmarks.cases`."""

    case: Case
    mesh: Mesh
    backward: bool
    effort: Effort

    def reason(self, arm: str) -> str | None:
        if self.backward:
            return "forward only"
        moves = {kind for kind, _ in self.case.moved(False)}
        if "exchange" in moves:
            return "has no experts here"
        if "send" in moves:
            return "has no stages here"
        if self.case.kind == RING:
            return "has no ring attention here"
        if "reduce" in moves and arm == "torch_async":
            return "has no matmul and all-reduce"
        return None

    def job(self, arms: Sequence[str]) -> dict[str, Any]:
        return torch_pool.job(self.case, self.mesh, arms, self.effort)


class TorchArms:
    """Starts the processes at once, so that they are up when the first case is."""

    def __init__(self, names: Sequence[str], axes: Axes, platform: str) -> None:
        self.names = tuple(names)
        self._reason = _reason_without(axes, platform)
        self._pool: Pool | None = None
        if self.names and self._reason is None:
            self._pool = Pool(axes.devices)

    @property
    def versions(self) -> dict[str, Any]:
        return {} if self._pool is None else self._pool.versions

    def settle(self) -> None:
        """Waits for the processes: their start would disturb what is timed."""
        if self._pool is None or self._reason is not None:
            return
        try:
            self._pool.ready(MOST_SECONDS)
        except PoolError as error:
            self._reason = f"PyTorch: {error}"

    def measure(self, task: Task, deadline: Deadline) -> dict[str, Entry]:
        """An entry for each arm: times, or why there are none."""
        entries = {name: self._skipped(name, task) for name in self.names}
        wanted = [name for name, entry in entries.items() if not entry]
        if not wanted:
            return entries
        if deadline.passed():
            return entries | {name: {"skipped": "no time left"} for name in wanted}
        assert self._pool is not None
        try:
            seconds = min(MOST_SECONDS, deadline.left() + 30)
            answers = self._pool.run(task.job(wanted), seconds)
        except PoolError as error:
            self._reason = f"PyTorch: {error}"
            return entries | {name: {"error": self._reason} for name in wanted}
        return entries | torch_pool.slowest(answers)

    def _skipped(self, name: str, task: Task) -> Entry:
        reason = self._reason or task.reason(name)
        return {} if reason is None else {"skipped": reason}

    def close(self) -> None:
        """Ends the processes."""
        if self._pool is not None:
            self._pool.close()


def _reason_without(axes: Axes, platform: str) -> str | None:
    """Why there can be no processes of PyTorch here, if so."""
    if platform != "gpu":
        return "needs GPUs"
    if axes.batch or jax.process_count() > 1:
        return "its processes know one axis, and are started by one"
    return torch_pool.reason_without()
