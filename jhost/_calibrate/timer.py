"""Timing of single operations, by chains of them.

The time of one operation comes from the difference between a long chain of them and a
short one.  So neither the call nor the matmul before the chain counts.  The two take
turns, each after calls of its own: near the power limit, clocks fall with work and rise
with rest.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jhost._calibrate.chains import (
    ChainCall,
    OperationChain,
    behind_matmul,
    compiled,
    square,
)
from jhost._timing import take_turns
from jhost.lowering.cost.rates import Rates

_SHORT, _LONG = 2, 10
"""Operations in the two chains.  Chains of the smallest kernels have ten times more."""

_MATMUL = 1.5e-3
"""Seconds of a square matmul that stands for the large ones of a program."""

_ROUNDS = 7


@dataclasses.dataclass(frozen=True, slots=True)
class OperationTime:
    """Seconds of one operation on the devices, and of the host to launch it."""

    seconds: float
    host: float


class ChainTimer:
    """Times operations on devices whose rates are about those of `start`.

    `budget` has the seconds for each pair of chains.  `scale` is a factor of all sizes,
    which suit such devices at 1.  `agreed` makes a count the same wherever this is
    measured.
    """

    def __init__(
        self,
        start: Rates,
        *,
        budget: float,
        scale: float,
        agreed: Callable[[int], int],
    ) -> None:
        self.start = start
        self.budget = budget
        self.scale = scale
        self.agreed = agreed
        self.matrices: dict[Mesh, jax.Array] = {}

    def side(self) -> int:
        """The side of a square matmul that takes long enough; large ones fill tiles."""
        side = (self.start.matmul * _MATMUL * self.scale / 2) ** (1 / 3)
        # A tile that is not full costs a whole one, and would be fitted as speed.
        unit = 1024 if side > 2048 else 64
        return max(unit, round(side / unit) * unit)

    def cost(
        self,
        mesh: Mesh,
        chain: OperationChain,
        operands: Sequence[jax.Array],
        *,
        times: int = 1,
        more: Mapping[str, Any] | None = None,
    ) -> OperationTime:
        """What one more step takes in a chain, which is `times` as long as usual."""
        given = [self.first(mesh), *operands]
        short, long = (
            compiled(mesh, behind_matmul(chain, times * count), given, more)
            for count in (_SHORT, _LONG)
        )
        seconds = self.medians({"short": short, "long": long})
        count = times * (_LONG - _SHORT)
        each = (seconds["long"] - seconds["short"]) / count
        # A difference of times, unless noise is all there is of it.
        return OperationTime(
            seconds=each if each > 0 else seconds["long"] / (times * _LONG),
            host=max(0.0, (_host(long) - _host(short)) / count),
        )

    def first(self, mesh: Mesh) -> jax.Array:
        """The matrix of the matmul before each chain, made once for a mesh."""
        if mesh not in self.matrices:
            self.matrices[mesh] = square(mesh, self.side())
        return self.matrices[mesh]

    def medians(self, calls: Mapping[str, ChainCall]) -> dict[str, float]:
        """Seconds of a call of each, as they take turns."""
        count = self.count(calls, max(_once(call) for call in calls.values()))
        # The first calls of each are not timed: clocks settle in them.
        times = take_turns(calls, rounds=_ROUNDS, calls=count, warmups=count)
        return {name: statistics.median(each) for name, each in times.items()}

    def count(self, calls: Mapping[str, ChainCall], longest: float) -> int:
        """How many calls in a round the budget has time for."""
        # Each call waits for all processes, so all make the same number.
        return self.agreed(max(1, int(self.budget / (len(calls) * _ROUNDS * longest))))


def _once(call: ChainCall) -> float:
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _host(call: ChainCall) -> float:
    """Seconds until a call returns, which does not wait for the devices."""
    times: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        jax.block_until_ready(result)
    # The least: the host has other work at times, and never less than this.
    return min(times)
