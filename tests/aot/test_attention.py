"""A block around cuDNN's attention, compiled for H200s: the kernel works on parts."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.runtime.profile.schedule import parse_schedule
from tests.aot.on_h200 import MakeH200s, compile_both_ways, exposed

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


def ring(
    mesh: Any, tokens: int, causal: bool
) -> tuple[Callable[..., jax.Array], list[tuple[int, ...]], P]:
    """Attention whose keys go around, the shapes that it takes, and their layout."""
    rows = P(None, "tp")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k = jhost.stream(k, 1)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, implementation="cudnn"
        )

    settings: dict[str, Any] = {"in_shardings": rows, "out_shardings": rows}
    hosted = jhost.jit(attend, mesh=mesh, pipeline="p2p", **settings)
    return hosted, [(1, tokens, heads, SIZE) for heads in (HEADS, SHARED, SHARED)], rows


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_keys_go_around_beside_kernels(h200s: MakeH200s, causal: bool) -> None:
    """Each way what comes at a step is under way beside a kernel of another."""
    mesh = h200s({"tp": 4})
    hosted, shapes, rows = ring(mesh, 4 * SEQUENCE, causal)
    *_, text = compile_both_ways(hosted, mesh, shapes, (rows,) * 3, rows)

    schedule = parse_schedule(text)
    assert {c.kind for c in schedule.communications} == {"CollectivePermute"}
    assert len(schedule.communications) == 12, schedule
    assert not exposed(schedule, "CollectivePermute"), schedule
    # Each device's own part stands on the diagonal; others are seen whole, or hidden.
    part = f"bf16[1,{SEQUENCE},{HEADS},{SIZE}]"
    count = 1 + 3 * (2 if causal else 1)
    for name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert kernels(text, name) == [part] * count


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
def test_long_causal_sequences_are_in_zigzag_order(h200s: MakeH200s) -> None:
    """A step's kernel is of late queries, or of early keys, or a device's own."""
    mesh, part = h200s({"tp": 4}), 8 * SEQUENCE
    hosted, shapes, rows = ring(mesh, 4 * part, causal=True)
    *_, text = compile_both_ways(hosted, mesh, shapes, (rows,) * 3, rows)

    schedule = parse_schedule(text)
    moved = [c.bytes for c in schedule.communications]
    keys = 2 * part * SHARED * SIZE
    assert moved.count(keys) >= 18  # of keys and values both ways, and their gradients
    beside = [c for c in schedule.communications if c.bytes == keys and c.matmuls]
    assert len(beside) == 18, schedule
    late, whole = (f"bf16[1,{n},{HEADS},{SIZE}]" for n in (part // 2, part))
    for name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        found = kernels(text, name)
        assert (found.count(late), found.count(whole)) == (3, 7), found
