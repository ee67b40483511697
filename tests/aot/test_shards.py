"""Shards of weights, and their gradients' sums, beside matmuls on H200s."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s, exposed, exposed_in_bodies

ROWS, WIDTH, LAYERS, DEVICES = 32768, 8192, 6, 4
WEIGHT = 2 * WIDTH * WIDTH
"""Its bytes."""


@pytest.fixture
def fsdp(h200s: MakeH200s) -> Mesh:
    return h200s({"fsdp": DEVICES})


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ w)


def written(x: jax.Array, weights: Any) -> jax.Array:
    for w in weights:
        x = layer(x, w)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def compiled(f: Any, weights: Any, spec: Any, outs: Any, mesh: Mesh, **how: Any) -> Any:
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    hosted: Any = jhost.jit(
        f, mesh=mesh, in_shardings=(P("fsdp"), spec), out_shardings=outs, **how
    )
    return hosted.lower(x, weights).compile()


def of_layers(f: Any, mesh: Mesh, outs: Any, **how: Any) -> Any:
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    return compiled(f, [weight] * LAYERS, [P("fsdp")] * LAYERS, outs, mesh, **how)


@pytest.fixture(scope="module")
def forward(h200s: MakeH200s) -> Any:
    return of_layers(written, h200s({"fsdp": DEVICES}), P())


def test_a_forward_has_its_weights_when_it_gets_there(forward: Any) -> None:
    """All but the first come beside the matmuls before."""
    schedule = forward.schedule()
    kinds = Counter(each.kind for each in schedule.communications)
    permutes = (LAYERS - 1) * (DEVICES - 1)
    assert kinds["AllGather"] == 1, str(schedule)
    assert kinds["CollectivePermute"] == permutes, str(schedule)
    assert exposed(schedule, "CollectivePermute") == set(), str(schedule)


def test_a_backward_sends_its_sums_beside_what_comes_next(fsdp: Mesh) -> None:
    """Behind the first layer's sum nothing is left."""
    outs = [P("fsdp")] * LAYERS
    schedule = of_layers(jax.grad(written, 1), fsdp, outs).schedule()
    kinds = Counter(each.kind for each in schedule.communications)
    assert kinds["ReduceScatter"] == 1, str(schedule)
    assert exposed(schedule, "CollectivePermute") == set(), str(schedule)


def test_no_more_weights_are_whole_than_two(fsdp: Mesh, forward: Any) -> None:
    """Of a forward, beside the one that is worked with."""
    in_place = of_layers(written, fsdp, P(), pipeline="off")
    early, whole = (
        each.memory_analysis().temp_size_in_bytes for each in (forward, in_place)
    )
    assert early < whole + 2.5 * WEIGHT


def test_unconstrained_activations_stay_and_weights_come(fsdp: Mesh) -> None:
    """Moving activations takes fewer bytes and more time (`cost/choose_layouts.py`)."""
    layers, rows, width, hidden = 4, 8192, 4096, 8192
    shapes = (rows, width), (layers, width, hidden), (layers, hidden, width)
    x, *weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    spec = [P(None, "fsdp")] * 2

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.relu(x @ w[0]) @ w[1], None

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    step: Any = jhost.jit(
        jax.value_and_grad(loss),
        mesh=fsdp,
        in_shardings=(spec, P("fsdp")),
        out_shardings=(P(), spec),
    )
    schedule = step.lower(weights, x).compile().schedule()
    kinds = Counter(each.kind for each in schedule.communications)
    # Activations would leave one kernel and reach the next by all-to-alls and scatters.
    assert kinds.keys() == {"AllGather", "AllReduce", "CollectivePermute"}, str(
        schedule
    )
    # The link is nearly full in the backward: sums with work behind them stay there.
    assert not exposed_in_bodies(schedule), str(schedule)
