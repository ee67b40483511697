"""Loops over keys that a causal mask hides in part have few matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests import budget
from tests.lowering.hand_built import mesh_of


def attend(devices: int, pipeline: Any, chunks: int, keys: int, **more: Any) -> Any:
    """Causal attention of so many keys a device, and the shape of its queries."""

    def f(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k = jhost.stream(k, 1, chunks=chunks, pipeline=pipeline)
        return jhost.dot_product_attention(q, k, v, is_causal=True, **more)

    spec, mesh = P(None, "cp"), mesh_of(cp=devices)
    run = jhost.jit(f, mesh=mesh, in_shardings=spec, out_shardings=spec)
    return f, run, (1, devices * keys, 2, 4)


def matmuls(run: Any, shape: Sequence[int]) -> int:
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.jit(run).lower(x, x, x).as_text().count("dot_general")


@pytest.mark.parametrize(
    ("devices", "pipeline", "chunks", "keys"),
    [
        (4, "collective", 2, 5),
        (8, "collective", 5, 16),
        (2, "collective", 4, 16),
        (4, "collective", 16, 16),
        (4, "p2p", 8, 16),
        (8, "p2p", 32, 16),
    ],
)
def test_matmuls_grow_with_the_chunks_alone(
    devices: int, pipeline: str, chunks: int, keys: int
) -> None:
    """Two for each of 32 blocks; or for the halves of queries with each chunk."""
    _, run, shape = attend(devices, pipeline, chunks, keys)
    assert 2 * chunks <= matmuls(run, shape) <= 2 * max(32, 2 * chunks)


@budget.first_is_quick(
    ("devices", "chunks", "keys", "window"),
    [(4, 2, 5, None), (2, 4, 16, None), (4, 3, 8, (9, 3))],
)
def test_blocks_of_any_size_give_what_the_plain_function_gives(
    devices: int, chunks: int, keys: int, window: Any
) -> None:
    f, run, shape = attend(
        devices, "collective", chunks, keys, local_window_size=window
    )
    args = np.random.default_rng(0).standard_normal((3, *shape)).astype(np.float32)
    np.testing.assert_allclose(run(*args), jax.jit(f)(*args), rtol=1e-5, atol=1e-5)
