"""Shards of weights that come beside what is computed before they are read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import most_under_way
from jhost.lowering.ir.statements import (
    Allocate,
    Communicate,
    Compute,
    PipelineKind,
    Wait,
    walk,
)
from tests import budget, sums
from tests.lowering.on_mesh import every_size, exact, on, program_of, sizes_and_counts
from tests.lowering.outside import (
    gradients_of,
    kinds,
    layer,
    operands,
    tensor_parallel_blocks,
)
from tests.lowering.traced import array, lowered

WIDTH = 8


pytestmark = pytest.mark.usefixtures("by_permutes")


def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Rows stay where they are."""
    for w in weights:
        x = jhost.shard(layer(x, w), P("fsdp"))
    return x


gradients = gradients_of(layers)


def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return layers(x, w, w.T, w), None

    return lax.scan(body, x, w)[0]


def sharded(devices: int, count: int, **how: Any) -> dict[str, Any]:
    """Rows and weights over one axis: by turns in their first and last dim."""
    weights = P("fsdp"), P(None, "fsdp")
    specs = P("fsdp"), *(weights[n % 2] for n in range(count))
    return on({"fsdp": devices}, specs, specs, **how)


# --- What stands where ------------------------------------------------------------- #


def test_the_next_shards_come_beside_a_matmul(golden: Callable[..., None]) -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x, w, v = (jhost.shard(each, P("fsdp")) for each in (x, w, v))
        return jhost.shard(x @ w, P("fsdp")) @ v

    golden(str(lowered(f, (4, 2), (2, 2), (2, 2), fsdp=2)))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_a_shard_goes_from_each_device_to_each_other(devices: int) -> None:
    args = array(devices, devices), *[array(devices, devices, seed=n) for n in (1, 2)]
    specs = P("fsdp"), P("fsdp"), P(None, "fsdp")
    program = program_of(layers, *args, **on({"fsdp": devices}, specs, P("fsdp")))
    sent = ["CollectivePermute"] * (devices - 1)
    assert kinds(program) == ["AllGather", *sent]


def test_no_more_than_two_come_at_a_time() -> None:
    """Nor are more kept that nothing has read."""
    args, how = operands(16, 9, WIDTH), sharded(2, 9)
    how["out_shardings"] = P("fsdp")
    program = program_of(layers, *args, **how)
    assert most_under_way(program) == 2


def test_beside_a_scan_nothing_comes_where_most_is_held() -> None:
    """As in a step, whose first weights of the backward do not come beside the loss."""

    def f(x: jax.Array, v: jax.Array, w: jax.Array, ws: jax.Array) -> jax.Array:
        x = layers(layers(scanned(x, ws), v), v.T)
        return layers(layers(x, w.T), w)

    args = array(32, 8), array(8, 64), array(8, 8), array(2, 8, 8)
    specs = P("fsdp"), P("fsdp"), P("fsdp"), P(None, "fsdp")
    program = program_of(f, *args, **on({"fsdp": 2}, specs, P("fsdp")))
    (wide,) = (
        number
        for number, stmt in enumerate(program.body)
        if isinstance(stmt, Compute) and any(b.shape == (16, 64) for b in stmt.outs)
    )
    *_, last = (
        number
        for number, stmt in enumerate(program.body)
        if isinstance(stmt, Communicate) and stmt.source.shape == (4, 8)
    )
    # It stands beside the one work that reads the wide value, and not the one before.
    assert last > wide


def test_nothing_is_put_together_before_it_has_come() -> None:
    program = program_of(gradients, *operands(16, 4, WIDTH), **sharded(2, 4))
    came: set[str] = set()
    in_flight: dict[str, str] = {}
    for stmt in walk(program.body):
        if isinstance(stmt, Communicate):
            in_flight[stmt.name] = stmt.out.name
        elif isinstance(stmt, Wait):
            came.add(in_flight.pop(stmt.communication))
        elif isinstance(stmt, Compute):
            assert came.issuperset(b.name for b in stmt.ins if "came" in b.name)
    assert any(isinstance(stmt, Allocate) for stmt in program.body)


def test_what_is_made_right_before_is_gathered_at_once() -> None:
    """Rows between two matmuls: nothing is computed until they are read."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = jhost.shard(x, P("tp", None))
        y = jhost.shard(jnp.abs(x @ w), P("tp", None))
        return jhost.shard(y, P()) @ v

    program = lowered(f, (4, 4), (4, 4), (4, 4), tp=2)
    assert kinds(program) == ["AllGather"]


# --- Values ------------------------------------------------------------------------ #


@sizes_and_counts
def test_gradients_are_exact(devices: int, count: int) -> None:
    program = exact(
        gradients, *operands(8 * devices, count, WIDTH), **sharded(devices, count)
    )
    found = kinds(program)
    assert found.count("AllGather") == 1
    assert "CollectivePermute" in found


@budget.first_is_quick("devices", [3, 6])
def test_any_number_of_devices(devices: int) -> None:
    """Also one that is no power of two."""
    args = [array(devices, devices, seed=n) for n in range(5)]
    program = exact(gradients, *args, **sharded(devices, 4))
    assert set(kinds(program)) == {"AllGather", "CollectivePermute"}


@every_size
def test_in_the_body_of_a_scan(devices: int) -> None:
    """Each layer's come for itself, forward and backward."""

    args = array(devices, WIDTH), array(3, WIDTH, WIDTH, seed=1)
    specs = P("fsdp"), P(None, "fsdp")
    program = exact(gradients_of(scanned), *args, **on({"fsdp": devices}, specs, specs))
    assert "CollectivePermute" in kinds(program)


@pytest.mark.slow
@given(
    st.sampled_from([{"fsdp": 2, "tp": 2}, {"tp": 2, "fsdp": 2}, {"fsdp": 4, "tp": 2}]),
    st.integers(1, 3),
    st.sampled_from(["off", "collective", "p2p"]),
    st.sampled_from(sums.EVERY),
)
@settings(max_examples=budget.examples(6), deadline=None)
def test_beside_tensor_parallel_loops(
    axes: dict[str, int], count: int, pipeline: PipelineKind, where: Any
) -> None:
    args = operands(2 * axes["fsdp"] * axes["tp"], 2 * count, WIDTH)
    weights = (P("fsdp", "tp"), P("tp", "fsdp")) * count
    specs = P(("fsdp", "tp")), *weights
    blocks = tensor_parallel_blocks("fsdp")
    with sums.standing(where):
        exact(gradients_of(blocks), *args, **on(axes, specs, specs, pipeline=pipeline))


@given(st.data())
@settings(max_examples=budget.examples(8), deadline=None)
def test_weights_of_any_shape(data: st.DataObject) -> None:
    """Of a few dtypes, sharded in either dim."""
    devices = data.draw(st.sampled_from([2, 4]))
    dims = st.sampled_from([devices, 2 * devices])
    widths = [data.draw(dims) for _ in range(data.draw(st.integers(2, 4)))]
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int32"]))
    places = [data.draw(st.integers(0, 1)) for _ in widths[1:]]

    shapes = [(devices, widths[0]), *itertools.pairwise(widths)]
    args = [array(*s, seed=n).astype(dtype) for n, s in enumerate(shapes)]
    weights = [P("fsdp") if place == 0 else P(None, "fsdp") for place in places]
    exact(layers, *args, **on({"fsdp": devices}, (P("fsdp"), *weights), P("fsdp")))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_no_numbers_are_those_of_the_plain_function(special: float) -> None:
    def step(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        y = jhost.shard(x @ w, P("fsdp"))
        return y @ v, jhost.shard(x.T @ x, P("fsdp")), jhost.shard(y @ w, P("fsdp"))

    x, w = np.ones((8, 4), np.float32), np.ones((4, 4), np.float32)
    x[5, 1] = w[2, 3] = special
    specs = (P("fsdp"),) * 3
    program = exact(step, x, w, w.T.copy(), **on({"fsdp": 4}, specs, specs))
    assert "CollectivePermute" in kinds(program)
