"""Layers in a scan, with cuDNN's attention, compiled for four H200s without one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from tests.aot.on_h200 import QUICKLY, MakeH200s

# By name: what JAX calls to ask for a GPU has no public name.
CUDNN: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")

BATCH, SEQUENCE, MODEL, HIDDEN, LAYERS = 2, 2048, 2048, 8192, 6
HEADS, SHARED, SIZE = 16, 8, 128

SHAPES = {
    "q": (MODEL, HEADS * SIZE),
    "k": (MODEL, SHARED * SIZE),
    "v": (MODEL, SHARED * SIZE),
    "out": (HEADS * SIZE, MODEL),
    "up": (MODEL, HIDDEN),
    "down": (HIDDEN, MODEL),
}
ROWS = P(None, "tp")
SPECS = {
    name: P(None, "tp") if name in ("out", "down") else P(None, None, "tp")
    for name in SHAPES
}
INS, OUTS = (ROWS, SPECS), (P(), (ROWS, SPECS))


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX takes this machine for one with an H200 and cuDNN."""
    monkeypatch.setattr(CUDNN, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(CUDNN, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(CUDNN, "is_cuda_compute_capability_equal", lambda _: False)


def gradients_on(mesh: Mesh) -> Callable[..., Any]:
    """The gradients of layers in a scan; plain JAX is told that heads lie over tp."""
    heads = NamedSharding(mesh, P(None, None, "tp"))

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q, k, v = (
            lax.with_sharding_constraint(
                (x @ w[name]).reshape(*x.shape[:2], -1, SIZE), heads
            )
            for name in ("q", "k", "v")
        )
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation="cudnn"
        )
        mixed = lax.with_sharding_constraint(mixed, heads)
        x = x + jhost.stream(mixed.reshape(*x.shape[:2], -1) @ w["out"], axis=1)
        return x + jhost.stream(jax.nn.gelu(x @ w["up"]) @ w["down"], axis=1), None

    def loss(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        body = jax.checkpoint(layer, prevent_cse=False)
        return jnp.sum(lax.scan(body, x, weights)[0].astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1))


def arguments() -> tuple[jax.ShapeDtypeStruct, dict[str, jax.ShapeDtypeStruct]]:
    weights = {
        name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16)
        for name, shape in SHAPES.items()
    }
    return jax.ShapeDtypeStruct((BATCH, SEQUENCE, MODEL), jnp.bfloat16), weights


@pytest.mark.slow
def test_a_scan_over_layers_overlaps_in_its_bodies(h200s: MakeH200s) -> None:
    """Forward and backward."""
    mesh = h200s({"tp": 4})
    settings: dict[str, Any] = {"in_shardings": INS, "out_shardings": OUTS}
    hosted: Any = jhost.jit(gradients_on(mesh), mesh=mesh, pipeline="p2p", **settings)
    compiled = hosted.lower(*arguments()).compile(dict(QUICKLY))
    permutes = [
        each
        for each in compiled.schedule().communications
        if each.kind == "CollectivePermute"
    ]
    table = str(compiled.schedule())
    forward, backward = (
        [each for each in permutes if each.computation == body]
        for body in dict.fromkeys(each.computation for each in permutes)
    )
    assert (len(forward), len(backward)) == (12, 24), table
    assert all(each.asynchronous for each in permutes), table
    assert all(each.computation and each.matmuls for each in forward), table
    # The last gather of the attention's backward has nothing left to wait beside.
    assert sum(not each.matmuls for each in backward) <= 1, table
