"""Work that moves beside the transfers of layers over tp, on H200s."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from tests.aot.on_h200 import QUICKLY, MakeH200s

ROWS, WIDTH, HIDDEN, LAYERS = 16384, 4096, 8192, 4


def layer(x: jax.Array, weights: Any) -> jax.Array:
    """Rows are gathered for the first product, and scattered by the second."""
    up, down = weights
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, 1, keepdims=True) + 1)
    hidden = jax.nn.gelu((wide * scale).astype(x.dtype) @ up)
    return jhost.shard(x + jhost.shard(hidden, P(None, "tp")) @ down, P("tp"))


def in_a_scan(weights: Any, x: jax.Array) -> jax.Array:
    again = jax.checkpoint(layer)
    y, _ = lax.scan(lambda x, w: (again(x, w), None), x, weights)
    return jnp.sum(y.astype(jnp.float32) ** 2)


@pytest.fixture
def tp(h200s: MakeH200s) -> Mesh:
    mesh = h200s({"tp": 4})
    return Mesh(mesh.devices[:2], ("tp",), axis_types=mesh.axis_types)


def test_gradients_of_weights_are_beside_what_moves_between_layers(tp: Mesh) -> None:
    """One of the same layer, and one of the layer that was before it."""
    specs = (P(None, None, "tp"), P(None, "tp")), P("tp")
    how: dict[str, Any] = {"in_shardings": specs, "out_shardings": specs}
    # Streams that are found would put chunks beside these transfers.
    gradients = jhost.jit(jax.grad(in_a_scan, (0, 1)), mesh=tp, streams="marked", **how)
    weights, x = (
        (bfloat16(LAYERS, WIDTH, HIDDEN), bfloat16(LAYERS, HIDDEN, WIDTH)),
        bfloat16(ROWS, WIDTH),
    )
    lowered = gradients.lower(weights, x)
    told = str(lowered.explain(detail=True))
    assert "computed an iteration late, beside what moves" in told
    assert "which nothing else hides" in told
    schedule = lowered.compile(dict(QUICKLY)).schedule()
    # The forward's body has collectives: nothing in it can stand beside them.
    permutes = [
        each
        for each in schedule.communications
        if each.computation and each.kind == "CollectivePermute"
    ]
    # Of the layer's input and of its gradient, which are gathered, and of the sum.
    assert len(permutes) == 3, str(schedule)
    assert all(each.asynchronous and each.matmuls for each in permutes), str(schedule)


def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
