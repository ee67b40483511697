"""Which sums over devices can be -0.0, so that XLA:CPU has to ask for their signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
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


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.float8_e4m3fnuz, jnp.bfloat16])
def test_signs_of_narrow_sums_that_a_scan_carries(dtype: Any) -> None:
    terms = jnp.array([[0.0, -1.0], [-0.0, 1.0], [-0.0, 2.0]]).astype(dtype)
    terms = jnp.broadcast_to(terms.T[:, None], (2, 4, 3))

    def fun(terms: jax.Array) -> jax.Array:
        terms = jhost.shard(terms, P(None, "tp"))
        start = jnp.full((3,), -0.0, dtype)
        return lax.scan(lambda c, x: (c + x.sum(0), None), start, terms)[0]

    wanted = np.asarray(jax.jit(fun)(terms), np.float32)
    given = np.asarray(jhost.jit(fun, mesh=MESH)(terms), np.float32)
    np.testing.assert_array_equal(given, wanted)
    np.testing.assert_array_equal(np.signbit(given), np.signbit(wanted))
