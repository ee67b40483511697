"""What stages send each other stands beside matmuls, on two H200s, both ways."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s, exposed

EXAMPLES = Path(__file__).parents[2] / "examples"
MICROBATCHES, TOKENS, MODEL, HIDDEN = 4, 4096, 4096, 14336


def mlp(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jax.nn.silu(x @ weights["up"]) @ weights["down"]


def test_a_permute_that_is_on_its_way_for_a_tick_stands_beside_its_work(
    h200s: MakeH200s, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    pipeline: Any = runpy.run_path(str(EXAMPLES / "pipeline.py"))["pipeline"]
    axes = ("stage", "dp")
    devices = h200s({"stage": 4}).devices[:2].reshape(2, 1)
    mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)

    def loss(weights: Any, xs: jax.Array) -> jax.Array:
        made = pipeline(mlp, weights, xs, delay=True)
        return jnp.mean(made.astype(jnp.float32) ** 2)

    specs = {"up": P(None, "stage"), "down": P(None, "stage")}
    step = jhost.jit(
        jax.value_and_grad(loss),
        mesh=mesh,
        in_shardings=(specs, P()),
        out_shardings=(P(), specs),
    )
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = {"up": array((1, 2, MODEL, HIDDEN)), "down": array((1, 2, HIDDEN, MODEL))}
    with jax.set_mesh(mesh):
        xs = array((MICROBATCHES, TOKENS, MODEL))
        schedule = step.lower(weights, xs).compile().schedule()
    permutes = [c for c in schedule.communications if c.kind == "CollectivePermute"]
    assert len(permutes) == 2, str(schedule)
    assert not exposed(schedule, "CollectivePermute"), str(schedule)
