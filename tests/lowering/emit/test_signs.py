"""Which sums over devices can be -0.0, so that XLA:CPU has to ask for their signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jhost
from tests.lowering.hand_built import mesh_of

X, W = np.ones((4, 8), np.float32), np.ones((8, 6), np.float32)
MESH = mesh_of(tp=2)
ROWS, COLUMNS = P("tp", None), P(None, "tp")


def lowered(fun: Callable[..., jax.Array], *args: Any) -> str:
    return jhost.jit(fun, mesh=MESH).lower(*args).as_text()


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jhost.shard(x, COLUMNS) @ jhost.shard(w, ROWS)


def test_a_sum_of_sums_is_never_negative_zero() -> None:
    def fun(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return jhost.shard(product(x, w) + product(y, v), P())

    text = lowered(fun, X, W, X, W)
    assert text.count("all_reduce") == 1
    assert "stablehlo.minimum" not in text


def test_a_sum_with_what_may_be_negative_zero_may_be_so_too() -> None:
    table = -jnp.zeros((8, 6), np.float32)

    def fun(table: jax.Array, w: jax.Array, tokens: jax.Array) -> jax.Array:
        rows = jhost.shard(table, ROWS)[tokens]
        return jhost.shard(rows + jhost.shard(w, ROWS)[tokens], P())

    args = table, table, jnp.arange(4)
    text = lowered(fun, *args)
    assert "stablehlo.minimum" in text
    assert np.signbit(jhost.jit(fun, mesh=MESH)(*args)).all()
