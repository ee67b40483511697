"""Gradients' sums over data-parallel devices, beside matmuls on H200s."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s, exposed

ROWS, WIDTH, LAYERS = 16384, 8192, 6
SUM = 2 * WIDTH * WIDTH
"""Its bytes."""


def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def step(mesh: Mesh, **how: Any) -> Any:
    """The gradients of all but x, by JAX's own way of laying data parallel out."""
    specs = P("dp"), *(P(),) * LAYERS
    shapes = (ROWS, WIDTH), *[(WIDTH, WIDTH)] * LAYERS
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    gradients = jax.grad(loss, tuple(range(1, 1 + LAYERS)))
    settings: dict[str, Any] = {"in_shardings": specs, "out_shardings": P()}
    # By itself jhost finds the sums' own loops here.
    hosted: Any = jhost.jit(gradients, mesh=mesh, streams="marked", **settings, **how)
    return hosted.lower(*types).compile()


@pytest.fixture(scope="module")
def beside(h200s: MakeH200s) -> Any:
    return step(h200s({"dp": 4}))


def test_they_are_beside_what_is_computed_next(beside: Any) -> None:
    """Two swaps each, but for the first layer's sum, behind which nothing is left."""
    schedule = beside.schedule()
    kinds = Counter(each.kind for each in schedule.communications)
    swaps = 2 * (LAYERS - 1)
    assert kinds == {"CollectivePermute": swaps, "AllReduce": 1}, str(schedule)
    assert not exposed(schedule, "CollectivePermute"), schedule


def test_few_are_kept_at_a_time(h200s: MakeH200s, beside: Any) -> None:
    """One more than where each is made at once, not one more for each layer."""
    at_once = step(h200s({"dp": 4}), pipeline="off")
    later, whole = (
        each.memory_analysis().temp_size_in_bytes for each in (beside, at_once)
    )
    assert later < whole + 1.5 * SUM
