"""What jhost knows of the devices that a program runs on."""

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
    """The devices of a mesh: how many of what `kind`, in how many `processes`.

    `kind` is JAX's `device_kind`; `reach` says of each axis with more than one device
    how far apart those lie that differ along it alone.
    JAX does not tell whether two GPUs of a process reach each other's memory; XLA falls
    back to collectives where they do not.
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
    """Inside, devices are taken to be GPUs of that kind: for predictions alone.

    What was lowered for others is forgotten.
    """
    token = _assumed.set(kind)
    jax.clear_caches()
    try:
        yield
    finally:
        _assumed.reset(token)
        jax.clear_caches()


def is_assumed() -> bool:
    """Whether devices are taken to be others than they are."""
    return bool(_assumed.get())


def devices_of(mesh: AnyMesh | None) -> Devices:
    """The devices of `mesh`; those of the backend where it names none."""
    devices: list[Any] = jax.devices()
    if isinstance(mesh, Mesh):
        devices = list(mesh.devices.flat)
    elif mesh is not None:
        devices = devices[: mesh.size]
    return Devices(
        platform="gpu" if _assumed.get() else devices[0].platform,
        kind=_assumed.get() or devices[0].device_kind,
        count=len(devices),
        processes=len({device.process_index for device in devices}),
        reach={} if mesh is None else _reaches(mesh, devices),
    )


def all_devices() -> Mesh:
    """A mesh of all devices: an axis for the processes, and one for those of each."""
    every: list[Any] = jax.devices()
    owners = sorted({device.process_index for device in every})
    rows = [[d for d in every if d.process_index == owner] for owner in owners]
    if len({len(row) for row in rows}) > 1:
        return Mesh(np.array(every), ("devices",))
    return Mesh(np.array(rows), ("processes", "devices"))


def _reaches(mesh: AnyMesh, devices: list[Any]) -> dict[str, Reach]:
    """How far each axis reaches; one that has no devices here stays in a process."""
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    if len(devices) < mesh.size:
        return dict.fromkeys(sizes, "process")
    grid = np.empty(mesh.size, dtype=object)
    grid[:] = devices
    grid = grid.reshape(tuple(mesh.shape.values()))
    return {axis: _reach(grid, mesh.axis_names.index(axis)) for axis in sizes}


def _reach(grid: np.ndarray, dim: int) -> Reach:
    """How far apart devices lie that differ along that dim of the grid alone."""

    def differ(number: Any) -> bool:
        numbers = np.vectorize(number, otypes=[int])(grid)
        return bool((numbers != numbers.take([0], dim)).any())

    if not differ(lambda device: device.process_index):
        return "process"
    return "hosts" if differ(_host) else "host"


def _host(device: Any) -> int:
    """XLA numbers the hosts of GPUs, or what NVLink joins; else a process is one."""
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
    """What joins the GPUs of this host, in the words of `nvidia-smi topo`.

    As `NV18`, or `NODE, SYS` where there are several kinds; empty if that is not known.
    """
    command = ["nvidia-smi", "topo", "-m"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ", ".join(sorted(_words_of_links(found.stdout)))


def _words_of_links(table: str) -> set[str]:
    """The cells between GPUs: a row `GPU0  X  NV18  ...` has as many as there are."""
    rows = [line.split() for line in table.splitlines() if line.startswith("GPU")]
    return {cell for row in rows for cell in row[1 : len(rows) + 1]} - {"X"}
