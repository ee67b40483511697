"""A scan takes as long as the loop that reads and writes its stacks by a counter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.cost.simulate import predict
from tests.lowering.traced import lowered

H200 = rates_of("NVIDIA H200")
assert H200 is not None
RATES = dataclasses.replace(H200, launch=0, host=0)
LENGTH, WIDTH = 4, 1024
STACK = (LENGTH, WIDTH, WIDTH)
SLICE = WIDTH * WIDTH * 4

Layer = Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]


def made_to_leave(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x + 1, jnp.sin(x * w)


def read_by_a_product(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jnp.sin(x)
    return y @ w, y


def of_a_product(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = x @ w
    return jnp.sin(y), y


def carried(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x @ w, x


def of_a_gathered_slice(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = x @ jhost.shard(w, P())
    return y, y + 1


def seconds(fun: Callable[..., Any]) -> float:
    shapes = (WIDTH, WIDTH), STACK
    return predict(lowered(fun, *shapes, dp=2), RATES).total


LAYERS = [made_to_leave, read_by_a_product, of_a_product, carried, of_a_gathered_slice]


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reversed"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_scan_takes_as_long_as_a_loop_by_a_counter(
    layer: Layer, reverse: bool
) -> None:
    def given(x: jax.Array, ws: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jhost.shard(x, P("dp")), jhost.shard(ws, P(None, "dp"))

    def scanned(x: jax.Array, ws: jax.Array) -> Any:
        return lax.scan(layer, *given(x, ws), reverse=reverse)

    def counted(x: jax.Array, ws: jax.Array) -> Any:
        x, ws = given(x, ws)

        def body(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> Any:
            i = LENGTH - 1 - i if reverse else i
            x, ys = state
            x, y = layer(x, lax.dynamic_index_in_dim(ws, i, keepdims=False))
            return x, lax.dynamic_update_index_in_dim(ys, y, i, 0)

        ys = jhost.shard(jnp.zeros(STACK), P(None, "dp"))
        return lax.fori_loop(0, LENGTH, body, (x, ys))

    assert seconds(scanned) == pytest.approx(seconds(counted), rel=1e-3)
