"""The NCCL of this process, and whether it can make puts: one-sided permutes.

XLA accepts the option for puts with any NCCL.  With an old one, puts fail when they
run, or XLA makes ordinary permutes instead.  So jhost asks the library for its version,
and then tries a put.
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

    JAX loads the library of its own package before any other, and XLA calls the loaded
    one.  The package's version would be wrong for a library that replaces it.
    """
    try:
        library, number = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()
        failed = library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    rest, patch = divmod(number.value, 100)
    return "" if failed else f"{rest // 100}.{rest % 100}.{patch}"


def why_no_puts(mesh: AnyMesh | None) -> str:
    """Why permutes on `mesh` cannot be NCCL's puts; "" where they can be."""
    if is_assumed() or not isinstance(mesh, Mesh) or devices_of(mesh).platform != "gpu":
        return "puts need GPUs of this process"
    if mesh.size == 1:
        return "there is one device, so nothing moves"
    if devices_of(mesh).processes > 1:
        return "puts need the GPUs of one process, and these belong to several"
    # The devices of a topology belong to no process.
    if not set(mesh.devices.flat) <= set(jax.local_devices()):
        return "puts need GPUs of this process"
    version = nccl_version()
    if not version:
        return "NCCL was not found"
    if _numbers(version) < _numbers(_FIRST):
        return f"NCCL {version} has no puts; {_FIRST} was the first to have them"
    return _failure(tuple(mesh.devices.flat))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


# --- A trial ----------------------------------------------------------------------- #


@functools.lru_cache(maxsize=64)
def _failure(devices: tuple[Any, ...]) -> str:
    """The error of a trial in which each device puts to the next one; "" if it works.

    The trial runs in a thread of its own, where no `jax.set_mesh` and no trace of the
    user's is active.
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
    return "" if (found == expected).all() else "a put brought other values than sent"
