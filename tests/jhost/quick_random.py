"""Random numbers for flax layers in tests: XLA compiles those of JAX's default long."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

nnx: Any = pytest.importorskip("flax.nnx")


def rngs() -> Any:
    """The generators of a new layer, which draw the same each time."""
    return nnx.Rngs(quick_key())


def quick_key() -> jax.Array:
    """A key whose numbers XLA makes by itself, in one instruction."""
    return jax.random.key(0, impl="unsafe_rbg")


def kernel_by_numpy(
    key: jax.Array, shape: tuple[int, ...], dtype: Any, **_: Any
) -> jax.Array:
    """An initializer of kernels by NumPy: XLA compiles flax's for each shape."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    values = (shape[-2] ** -0.5 * rng.standard_normal(shape)).astype(dtype)
    mesh = jax.sharding.get_mesh()
    # Flax shards what lies on a mesh already.
    return jax.device_put(values, None if mesh.empty else NamedSharding(mesh, P()))
