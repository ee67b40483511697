"""What jhost knows about the devices that a program runs on."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jhost.lowering.ir.reach import Reach, between_processes
from jhost.runtime.mesh import AnyMesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a mesh.

    JAX does not say whether two GPUs of a process reach each other's memory.  XLA falls
    back to collectives where they do not.

    Attributes:
        platform: JAX's name of the backend.
        kind: JAX's `device_kind`.
        count: the number of devices.
        processes: the number of processes that own them.
        reach: for each axis with several devices, how far apart two devices are that
            only differ along that axis.
    """

    platform: str
    kind: str
    count: int
    processes: int
    reach: Mapping[str, Reach] = dataclasses.field(default_factory=dict[str, Reach])

    @property
    def copied(self) -> frozenset[str]:
        """The axes along which permutes can be copies: GPUs that one process owns."""
        within = {axis for axis, reach in self.reach.items() if reach == "process"}
        return frozenset(within) if self.platform == "gpu" else frozenset()

    @property
    def between(self) -> frozenset[str]:
        """The axes along which GPUs of several processes lie."""
        axes = frozenset(between_processes(self.reach, self.reach))
        return axes if self.platform == "gpu" else frozenset()


_assumed: ContextVar[str] = ContextVar("_assumed", default="")


@contextmanager
def assumed(kind: str) -> Generator[None]:
    """Inside, jhost takes the devices for GPUs of that kind, to make predictions."""
    token = _assumed.set(kind)
    # Functions that were lowered for the real devices must be lowered again.
    jax.clear_caches()
    try:
        yield
    finally:
        _assumed.reset(token)
        jax.clear_caches()


def is_assumed() -> bool:
    """Whether devices are taken for GPUs of another kind."""
    return bool(_assumed.get())


def devices_of(mesh: AnyMesh | None) -> Devices:
    """The devices of `mesh`; without a mesh of devices, the devices of the backend."""
    devices: list[Any] = jax.devices()
    if isinstance(mesh, Mesh):
        devices = list(mesh.devices.flat)
    elif mesh is not None:
        # An abstract mesh names none.  JAX makes meshes of the first devices, too.
        devices = devices[: mesh.size]
    return Devices(
        platform="gpu" if _assumed.get() else devices[0].platform,
        kind=_assumed.get() or devices[0].device_kind,
        count=len(devices),
        processes=len({device.process_index for device in devices}),
        reach={} if mesh is None else _reaches(mesh, devices),
    )


def all_devices() -> Mesh:
    """A mesh of all devices: an axis for processes, and one for devices of each."""
    every: list[Any] = jax.devices()
    owners = sorted({device.process_index for device in every})
    rows = [[d for d in every if d.process_index == owner] for owner in owners]
    if len({len(row) for row in rows}) > 1:
        return Mesh(np.array(every), ("devices",))
    return Mesh(np.array(rows), ("processes", "devices"))


def _reaches(mesh: AnyMesh, devices: list[Any]) -> dict[str, Reach]:
    """How far each axis reaches; without enough devices, axes are in a process."""
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    if len(devices) < mesh.size:
        return dict.fromkeys(sizes, "process")
    grid = np.empty(mesh.size, dtype=object)
    grid[:] = devices
    grid = grid.reshape(tuple(mesh.shape.values()))
    return {axis: _reach(grid, mesh.axis_names.index(axis)) for axis in sizes}


def _reach(grid: np.ndarray, dim: int) -> Reach:
    """How far apart two devices are that only differ along one dim of the grid."""

    def differ(number: Any) -> bool:
        numbers = np.vectorize(number, otypes=[int])(grid)
        return bool((numbers != numbers.take([0], dim)).any())

    if not differ(lambda device: device.process_index):
        return "process"
    return "hosts" if differ(_host) else "host"


def _host(device: Any) -> int:
    """The number of a device's host.

    XLA numbers the hosts of GPUs, or the groups that NVLink joins, as slices.  For
    other devices each process counts as a host.
    """
    return getattr(device, "slice_index", device.process_index)


def ask_for_cpu_devices(count: int) -> None:
    """Splits the CPU into virtual devices, unless their number is already set.

    Raises:
        RuntimeError: JAX has already made its devices.
    """
    said = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not said and jax.config.jax_num_cpu_devices == -1:
        jax.config.update("jax_num_cpu_devices", count)


def links_between_gpus() -> str:
    """The links between the GPUs of this host, in the words of `nvidia-smi topo`.

    For example `NV18`, or `NODE, SYS` if there are several kinds; "" if unknown.
    """
    command = ["nvidia-smi", "topo", "-m"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ", ".join(sorted(_words_of_links(found.stdout)))


def _words_of_links(table: str) -> set[str]:
    """The cells between GPUs; a row `GPU0  X  NV18  ...` has a cell for each GPU."""
    rows = [line.split() for line in table.splitlines() if line.startswith("GPU")]
    return {cell for row in rows for cell in row[1 : len(rows) + 1]} - {"X"}
