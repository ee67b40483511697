"""A block around cuDNN's attention, compiled for H200s: the kernel works on parts."""

from __future__ import annotations

import importlib
import re
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s, compile_both_ways

# By name: what JAX calls to ask for a GPU has no public name.
CUDNN: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")

SEQUENCE, MODEL = 1024, 4096
HEADS, SHARED, SIZE = 32, 8, 128


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX takes this machine for one with an H200 and cuDNN."""
    monkeypatch.setattr(CUDNN, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(CUDNN, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(CUDNN, "is_cuda_compute_capability_equal", lambda _: False)


def block(
    x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array
) -> jax.Array:
    queries, keys, values = ((x @ w).reshape(*x.shape[:2], -1, SIZE) for w in (q, k, v))
    found = jax.nn.dot_product_attention(
        queries, keys, values, is_causal=True, implementation="cudnn"
    )
    return jhost.stream(found.reshape(*x.shape[:2], -1) @ out, 0)


WEIGHTS = (
    (MODEL, HEADS * SIZE),
    (MODEL, SHARED * SIZE),
    (MODEL, SHARED * SIZE),
    (HEADS * SIZE, MODEL),
)
INS = P("tp"), P(None, "tp"), P(None, "tp"), P(None, "tp"), P("tp")


def kernels(text: str, name: str) -> list[str]:
    """The shapes of queries that the kernels of that name are called with."""
    calls = re.findall(r'custom-call\((.*?)\), custom_call_target="([^"]*)"', text)
    shapes = dict(re.findall(r"(%\S+) = (\w+\[[\d,]*\])", text))
    return [
        shapes.get(operands.split(",")[0].split()[-1], operands)
        for operands, target in calls
        if target == name
    ]


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
@pytest.mark.parametrize(
    ("pipeline", "chunks", "batch"),
    [("off", 1, 4), ("p2p", 4, 8), ("collective", 2, 8)],
)
def test_kernels_of_devices_and_chunks(
    h200s: MakeH200s, pipeline: Any, chunks: int, batch: int
) -> None:
    settings: dict[str, Any] = {"in_shardings": INS, "out_shardings": P("tp")}
    how: dict[str, Any] = {"pipeline": pipeline, "chunks": chunks}
    shapes = (batch, SEQUENCE, MODEL), *WEIGHTS
    mesh = h200s({"tp": 4})
    hosted = jhost.jit(block, mesh=mesh, **settings, **how)
    *_, text = compile_both_ways(hosted, mesh, shapes, INS, P("tp"))
    part = f"bf16[{batch // chunks},{SEQUENCE},{HEADS // 4},{SIZE}]"
    for name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert kernels(text, name) == [part] * chunks
