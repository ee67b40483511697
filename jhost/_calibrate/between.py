"""Measurements between processes: all of them make the same calls at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jhost._calibrate.measure import SIZES, Measuring
from jhost._progress import Progress
from jhost.lowering.cost.fit import BetweenProcesses, Transfer
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.statements import CommunicationKind

_KINDS: Sequence[CommunicationKind] = ("AllGather", "ReduceScatter", "AllReduce")


class MeasuringBetween(Measuring):
    """One pass over collectives among a device of each process."""

    def __init__(
        self, start: Rates, *, budget: float = 0.5, scale: float = 1.0
    ) -> None:
        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        super().__init__([*first.values()], start, budget=budget, scale=scale)

    def steps(self) -> int:
        return len(_KINDS) * len(SIZES) + 1

    def measure(self, bar: Progress) -> BetweenProcesses:
        self.bar = bar
        moved = tuple(self.moved())
        return BetweenProcesses(moved=moved, taken=self.taken(moved))

    def moved(self) -> Iterator[Transfer]:
        for kind in _KINDS:
            for size in SIZES:
                yield self.move(self.mesh, kind, self.size(size, self.mesh.size))

    def agreed(self, count: int) -> int:
        """The count of process 0."""
        # Else one process would wait for ever for calls that another does not make.
        return int(multihost_utils.broadcast_one_to_all(np.int32(count)))
