"""What jhost knows of the devices that a program runs on."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
from jax.sharding import Mesh

from jhost.runtime.mesh import AnyMesh


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a mesh: how many of what `kind`, in how many `processes`.

    `kind` is JAX's `device_kind`.  JAX does not tell whether two GPUs of a process
    reach each other's memory; XLA falls back to collectives where they do not.
    """

    platform: str
    kind: str
    count: int
    processes: int

    @property
    def copies_between_peers(self) -> bool:
        """Whether permutes can be copies: one process owns all of several GPUs."""
        return self.platform == "gpu" and self.count > 1 and self.processes == 1


def devices_of(mesh: AnyMesh | None) -> Devices:
    """The devices of `mesh`; those of the backend where it names none."""
    devices: list[Any] = jax.devices()
    if isinstance(mesh, Mesh):
        devices = list(mesh.devices.flat)
    elif mesh is not None:
        devices = devices[: mesh.size]
    return Devices(
        platform=devices[0].platform,
        kind=devices[0].device_kind,
        count=len(devices),
        processes=len({device.process_index for device in devices}),
    )


def ask_for_cpu_devices(count: int) -> None:
    """Splits the CPU into virtual devices, unless somebody has said how many.

    Raises:
        RuntimeError: JAX has started, and they are made.
    """
    said = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not said and jax.config.jax_num_cpu_devices == -1:
        jax.config.update("jax_num_cpu_devices", count)
