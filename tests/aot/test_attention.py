"""Attention, compiled for H200s: cuDNN's kernel, and what is written out, on parts."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.runtime.profile.schedule import parse_schedule
from tests.aot.on_h200 import MakeH200s, compile_both_ways, exposed

pytestmark = pytest.mark.usefixtures("hopper")

SEQUENCE, MODEL = 1024, 4096
HEADS, SHARED, SIZE = 32, 8, 128


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
    mesh: Any, tokens: int, attention: Callable[..., jax.Array], **how: Any
) -> tuple[Callable[..., jax.Array], list[tuple[int, ...]], P]:
    """Attention whose keys go around, the shapes that it takes, and their layout."""
    rows = P(None, "tp")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, jhost.stream(k, 1), v, **how)

    settings: dict[str, Any] = {"in_shardings": rows, "out_shardings": rows}
    hosted = jhost.jit(attend, mesh=mesh, pipeline="p2p", **settings)
    return hosted, [(1, tokens, heads, SIZE) for heads in (HEADS, SHARED, SHARED)], rows


cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
LENGTHS = {"key_value_seq_lengths": np.array([3000], np.int32)}


def exchanged(mesh: Any, hosted: Any, shapes: Any, rows: P) -> str:
    """What XLA makes of keys that go around both ways, each beside what multiplies."""
    *_, text = compile_both_ways(hosted, mesh, shapes, (rows,) * 3, rows)
    schedule = parse_schedule(text)
    assert {c.kind for c in schedule.communications} == {"CollectivePermute"}
    assert len(schedule.communications) == 12, schedule
    assert not exposed(schedule, "CollectivePermute"), schedule
    return text


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
@pytest.mark.parametrize(
    ("how", "each"),
    [({}, 1), ({"is_causal": True}, 2), (LENGTHS, 1)],
    ids=["all", "causal", "lengths"],
)
def test_keys_go_around_beside_kernels(
    h200s: MakeH200s, how: dict[str, Any], each: int
) -> None:
    """Each way what comes at a step is under way beside a kernel of another."""
    mesh = h200s({"tp": 4})
    text = exchanged(mesh, *ring(mesh, 4 * SEQUENCE, cudnn, **how))
    # Each device's own part stands on the diagonal; others are seen whole, or hidden.
    part = f"bf16[1,{SEQUENCE},{HEADS},{SIZE}]"
    for name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert kernels(text, name) == [part] * (1 + 3 * each)


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
def test_keys_go_around_beside_what_is_written_out(h200s: MakeH200s) -> None:
    """The largest array is that of a chunk's scores; none are kept."""
    mesh = h200s({"tp": 4})
    hosted, shapes, rows = ring(mesh, 4 * SEQUENCE, jhost.dot_product_attention)
    text = exchanged(mesh, hosted, shapes, rows)
    found = re.findall(r"\w+\[([\d,]+)\]", text)
    sizes = {math.prod(map(int, shape.split(","))) for shape in found}
    assert max(sizes) == HEADS * SEQUENCE**2


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
def test_long_causal_sequences_are_in_zigzag_order(h200s: MakeH200s) -> None:
    """A step's kernel is of late queries, or of early keys, or a device's own."""
    mesh, part = h200s({"tp": 4}), 8 * SEQUENCE
    hosted, shapes, rows = ring(mesh, 4 * part, cudnn, is_causal=True)
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
