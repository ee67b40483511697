"""Measurements of the devices of this process, for `lowering/cost/fit.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jhost._calibrate.chains import (
    AXIS,
    beside,
    chained,
    communicate,
    multiply,
    normalize,
    operand,
    row,
    small,
    square,
    touch,
)
from jhost._calibrate.timer import ChainTimer, OperationTime
from jhost._progress import Progress, no_progress
from jhost.lowering.cost.fit import Matmul, Measurements, Traffic, Transfer
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.statements import CommunicationKind
from jhost.runtime.compiler_options import PUTS
from jhost.runtime.nccl import why_no_puts

_SHAPES = ((1, 1, 1), (2, 1, 0.5), (1, 2, 0.5), (1, 0.5, 1))
"""Matmuls as factors of the side of a square one, which takes 1.5 ms."""

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


class Measuring:
    """One pass over everything, on `devices` whose rates are about those of `start`.

    `budget` and `scale` are the timer's.
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
        self.scale = scale
        self.timer = ChainTimer(start, budget=budget, scale=scale, agreed=self.agreed)
        self.bar = no_progress()

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

    def kernel(self) -> OperationTime:
        self.bar.step("launches of kernels")
        x, gpu = small(self.mesh), self.devices[0].platform == "gpu"
        more = _ONE_BY_ONE if gpu else {}
        return self.timer.cost(self.mesh, chained(touch), [x], times=10, more=more)

    def matmuls(self) -> Iterator[Matmul]:
        side = self.timer.side()
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

        return (
            self.timer.cost(self.mesh, chained(there_and_back), [x, w, back]).seconds
            / 2
        )

    def traffic(self) -> Iterator[Traffic]:
        self.bar.step("memory")
        for seconds in _TRAFFIC:
            count = self.start.memory * seconds * self.scale
            shape = max(1, int(count) // (4 * _COLUMNS)), _COLUMNS
            x = operand(self.mesh, shape, jnp.bfloat16, 1.0)
            cost = self.timer.cost(self.mesh, chained(normalize), [x])
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
        cost = self.timer.cost(mesh, chain, operands, more=more)
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
        w = square(self.mesh, self.timer.side() // 2)
        held = self.size(SIZES[-1], len(self.devices))
        step, x = communicate("CollectivePermute", self.mesh.size), row(self.mesh, held)
        cost = functools.partial(self.timer.cost, self.mesh)
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
        w = square(self.mesh, self.timer.side() // 2)
        each = self.timer.cost(self.mesh, chained(multiply), [w, w]).seconds
        count = self.agreed(min(_MOST, 1 + math.ceil(gather.seconds / each)))

        def work(x: jax.Array, w: jax.Array) -> jax.Array:
            for _ in range(count):
                x = multiply(x, w)
            return x

        step, x = communicate("AllGather", self.mesh.size), row(self.mesh, gather.held)
        alone = self.timer.cost(self.mesh, chained(work), [w, w]).seconds
        both = self.timer.cost(self.mesh, beside(step, work), [x, w, w]).seconds
        # What the matmuls are too short to hide is not taken from them.
        left = max(0.0, gather.seconds - alone)
        return min(1.0, max(0.0, (both - alone - left) / gather.seconds))

    def agreed(self, count: int) -> int:
        """The same count wherever this is measured."""
        return count


def multiprocessors(device: Any, start: Rates) -> int:
    """How many a device has; JAX knows it of GPUs."""
    return int(getattr(device, "core_count", start.multiprocessors))
