"""Rates of a kind of device, fitted to measurements.

A measurement is the time that one more operation adds to a chain of operations: seconds
on the device, and seconds on the host.  Rates are for whole programs, which are slower
than chains.  Chains cannot tell the delay of a transfer from its latency, or how long
threads take to meet.  These stay as in the rates that the fit starts from.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import get_args

import numpy as np

from jhost.lowering.cost.rates import Link, Rates
from jhost.lowering.ir.statements import CommunicationKind
from jhost.lowering.ir.transfers import received_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Factors from chains of one operation to programs.

    They differ because kernels in programs read in many orders, and streams wait for
    each other.

    Attributes:
        memory: of the bytes per second that kernels read and write.
        launch: of the seconds between two kernels.
        before: of the seconds before the first byte of a permute.
        taken: of what collectives of one process take from matmuls beside them.
    """

    memory: float
    launch: float
    before: float
    taken: float


PROGRAMS = Programs(
    memory=2.7 / 2.95, launch=3 / 1.27, before=34 / 17.3, taken=0.8 / 0.4
)
"""The shipped rates, which were fitted to programs, over chains on two H100s.

The chains were measured on 2026-11-24, what collectives take on four H200s on
2026-11-27.
"""

HIDDEN = 0.5
"""Transfers run beside matmuls if matmuls hide at least this share of their time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """Seconds of one bfloat16 matmul of m x k by k x n, among many."""

    m: int
    n: int
    k: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Seconds of one kernel that reads and writes so many bytes in all."""

    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Seconds of one communication among `devices` that hold `held` bytes each."""

    kind: CommunicationKind
    devices: int
    held: int
    seconds: float
    host: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(CommunicationKind):
            raise ValueError(f"there is no communication of the kind {self.kind!r}")

    @property
    def received(self) -> float:
        """The bytes that each device receives."""
        return received_bytes(self.kind, self.held, self.devices)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BetweenProcesses:
    """Measurements of collectives among a device of each process of a job.

    Attributes:
        moved: collectives by size.
        taken: how much longer matmuls beside one take, as a share of its time.
    """

    moved: tuple[Transfer, ...]
    taken: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of the devices of a process.

    Attributes:
        multiprocessors: how many each device has.
        matmuls: of a few shapes, at the clocks of steady work.
        traffic: of kernels that only read and write memory.
        launch: the seconds that one more kernel with almost no work takes.
        host: the seconds that the host needs to launch it.
        moved: permutes and collectives by size and number of devices; empty where there
            is one device.
        hidden: the share of a permute's time that matmuls beside it hide; None where
            matmuls hide nothing.
        taken: how much longer matmuls beside a collective take, as a share of its time;
            None where that was not measured.
        puts: permutes by size that NCCL puts; empty where it cannot.
        between: the measurements between processes; None in a job of one process.
    """

    multiprocessors: int
    matmuls: tuple[Matmul, ...]
    traffic: tuple[Traffic, ...]
    launch: float
    host: float
    moved: tuple[Transfer, ...] = ()
    hidden: float | None = None
    taken: float | None = None
    puts: tuple[Transfer, ...] = ()
    between: BetweenProcesses | None = None


def fitted(measured: Measurements, start: Rates) -> Rates:
    """The `measured` rates; a rate that was not measured comes from `start`."""
    rates = dataclasses.replace(
        start,
        multiprocessors=measured.multiprocessors,
        memory=_bandwidth(measured.traffic) * PROGRAMS.memory,
        launch=measured.launch * PROGRAMS.launch,
        host=measured.host,
    )
    # After the multiprocessors: they say how many waves of tiles a matmul has.
    rates = dataclasses.replace(rates, matmul=_matmul(measured.matmuls, rates))
    if measured.between is not None:
        between = _between(measured.between, start.network)
        rates = dataclasses.replace(rates, between=between)
    if not measured.moved:
        return rates
    permutes = [m for m in measured.moved if m.kind == "CollectivePermute"]
    collectives = [m for m in measured.moved if m.kind != "CollectivePermute"]
    permute = _permute(permutes, start.permute)
    if measured.hidden is not None:
        permute = dataclasses.replace(permute, beside_compute=measured.hidden >= HIDDEN)
    return dataclasses.replace(
        rates,
        permute=permute,
        put=_put(measured.puts, start.put, permute),
        collective=_collective(collectives, measured.taken, start.collective),
        estimated=False,
    )


def _matmul(matmuls: Sequence[Matmul], rates: Rates) -> float:
    """FLOP/s on whole tiles, by which matmuls take the measured seconds."""
    return statistics.median(
        rates.matmul * rates.matmul_seconds(1, each.m, each.n, each.k) / each.seconds
        for each in matmuls
    )


def _bandwidth(traffic: Sequence[Traffic]) -> float:
    """Bytes per second: the slope of seconds over bytes."""
    _, bandwidth = _line([each.bytes for each in traffic], [t.seconds for t in traffic])
    return bandwidth


def _permute(moved: Sequence[Transfer], start: Link) -> Link:
    """The link of permutes; delay and latency keep their shares of the time before.

    That is the time before the first byte.
    """
    before, bandwidth = _line_of(moved)
    before *= PROGRAMS.before
    delay = before * start.delay / ((start.delay + start.latency) or 1.0)
    return dataclasses.replace(
        start,
        delay=delay,
        latency=before - delay,
        bandwidth=bandwidth,
        between_two=None,
        host=statistics.median(m.host for m in moved),
    )


def _put(moved: Sequence[Transfer], start: Link | None, permute: Link) -> Link | None:
    """The link of puts; copy engines make them too, so they hide like permutes."""
    if not moved or start is None:
        return None
    put = _permute(moved, start)
    return dataclasses.replace(put, beside_compute=permute.beside_compute)


def _collective(moved: Sequence[Transfer], taken: float | None, start: Link) -> Link:
    """The link of collectives; two devices gather and scatter at a rate of their own.

    That rate counts only if it is less: between two H100s NCCL gathers at 203 GB/s, and
    reduces at 289.
    """
    in_pairs = [m for m in moved if m.devices == 2 and m.kind != "AllReduce"]
    others = [m for m in moved if m not in in_pairs]
    latency, bandwidth = _line_of(others)
    _, between_two = _line_of(in_pairs)
    return dataclasses.replace(
        start,
        latency=latency,
        bandwidth=bandwidth,
        between_two=between_two if between_two < bandwidth else None,
        host=statistics.median(m.host for m in moved),
        taken=start.taken if taken is None else taken * PROGRAMS.taken,
    )


def _between(measured: BetweenProcesses, start: Link) -> Link:
    """One link for all kinds of transfers: NCCL's sums are as fast as its gathers."""
    latency, bandwidth = _line_of(measured.moved)
    return dataclasses.replace(
        start,
        latency=latency,
        bandwidth=bandwidth,
        host=statistics.median(m.host for m in measured.moved),
        taken=measured.taken,
    )


def _line_of(moved: Sequence[Transfer]) -> tuple[float, float]:
    return _line([m.received for m in moved], [m.seconds for m in moved])


def _line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds for an amount of 0, and amount per second, neither of them negative.

    By least squares of relative errors.  Where larger amounts took no longer, the rate
    is the highest that was measured.
    """
    # Here: it takes 0.1 to 0.3 s to import, and only a calibration needs it.
    from scipy.optimize import nnls

    weights = 1 / np.asarray(seconds)
    sides = np.stack([weights, np.asarray(amounts) * weights], axis=1)
    # Bytes and ones differ by up to 1e9: unscaled, `nnls` loses one in rounding.
    scale = np.linalg.norm(sides, axis=0)
    (before, each), _ = nnls(sides / scale, np.ones(len(seconds)))
    seen = max(a / s for a, s in zip(amounts, seconds, strict=True))
    return float(before / scale[0]), float(scale[1] / each) if each else seen
