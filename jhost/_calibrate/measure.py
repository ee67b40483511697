"""Measurements of the devices of this process, for `lowering/cost/fit.py`.

The time of one operation comes from the difference between a long chain of them and a
short one.  So neither the call nor the matmul before the chain counts.  The two take
turns, each after calls of its own: near the power limit, clocks fall with work and rise
with rest.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jhost._calibrate.chains import (
    AXIS,
    ChainCall,
    OperationChain,
    behind_matmul,
    beside,
    chained,
    communicate,
    compiled,
    multiply,
    normalize,
    operand,
    row,
    small,
    square,
    touch,
)
from jhost._progress import Progress, no_progress
from jhost._timing import take_turns
from jhost.lowering.cost.fit import Matmul, Measurements, Traffic, Transfer
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.statements import CommunicationKind
from jhost.runtime.compiler_options import PUTS
from jhost.runtime.nccl import why_no_puts

_SHORT, _LONG = 2, 10
"""Operations in the two chains; of the smallest kernels ten times as many."""

_SHAPES = ((1, 1, 1), (2, 1, 0.5), (1, 2, 0.5), (1, 0.5, 1))
"""Matmuls as factors of the side of a square one, which takes `_MATMUL` seconds."""

_MATMUL = 1.5e-3

_TRAFFIC = (0.04e-3, 0.16e-3)
"""Seconds that the kernels should take that read and write memory."""

_COLUMNS = 4096

_ONE_BY_ONE = {"xla_gpu_enable_command_buffer": ""}
"""Kernels that the host launches, and no graph of them: so are those of loops."""

SIZES = (1 << 20, 4 << 20, 16 << 20, 64 << 20)
"""Bytes of a communicated array that each device holds."""

_AMONG_ALL: Sequence[CommunicationKind] = (
    "CollectivePermute",
    "AllGather",
    "ReduceScatter",
    "AllReduce",
)

_IN_PAIRS: Sequence[CommunicationKind] = ("AllGather", "ReduceScatter")

_MOST = 16
"""Matmuls beside a collective: no more, however slow the network is."""

_ROUNDS = 7


@dataclasses.dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds of one operation on the devices, and of the host to launch it."""

    seconds: float
    host: float


class Measuring:
    """One pass over everything, on `devices` whose rates are about those of `start`.

    `budget` has the seconds for each pair of chains.  `scale` is a factor of all sizes,
    which suit such devices at 1.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        start: Rates,
        *,
        budget: float = 0.5,
        scale: float = 1.0,
    ) -> None:
        self.devices = devices
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.start = start
        self.budget = budget
        self.scale = scale
        self.bar = no_progress()
        self.matrices: dict[Mesh, jax.Array] = {}

    def steps(self) -> int:
        """How many steps the bar has."""
        moves = sum(len(kinds) for kinds, _ in self.groups()) + self.can_put
        return len(_SHAPES) + 2 + moves * len(SIZES) + 2 * self.may_hide()

    def run(self, bar: Progress) -> Measurements:
        self.bar = bar
        kernel = self.kernel()
        moved = tuple(self.moved())
        return Measurements(
            multiprocessors=multiprocessors(self.devices[0], self.start),
            matmuls=tuple(self.matmuls()),
            traffic=tuple(self.traffic()),
            launch=kernel.seconds,
            host=kernel.host,
            moved=moved,
            hidden=self.hidden() if self.may_hide() else None,
            taken=self.taken(moved) if self.may_hide() else None,
            puts=tuple(self.puts()),
        )

    # --- What one device does ------------------------------------------------- #

    def kernel(self) -> _Seconds:
        self.bar.step("launches of kernels")
        x, gpu = small(self.mesh), self.devices[0].platform == "gpu"
        more = _ONE_BY_ONE if gpu else {}
        return self.cost(self.mesh, chained(touch), [x], times=10, more=more)

    def matmuls(self) -> Iterator[Matmul]:
        side = self.side()
        for factors in _SHAPES:
            m, n, k = (max(1, int(side * factor)) for factor in factors)
            self.bar.step(f"matmul of {m} x {k} by {k} x {n}")
            yield Matmul(m=m, n=n, k=k, seconds=self.matmul(m, n, k))

    def matmul(self, m: int, n: int, k: int) -> float:
        """There and back, so that a result is an operand: two matmuls of one size."""
        x = operand(self.mesh, (m, k), jnp.bfloat16, 1.0)
        w = operand(self.mesh, (k, n), jnp.bfloat16, k**-0.5)
        # Scaled, so that a long chain of products neither grows nor vanishes.
        back = operand(self.mesh, (n, k), jnp.bfloat16, n**-0.5)

        def there_and_back(x: jax.Array, w: jax.Array, back: jax.Array) -> jax.Array:
            return multiply(jax.lax.optimization_barrier(multiply(x, w)), back)

        return self.cost(self.mesh, chained(there_and_back), [x, w, back]).seconds / 2

    def side(self) -> int:
        """Of a square matmul that takes long enough; whole tiles, if it is large."""
        side = (self.start.matmul * _MATMUL * self.scale / 2) ** (1 / 3)
        # A tile that is not full costs a whole one, and would be fitted as speed.
        unit = 1024 if side > 2048 else 64
        return max(unit, round(side / unit) * unit)

    def traffic(self) -> Iterator[Traffic]:
        self.bar.step("memory")
        for seconds in _TRAFFIC:
            count = self.start.memory * seconds * self.scale
            shape = max(1, int(count) // (4 * _COLUMNS)), _COLUMNS
            x = operand(self.mesh, shape, jnp.bfloat16, 1.0)
            cost = self.cost(self.mesh, chained(normalize), [x])
            yield Traffic(bytes=4 * math.prod(shape), seconds=cost.seconds)

    # --- What several do ------------------------------------------------------ #

    def groups(self) -> Iterator[tuple[Sequence[CommunicationKind], int]]:
        """What is communicated among how many devices."""
        count = len(self.devices)
        if count > 1:
            yield _AMONG_ALL, count
        if count > 2:
            yield _IN_PAIRS, 2

    def moved(self) -> Iterator[Transfer]:
        for kinds, count in self.groups():
            mesh = Mesh(np.array(self.devices[:count]), (AXIS,))
            for kind in kinds:
                for size in SIZES:
                    yield self.move(mesh, kind, self.size(size, count))

    def size(self, size: int, count: int) -> int:
        """About as many bytes, for elements of two bytes in equal parts."""
        return math.ceil(size * self.scale / (2 * count)) * 2 * count

    @functools.cached_property
    def can_put(self) -> bool:
        """Whether NCCL makes permutes that are one-sided."""
        return not why_no_puts(self.mesh)

    def puts(self) -> Iterator[Transfer]:
        for size in SIZES if self.can_put else ():
            held = self.size(size, self.mesh.size)
            yield self.move(self.mesh, "CollectivePermute", held, "put", PUTS)

    def move(
        self,
        mesh: Mesh,
        kind: CommunicationKind,
        held: int,
        said: str = "",
        more: Mapping[str, Any] | None = None,
    ) -> Transfer:
        self.bar.step(f"{said or kind} of {held / 1e6:.3g} MB among {mesh.size}")
        step, operands = communicate(kind, mesh.size), [row(mesh, held)]
        chain = chained(step)
        if kind == "CollectivePermute":
            # Alone, XLA runs it as a kernel like others; loops have it on a stream.
            chain = beside(step, touch)
            operands.append(small(mesh))
        cost = self.cost(mesh, chain, operands, more=more)
        return Transfer(
            kind=kind,
            devices=mesh.size,
            held=held,
            seconds=cost.seconds,
            host=cost.host,
        )

    def may_hide(self) -> bool:
        """Whether permutes can run beside matmuls; devices of a CPU share its cores."""
        return len(self.devices) > 1 and self.devices[0].platform != "cpu"

    def hidden(self) -> float:
        """How much shorter permutes and matmuls are together than one by one."""
        self.bar.step("permutes beside matmuls")
        w = square(self.mesh, self.side() // 2)
        held = self.size(SIZES[-1], len(self.devices))
        step, x = communicate("CollectivePermute", self.mesh.size), row(self.mesh, held)
        cost = functools.partial(self.cost, self.mesh)
        moves = cost(beside(step, touch), [x, small(self.mesh)]).seconds
        work = cost(chained(multiply), [w, w]).seconds
        both = cost(beside(step, multiply), [x, w, w]).seconds
        # 1 if the shorter one costs nothing beside the longer one, 0 if they take
        # turns.
        return (work + moves - both) / min(work, moves)

    def taken(self, moved: Sequence[Transfer]) -> float:
        """How much longer matmuls take with a gather beside, as a share of its time.

        There are enough of them to hide the gather, if anything can.
        """
        self.bar.step("a gather beside matmuls")
        among = (m for m in moved if m.devices == self.mesh.size)
        gathers = (m for m in among if m.kind == "AllGather")
        gather = max(gathers, key=lambda m: m.held)
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

    def agreed(self, count: int) -> int:
        """The same count wherever this is measured."""
        return count

    # --- Time ----------------------------------------------------------------- #

    def cost(
        self,
        mesh: Mesh,
        chain: OperationChain,
        operands: Sequence[jax.Array],
        *,
        times: int = 1,
        more: Mapping[str, Any] | None = None,
    ) -> _Seconds:
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
        return _Seconds(
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
        return max(1, int(self.budget / (len(calls) * _ROUNDS * longest)))


def multiprocessors(device: Any, start: Rates) -> int:
    """How many a device has; JAX knows it of GPUs."""
    return int(getattr(device, "core_count", start.multiprocessors))


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
