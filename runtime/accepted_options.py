"""Which options XLA takes, by a trial, and how its refusals read."""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jhost import errors
from jhost.runtime.mesh import AnyMesh


def accepted(mesh: AnyMesh | None, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The options among `wanted` that XLA takes for the devices of `mesh`."""
    if not isinstance(mesh, Mesh):
        return dict(wanted)
    # A trial needs a device of this process; a topology's devices are in no process.
    here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    one = (here or list(mesh.devices.flat))[0]
    return {name: v for name, v in wanted.items() if _accepts(one, name, v)}


@functools.lru_cache(maxsize=256)
def _accepts(device: Any, name: str, value: Any) -> bool:
    """Whether the backend of `device` takes an option, by a trial.

    The trial runs in a thread of its own, where no `jax.set_mesh` and no trace of the
    user's is active.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(_compiles, device, {name: value}).result()


def _compiles(device: Any, options: dict[str, Any]) -> bool:
    sharding = SingleDeviceSharding(device)
    operand = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding)
    try:
        jax.jit(_identity).lower(operand).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _identity(x: jax.Array) -> jax.Array:
    return x


_REFUSAL = re.compile(r"No such compile option: '(\w+)'|While setting option (\w+)")


def explain_refusal(
    error: Exception, function: str, options: Mapping[str, Any]
) -> None:
    """Raises jhost's own error if `error` says that XLA refuses one of `options`.

    Raises:
        CompilerOptionError: it does.
    """
    refused = {name for match in _REFUSAL.findall(str(error)) for name in match}
    offenders = [
        f"{name}={value!r}: {error}"
        for name, value in options.items()
        if name in refused
    ]
    if offenders:
        raise errors.CompilerOptionError(
            f"XLA refuses an option of {function}. Options are fields of XLA's "
            "DebugOptions, as for jax.jit; not every version and backend has all of "
            "them.",
            offenders,
        ) from error


@contextmanager
def explained_refusals(function: str, options: Mapping[str, Any]) -> Generator[None]:
    """Inside, XLA's refusals of `options` are jhost's errors."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        explain_refusal(error, function, options)
        raise
