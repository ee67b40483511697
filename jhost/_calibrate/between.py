"""Measurements between processes: all of them make the same calls at the same time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jhost._calibrate.chains import (
    ChainCall,
    beside,
    chained,
    communicate,
    multiply,
    row,
    square,
)
from jhost._calibrate.measure import SIZES, Measuring
from jhost._progress import Progress
from jhost.lowering.cost.fit import BetweenProcesses, Transfer
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.statements import CommunicationKind

_KINDS: Sequence[CommunicationKind] = ("AllGather", "ReduceScatter", "AllReduce")

_MOST = 16
"""Matmuls beside a collective: no more, however slow the network is."""


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

    def taken(self, moved: Sequence[Transfer]) -> float:
        """How much longer matmuls take with a gather beside, as a share of its time.

        There are enough of them to hide the gather, if anything can.
        """
        self.bar.step("a gather beside matmuls")
        gather = max((m for m in moved if m.kind == "AllGather"), key=lambda m: m.held)
        w = square(self.mesh, self.side() // 2)
        each = self.cost(self.mesh, chained(multiply), [w, w]).seconds
        count = self.agreed(min(_MOST, 1 + math.ceil(gather.seconds / each)))

        def work(x: jax.Array, w: jax.Array) -> jax.Array:
            for _ in range(count):
                x = multiply(x, w)
            return x

        step, x = communicate("AllGather", self.mesh.size), row(self.mesh, gather.held)
        alone = self.cost(self.mesh, chained(work), [w, w]).seconds
        both = self.cost(self.mesh, beside(step, work), [x, w, w]).seconds
        # What the matmuls are too short to hide is not taken from them.
        left = max(0.0, gather.seconds - alone)
        return min(1.0, max(0.0, (both - alone - left) / gather.seconds))

    def count(self, calls: Mapping[str, ChainCall], longest: float) -> int:
        # Else one process would wait for ever for calls that another does not make.
        return self.agreed(super().count(calls, longest))

    def agreed(self, count: int) -> int:
        """The count of process 0."""
        return int(multihost_utils.broadcast_one_to_all(np.int32(count)))
