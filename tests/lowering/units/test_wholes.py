"""In a unit, rules know the whole of what a barrier or a sum of jhost's hands on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from tests import sums
from tests.lowering.on_mesh import each_size, exact, on, tp
from tests.lowering.traced import array

WIDTH = 4


def grouped(x: jax.Array) -> jax.Array:
    weights = jnp.stack([jnp.eye(WIDTH) * n for n in (1, 2, 3)])
    sizes = jnp.array([1, len(x) // 2, len(x) - 1 - len(x) // 2])
    return jhost.ragged_dot(x, weights, sizes)


READERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "products of groups": grouped,
    "sums so far": lambda x: jnp.cumsum(x, axis=0),
    "where a row stands": lambda x: x + lax.broadcasted_iota(x.dtype, x.shape, 0),
    "rows by number": lambda x: x[jnp.arange(len(x))[::-1] // 2],
    "slice": lambda x: lax.dynamic_slice_in_dim(x, 1, len(x) - 1),
    "update": lambda x: lax.dynamic_update_slice_in_dim(x, x[:1] + 1, 1, 0),
    "order": lambda x: jnp.sort(x, axis=0),
    "largest": lambda x: jnp.argmax(x, axis=0).astype(x.dtype),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 0))),
    "shape": lambda x: x.reshape(2, -1, WIDTH).sum(1),
}

each_reader = pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())


@each_size
@each_reader
def test_behind_a_barrier(reader: Callable[[Any], Any], devices: int) -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = lax.optimization_barrier((x, y))
        return reader(x) * y

    exact(f, array(2 * devices, WIDTH), array(), **tp(devices, (P("tp"), P()), None))


@each_reader
def test_in_a_checkpoint(reader: Callable[[Any], Any]) -> None:
    """JAX puts a barrier in front of what the backward computes again."""

    def f(x: jax.Array) -> Any:
        read = jax.checkpoint(lambda x: reader(jnp.abs(x)).astype(x.dtype))
        return jax.grad(lambda x: jnp.sum(read(x) ** 2))(x)

    exact(f, array(8, WIDTH), **tp(4, (P("tp"),), P("tp")))


@each_reader
def test_behind_a_sum_of_what_came(reader: Callable[[Any], Any]) -> None:
    """One over dp, of which a device has a part over tp."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        total = jhost.shard(x.T @ x, P("tp"))
        return reader(total[:, :WIDTH]), x @ w

    args = array(4, 8), array(8, 8)
    with sums.by_permutes():
        exact(f, *args, **on({"dp": 2, "tp": 2}, (P("dp", "tp"), P("tp")), None))
