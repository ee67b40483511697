"""What devices do per second: the numbers of the cost model, for each kind of device.

- H200: measured on hosts with NVLink between all GPUs, with JAX 0.11.2 and one process
  for all GPUs.  `docs/benchmarks.md` compares predictions with measured times.
- H100: matmuls and memory are measured.  Links are the H200's, which measurements on
  two H100s confirm.
- CPU: XLA's devices on one host with two cores.  A transfer is work like any other
  there, so nothing runs beside anything.
- Other GPUs: estimated from the H200 and the makers' data sheets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from jhost.lowering.ir.reach import Reach
from jhost.lowering.ir.statements import CommunicationKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way of moving bytes between devices.

    Attributes:
        delay: seconds from when the operand is there to the transfer's start.
        gap: seconds from the end of the transfer before it on the queue to its start.
        meet: seconds on the host for each device, once in a program, until the threads
            of all devices have met.
        latency: seconds of each transfer, whatever its size.
        bandwidth: bytes received per second by each device.
        between_two: the bandwidth where two devices gather or scatter, if it is less;
            all-reduces of two devices have `bandwidth`.
        host: seconds for which a transfer keeps the launching thread.
        beside_compute: whether it runs while matmuls fill the device.
        network: whether it leaves the host; then it does not queue behind transfers
            that stay on the host.
        taken: how much longer work beside it takes, as a share of the transfer's time.
    """

    delay: float = 0.0
    gap: float = 0.0
    meet: float = 0.0
    latency: float
    bandwidth: float
    between_two: float | None = None
    host: float
    beside_compute: bool
    network: bool = False
    taken: float = 0.0

    def seconds(self, kind: CommunicationKind, received: float, devices: int) -> float:
        """How long each of `devices` takes to receive that many bytes."""
        slower = devices == 2 and kind != "AllReduce" and self.between_two
        return self.latency + received / (slower or self.bandwidth)

    def times(self, factor: float) -> Link:
        """A link with `factor` times the bandwidth."""
        between_two = self.between_two and self.between_two * factor
        return dataclasses.replace(
            self, bandwidth=self.bandwidth * factor, between_two=between_two
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of one kind of device.

    Attributes:
        matmul: FLOP/s in bfloat16 if each multiprocessor has a tile of the largest
            kind.
        multiprocessors: how many a device has.
        tiles: for each kind of tile, its rows, its columns, and its share of `matmul`.
        memory: bytes per second that kernels read and write.
        launch: seconds between two kernels on the device.
        host: seconds that the host needs to launch a kernel.
        choice: seconds from when a device knows which branch runs until it starts: the
            host reads the answer, and launches the branch.
        permute: permutes between devices of one process, by peer copies.
        collective: collectives on one host.
        network: all transfers between hosts.
        between: transfers between processes, if they were measured; it replaces
            `collective` and `network`.
        put: permutes that NCCL puts, which replace `permute`; None where it cannot.
        source: where the rates come from, in words.
        estimated: whether nothing was measured on such devices.  Then only clear gains
            count.
        reach: how far apart the devices along each mesh axis are; an axis that is not
            in it is within a process.
    """

    matmul: float
    multiprocessors: int
    tiles: tuple[tuple[int, int, float], ...]
    memory: float
    launch: float
    host: float
    choice: float = 0.0
    permute: Link
    collective: Link
    network: Link
    between: Link | None = None
    put: Link | None = None
    source: str = "shipped with jhost"
    estimated: bool = False
    reach: Mapping[str, Reach] = dataclasses.field(default_factory=dict[str, Reach])

    @property
    def overlaps(self) -> bool:
        """Whether transfers of some kind run beside computation."""
        return self.permute.beside_compute or self.collective.beside_compute

    def link(self, kind: CommunicationKind, axes: Iterable[str]) -> Link:
        """The link that moves bytes among the devices along some axes of the mesh."""
        # XLA (of JAX 0.10 to 0.12) copies from peer to peer only within a process.  A
        # permute between processes is a kernel of NCCL's, like any collective.
        reaches = {self.reach.get(axis, "process") for axis in axes}
        if self.between is not None and reaches != {"process"}:
            return self.between
        if "hosts" in reaches:
            return self.network
        copied = kind == "CollectivePermute" and reaches == {"process"}
        return self.permute if copied else self.collective

    @property
    def possible(self) -> tuple[Rates, ...]:
        """These rates, and those with a slow link between processes, if none is known.

        Devices of one host need not reach each other's memory.  Then NCCL's kernels go
        through the host, which is as slow as a network.
        """
        if self.between is not None or "host" not in self.reach.values():
            return (self,)
        return self, dataclasses.replace(self, between=self.network)

    @property
    def by_kernels(self) -> Rates:
        """The same rates, but permutes are kernels of NCCL, like collectives."""
        return dataclasses.replace(self, permute=self.collective, put=None)

    def matmul_seconds(self, batch: int, m: int, n: int, k: int) -> float:
        """The seconds of a matmul with the tile that suits it best.

        Tiles run in waves of one on each multiprocessor.  At least one wave counts.
        """
        each = self.matmul / self.multiprocessors
        # The last wave may count as less than one: near the power limit, tiles that
        # still multiply get the power that idle multiprocessors leave.  1.7 waves took
        # 83 us and 3.4 took 168, where two and four would have taken 101 and 202.

        def seconds(rows: int, columns: int, share: float) -> float:
            tiles = batch * -(-m // rows) * -(-n // columns)
            waves = max(1.0, tiles / self.multiprocessors)
            return waves * 2 * rows * columns * k / (each * share)

        return min(seconds(*tile) for tile in self.tiles)


# Fitted to four blocks with p2p pipelines on four H200s with NCCL 2.32.3.  Milliseconds
# by puts, measured and predicted, with those by peer copies in parentheses: the MLP of
# an 8B model on 8192 rows 0.873, 0.787 (0.866, 0.782), on 4096 rows 0.451, 0.468
# (0.410, 0.436), on 2048 rows 0.343, 0.335 (0.422, 0.377), and queries, keys and values
# on 8192 rows 0.321, 0.315 (0.289, 0.267).  The latency includes the two signals around
# each copy, and the copy to the memory that NCCL puts from.
_PUT = Link(
    delay=20e-6,
    gap=12e-6,
    latency=30e-6,
    bandwidth=383e9,
    # As for a collective: no thread waits for another.  It was not measured by itself,
    # only that it does not limit programs.
    host=10e-6,
    beside_compute=True,
)

_H200 = Rates(
    matmul=700e12,
    multiprocessors=132,
    tiles=((128, 256, 1.0), (256, 128, 1.0), (128, 160, 0.96), (128, 128, 0.88)),
    memory=3.6e12,
    launch=3e-6,
    host=5e-6,
    # A step of Llama 8B over four H200s took 2.7 ms more with causal attention in
    # chunks, with 128 branches chosen and the results of blocks of keys put together.
    choice=20e-6,
    # Copy engines move it, but each host thread waits for the threads of the other
    # devices.
    permute=Link(
        delay=20e-6,
        gap=12e-6,
        latency=14e-6,
        bandwidth=383e9,
        host=32e-6,
        meet=30e-6,
        beside_compute=True,
    ),
    put=_PUT,
    # NCCL's kernels need multiprocessors, which a matmul on Hopper does not leave.  How
    # much they take was fitted to 18 whole steps on two and four H200s and H100s.  With
    # options that begin collectives early these took 0.95 to 1.03 of the time.  On
    # average this is predicted with an error of 0.012, and at most of 0.042.
    collective=Link(
        latency=22e-6,
        bandwidth=290e9,
        between_two=215e9,
        host=10e-6,
        beside_compute=False,
        taken=0.8,
    ),
    # Not measured: 400 Gb/s of InfiniBand for each GPU; 80 % of it is assumed to be
    # reached.
    network=Link(
        latency=40e-6,
        bandwidth=40e9,
        host=10e-6,
        beside_compute=False,
        network=True,
    ),
)

# Five calibrations of H100s gave 710 to 738 TFLOP/s, and 3.0 TB/s where H200s give 4.0.
# Both have the same NVLink: between two H100s permutes move 375 GB/s, and NCCL gathers
# and scatters 203 and reduces 289, after 21 us of latency.
_H100 = dataclasses.replace(
    _H200,
    matmul=720e12,
    memory=2.7e12,
)

_CPU = Rates(
    matmul=50e9,
    multiprocessors=1,
    tiles=((1, 1, 1.0),),
    memory=10e9,
    launch=5e-6,
    host=0.0,
    permute=Link(latency=50e-6, bandwidth=2e9, host=0.0, beside_compute=False),
    collective=Link(latency=50e-6, bandwidth=2e9, host=0.0, beside_compute=False),
    network=Link(
        latency=50e-6, bandwidth=1e9, host=0.0, beside_compute=False, network=True
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _DataSheet:
    """What a GPU's maker says: FLOP/s of dense bfloat16, and bytes per second.

    `link` is the bytes per second that a GPU receives from the other GPUs of its host,
    by NVLink or PCIe.
    """

    matmul: float
    multiprocessors: int
    memory: float
    link: float

    def rates(self) -> Rates:
        """The H200's rates times this GPU's data sheet divided by the H200's."""
        link = self.link / _SHEET_OF_H200.link
        return dataclasses.replace(
            _H200,
            matmul=_H200.matmul * self.matmul / _SHEET_OF_H200.matmul,
            multiprocessors=self.multiprocessors,
            memory=_H200.memory * self.memory / _SHEET_OF_H200.memory,
            permute=_H200.permute.times(link),
            put=_PUT.times(link),
            collective=_H200.collective.times(link),
            source="estimated from data sheets",
            estimated=True,
        )


# NVIDIA's data sheets of 2025: H200, H100 PCIe, A100, L40S, and HGX B200.
_SHEET_OF_H200 = _DataSheet(
    matmul=989e12, multiprocessors=132, memory=4.8e12, link=450e9
)
_SHEETS: Mapping[str, _DataSheet] = {
    "NVIDIA H100 PCIe": _DataSheet(
        matmul=756e12, multiprocessors=114, memory=2.0e12, link=64e9
    ),
    "NVIDIA A100-SXM4-80GB": _DataSheet(
        matmul=312e12, multiprocessors=108, memory=2.04e12, link=300e9
    ),
    "NVIDIA A100-SXM4-40GB": _DataSheet(
        matmul=312e12, multiprocessors=108, memory=1.56e12, link=300e9
    ),
    "NVIDIA B200": _DataSheet(
        matmul=2250e12, multiprocessors=148, memory=8.0e12, link=900e9
    ),
    "NVIDIA L40S": _DataSheet(
        matmul=362e12, multiprocessors=142, memory=0.864e12, link=32e9
    ),
}

_RATES: Mapping[str, Rates] = {
    "NVIDIA H200": _H200,
    "NVIDIA H100 80GB HBM3": _H100,
    "cpu": _CPU,
    **{kind: sheet.rates() for kind, sheet in _SHEETS.items()},
}


def known_kinds() -> tuple[str, ...]:
    """The kinds of devices that there are rates for."""
    return tuple(_RATES)


def rates_of(
    kind: str, reach: Mapping[str, Reach] | None = None, puts: bool = False
) -> Rates | None:
    """The rates of devices of that kind (JAX's `device_kind`), if they are known.

    With `puts` they include the rate of puts, unless they are estimated.
    """
    rates = _RATES.get(kind)
    if rates is None:
        return None
    put = rates.put if puts and not rates.estimated else None
    return dataclasses.replace(rates, reach=reach or {}, put=put)


def rates_to_start_from(kind: str) -> Rates:
    """The rates of such devices; an H200's if the kind is unknown."""
    unknown = dataclasses.replace(_H200, source="those of an H200", estimated=True)
    return _RATES.get(kind, unknown)
