"""Between JAX's global arrays and the NumPy arrays that each device holds."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jhost.lowering.ir.axis_parts import given_entries
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.ir.statements import Buffer

OnDevices: TypeAlias = list[np.ndarray]
"""The part of one buffer that each device holds, in the order of linear ranks."""


def as_numpy(value: Any) -> np.ndarray:
    """The values of an array; for keys their data, whose own dims come last."""
    if isinstance(value, np.ndarray):
        return value.copy()  # devices write into their arrays
    value = jnp.asarray(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if not value.size:  # JAX 0.10 cannot read what `jit(out_shardings=...)` gives
        return np.empty(value.shape, value.dtype)
    if not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value)


def as_jax(value: np.ndarray, dtype: np.dtype) -> jax.Array:
    """The JAX array of `dtype` with these values."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.array(value), impl=_key_impl(dtype))
    # Not `jnp.asarray`: in JAX 0.12 it has XLA compile a program for each shape.
    return jnp.array(value)


def as_operand(value: np.ndarray, dtype: np.dtype) -> Any:
    """These values as operands of an equation; NumPy has no keys, so JAX's are made."""
    return as_jax(value, dtype) if jnp.issubdtype(dtype, jax.dtypes.extended) else value


def split(value: np.ndarray, buffer: Buffer, ranks: Ranks) -> OnDevices:
    """The part of a param's global `value` that each device holds."""
    # Copies, because devices write into their arrays.
    return [value[part].copy() for part in _parts(buffer, ranks)]


def joined(values: OnDevices, buffer: Buffer, ranks: Ranks, mesh: Mesh) -> jax.Array:
    """The global array of a result, spread over the mesh as its buffer says."""
    if buffer.dtype == jax.dtypes.float0 or not mesh.axis_names:
        return as_jax(values[0], buffer.dtype)
    entries = given_entries(buffer, ranks.sizes)
    sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in entries)))
    sizes = zip(buffer.shape, buffer.dims, strict=True)
    shape = [size * ranks.extent(dim.axes) for size, dim in sizes]
    on_devices = zip(values, mesh.devices.flat, strict=True)
    here = [
        jax.device_put(value, device)
        for value, device in on_devices
        if device.process_index == jax.process_index()
    ]
    shape = (*shape, *values[0].shape[len(shape) :])
    whole = jax.make_array_from_single_device_arrays(shape, sharding, here)
    if jnp.issubdtype(buffer.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(whole, impl=_key_impl(buffer.dtype))
    return whole


def undefined(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory without contents, filled with values that show when they are read."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return as_numpy(lax.empty(tuple(shape), dtype))
    return np.full(shape, _poison(dtype), dtype)


def _poison(dtype: np.dtype) -> Any:
    if jnp.issubdtype(dtype, jnp.inexact):
        # JAX's search for the user's NaNs must not find this one.
        return jnp.finfo(dtype).max if jax.config.jax_debug_nans else np.nan
    return True if dtype == np.bool_ else jnp.iinfo(dtype).max


def _parts(buffer: Buffer, ranks: Ranks) -> Iterator[tuple[slice, ...]]:
    """Where in the global array each device's part is."""
    for rank in range(ranks.count):
        yield tuple(
            slice(size * position, size * (position + 1))
            for size, dim in zip(buffer.shape, buffer.dims, strict=True)
            for position in (int(ranks.everywhere(ranks.linear(dim.axes)).flat[rank]),)
        )


@functools.cache
def _key_impl(dtype: np.dtype) -> Any:
    return jax.random.key_impl(lax.empty((), dtype))
