"""What a whole training step moves beside its layers: masters, lookup, loss, norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import held_statements, programs
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute
from jhost.testing import mesh_of

LAYERS, WIDTH, HIDDEN, SHARED, WORDS = 2, 32, 64, 16, 64
BATCH, SEQUENCE = 4, 16
pytestmark = pytest.mark.usefixtures("combined_as_on_gpus")

MESHES: list[dict[str, int]] = [
    {"tp": 2},
    {"fsdp": 2},
    {"dp": 2},
    {"fsdp": 2, "tp": 2},
]


def specs_of(axes: Mapping[str, int]) -> dict[str, Any]:
    fsdp, tp = (axis if axis in axes else None for axis in ("fsdp", "tp"))
    return {
        "table": P(tp, fsdp),
        "layers": {
            "gain": P(),
            "query": P(None, fsdp, tp),
            "key": P(None, fsdp, tp),
            "out": P(None, tp, fsdp),
            "up": P(None, fsdp, tp),
            "down": P(None, tp, fsdp),
        },
        "gain": P(),
        "logits": P(fsdp, tp),
    }


def params() -> dict[str, Any]:
    """Float32 masters; queries are wider than keys."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32)

    return {
        "table": drawn(WORDS, WIDTH),
        "layers": {
            "gain": np.ones((LAYERS, WIDTH), np.float32),
            "query": drawn(LAYERS, WIDTH, WIDTH),
            "key": drawn(LAYERS, WIDTH, SHARED),
            "out": drawn(LAYERS, WIDTH, WIDTH),
            "up": drawn(LAYERS, WIDTH, HIDDEN),
            "down": drawn(LAYERS, HIDDEN, WIDTH),
        },
        "gain": np.ones(WIDTH, np.float32),
        "logits": drawn(WIDTH, WORDS),
    }


def tokens() -> Any:
    shape = BATCH, SEQUENCE + 1
    return np.random.default_rng(1).integers(0, WORDS, shape).astype(np.int32)


def step_on(axes: Mapping[str, int]) -> Callable[..., Any]:
    """The loss, and the next params by gradients that are clipped by their norm."""
    batch = tuple(axis for axis in ("dp", "fsdp") if axis in axes)
    tp = "tp" if "tp" in axes else None
    rows, features = P(batch, tp, None), P(batch, None, tp)

    def normal(x: jax.Array, gain: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
        return (wide * scale * gain).astype(x.dtype)

    def layer(x: jax.Array, masters: Any) -> tuple[jax.Array, None]:
        cast = jnp.bfloat16
        w = {n: v.astype(cast) if v.ndim > 1 else v for n, v in masters.items()}
        h = normal(x, w["gain"])
        q, k = (jhost.shard(h @ w[name], features) for name in ("query", "key"))
        mixed = jnp.tanh(q) * jnp.repeat(k, WIDTH // SHARED, -1)
        x = x + jhost.shard(jhost.stream(mixed @ w["out"], axis=1), rows)
        up = jhost.shard(jnp.tanh(normal(x, w["gain"]) @ w["up"]), features)
        return x + jhost.shard(jhost.stream(up @ w["down"], axis=1), rows), None

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["table"].astype(jnp.bfloat16)[tokens[:, :-1]]
        x = jhost.shard(x, rows)
        layers = jax.checkpoint(layer, prevent_cse=False)
        x, _ = lax.scan(layers, x, params["layers"])
        x = normal(x, params["gain"]) @ params["logits"].astype(jnp.bfloat16)
        logits = jhost.shard(x, features).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def step(params: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        scale = 0.1 / jnp.maximum(norm, 1)
        return jax.tree.map(lambda w, g: w - scale * g, params, grads), loss

    return step


@functools.cache
def lowered_on(axes: tuple[tuple[str, int], ...]) -> Any:
    specs = specs_of(dict(axes))
    f = jhost.jit(
        step_on(dict(axes)),
        mesh=mesh_of(dict(axes)),
        in_shardings=(specs, P(tuple(a for a in ("dp", "fsdp") if a in dict(axes)))),
        out_shardings=(specs, P()),
    )
    return f.lower(params(), tokens())


def program_on(axes: dict[str, int]) -> Program:
    return lowered_on(tuple(axes.items())).host_ir


def communications(program: Program) -> list[Communicate]:
    stmts = (stmt for _, stmt in held_statements(program))
    return [stmt for stmt in stmts if isinstance(stmt, Communicate)]


on_each_mesh = pytest.mark.parametrize("axes", MESHES, ids=str)


@on_each_mesh
def test_no_weight_is_gathered_in_float32_for_a_reader_of_bfloat16(
    axes: dict[str, int],
) -> None:
    for program in programs(program_on(axes)):
        casts = {
            buffer.name
            for stmt in program.body
            if isinstance(stmt, Compute)
            for buffer in stmt.ins
            if buffer.dtype == jnp.float32
            and any(out.dtype == jnp.bfloat16 for out in stmt.outs)
        }
        gathered = {
            stmt.out.name
            for stmt in program.body
            if isinstance(stmt, Communicate) and stmt.kind == "AllGather"
        }
        assert not casts & gathered


@on_each_mesh
def test_the_norm_and_the_gradients_of_gains_are_few_transfers(
    axes: dict[str, int],
) -> None:
    """Fifteen all-reduces before, of which nine had 4 bytes."""
    kinds = [stmt.kind for stmt in communications(program_on(axes))]
    assert kinds.count("AllReduce") <= (3 if len(axes) == 1 else 4)


@functools.cache
def plain_step() -> Any:
    return jax.jit(step_on({}))(params(), tokens())


@on_each_mesh
def test_the_step_is_the_plain_one(axes: dict[str, int]) -> None:
    (trained, loss), _ = lowered_on(tuple(axes.items())).interpret(params(), tokens())
    wanted, plain = plain_step()
    np.testing.assert_allclose(loss, plain, rtol=1e-2)
    chex.assert_trees_all_close(trained, wanted, atol=2e-3)
