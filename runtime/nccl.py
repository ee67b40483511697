"""The NCCL of this process, and whether it can put: permutes that are one-sided.

XLA takes the option for puts whatever NCCL there is; where it is too old they fail when
they run, or are no puts.  So the library is asked for its version, and then tried.
"""

from __future__ import annotations

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jhost import errors
from jhost.runtime.compiler_options import PUTS
from jhost.runtime.devices import devices_of, is_assumed
from jhost.runtime.mesh import AnyMesh

_FIRST = "2.29"
"""The first NCCL that can put."""


@functools.cache
def nccl_version() -> str:
    """The version of the library that is loaded, as `2.29.3`; empty if there is none.

    JAX loads its own package's library before any other, and XLA calls the loaded one.
    The package's version says nothing of a library that was put in its place.
    """
    try:
        library, number = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()
        failed = library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    rest, patch = divmod(number.value, 100)
    return "" if failed else f"{rest // 100}.{rest % 100}.{patch}"


def why_no_puts(mesh: AnyMesh | None) -> str:
    """Why permutes on `mesh` cannot be NCCL's puts; empty where they can be."""
    if is_assumed() or not isinstance(mesh, Mesh) or devices_of(mesh).platform != "gpu":
        return "they are for GPUs that are there"
    if mesh.size == 1:
        return "there is one device, and nothing moves"
    if devices_of(mesh).processes > 1:
        return "they are within a process, and the devices belong to several"
    if not set(mesh.devices.flat) <= set(jax.local_devices()):  # but to a topology
        return "they are for GPUs that are there"
    version = nccl_version()
    if not version:
        return "no NCCL is found"
    if _numbers(version) < _numbers(_FIRST):
        return f"NCCL {version} has none, {_FIRST} has"
    return _failure(tuple(mesh.devices.flat))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


# --- A trial ----------------------------------------------------------------------- #


@functools.lru_cache(maxsize=64)
def _failure(devices: tuple[Any, ...]) -> str:
    """What goes wrong where each of some devices puts to the next, if anything does.

    A thread of its own runs it: `jax.set_mesh` and traces under way do not reach there.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_attempt, devices).result()


def _attempt(devices: tuple[Any, ...]) -> str:
    mesh, count = Mesh(np.array(devices), ("devices",)), len(devices)
    ring = [(number, (number + 1) % count) for number in range(count)]

    def numbers() -> jax.Array:
        own = lax.broadcast(lax.axis_index("devices"), (1024,))
        return lax.ppermute(own, "devices", ring)

    on_devices = jax.shard_map(
        numbers, mesh=mesh, in_specs=(), out_specs=PartitionSpec("devices")
    )
    try:
        compiled = jax.jit(on_devices).lower().compile(compiler_options=dict(PUTS))
        found = jax.device_get(compiled())
    except jax.errors.JaxRuntimeError as error:
        return errors.first_line(error)
    expected = np.repeat(np.roll(np.arange(count), 1), 1024)
    return "" if (found == expected).all() else "what is put does not come as it was"
