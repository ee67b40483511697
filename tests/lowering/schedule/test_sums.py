"""Sums over devices by permutes, beside what is computed until they are read."""

from __future__ import annotations

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
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.queues import OWN
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.statements import (
    Communicate,
    Compute,
    PipelineKind,
    Scan,
    SetCurrentStream,
    Stmt,
    Wait,
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
from tests.lowering.traced import array, lowered, remarks

WIDTH = 4


pytestmark = pytest.mark.usefixtures("by_permutes")


def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    for w in weights:
        x = layer(x, w)
    return x


gradients = gradients_of(layers)


def data_parallel(devices: int, count: int, **how: Any) -> dict[str, Any]:
    specs = P("dp"), *(P(),) * count
    return on({"dp": devices}, specs, specs, **how)


def on_data(devices: int, count: int) -> Program:
    """The gradients' program."""
    args = operands(2 * devices, count, WIDTH)
    return program_of(gradients, *args, **data_parallel(devices, count))


# --- What stands where ------------------------------------------------------------- #


def test_sums_set_out_before_the_next_work(golden: Callable[..., None]) -> None:
    def step(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        return gradients(jhost.shard(x, P("dp")), w, v)[1:]

    golden(str(lowered(step, (4, 2), (2, 2), (2, 2), dp=2)))


@pytest.mark.parametrize("scans", [False, True])
def test_a_sum_comes_where_there_is_room(scans: bool) -> None:
    """Behind the product that frees the values before a loss, and not beside it."""

    def loss_of(x: jax.Array, w: jax.Array, ws: jax.Array) -> Any:
        x = jhost.shard(x, P("dp"))
        if scans:
            x, _ = lax.scan(lambda x, w: (x @ w, None), x, ws)
        large = jnp.tanh(x @ w)
        return jhost.shard(x.T @ large, P()), (large @ w.T) @ ws[0]

    body = lowered(loss_of, (8, 4), (4, 64), (3, 4, 4), dp=2).body
    sent = next(n for n, stmt in enumerate(body) if isinstance(stmt, Communicate))
    products = [n for n in range(sent) for _ in range(_products(body[n]))]
    assert len(products) == 3
    # XLA would otherwise issue the sum first.
    before = body[: products[-1]]
    streams = [stmt.stream for stmt in before if isinstance(stmt, SetCurrentStream)]
    assert streams[-1:] == [OWN]


def _products(stmt: Stmt) -> int:
    eqns = stmt.unit.eqns if isinstance(stmt, Compute) else ()
    return sum(each.rule.contracts for each in eqns)


def test_a_sum_that_no_later_work_has_room_for_ends_before_a_scan() -> None:
    """Not beside it: its terms, and what comes, would be there in all iterations."""

    def f(x: jax.Array, w: jax.Array, ws: jax.Array) -> Any:
        x, _ = lax.scan(lambda x, w: (x @ w, None), x, w @ jnp.swapaxes(ws, 1, 2))
        x = jhost.shard(x, P("dp"))
        large = jnp.tanh(x @ w)
        total, y = jhost.shard(x.T @ large, P()), large @ w.T
        y, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w) @ w.T, None), y, ws)
        return total * 2, y

    body = lowered(f, (8, 4), (4, 64), (3, 4, 64), dp=2).body
    order = [type(stmt) for stmt in body if isinstance(stmt, Communicate | Wait | Scan)]
    assert order == [Scan, Communicate, Wait, Scan]


@pytest.mark.parametrize("works", [1, 2])
@pytest.mark.parametrize("spec", [P("dp"), P()])
def test_a_sum_without_room_that_is_sent_on_does_not_wait(works: int, spec: P) -> None:
    """What is made of it may be gathered as early as before the next work."""

    def f(x: jax.Array, w: jax.Array, ws: jax.Array) -> Any:
        x, _ = lax.scan(lambda x, w: (x @ w, None), x, ws)
        large = x @ w
        total = jhost.shard(x.T @ large, spec)
        y = large @ w.T
        for _ in range(works):
            y = y @ ws[0]
        doubled = jhost.shard(total * 2, P("dp"))
        return total, y @ jhost.shard(doubled, P())

    args = array(8, 4), array(4, 64), array(2, 4, 4)
    exact(f, *args, **on({"dp": 2}, (P("dp"), P(), P()), (spec, P("dp"))))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_each_round_swaps_with_one_other_device(devices: int) -> None:
    swaps = ["CollectivePermute"] * 4 * (devices.bit_length() - 1)
    assert kinds(on_data(devices, count=4)) == swaps


def test_no_more_than_a_window_is_under_way() -> None:
    """The next terms come once the sum before has ended, beside one work."""
    assert most_under_way(on_data(2, count=9)) == 1


def test_what_work_reads_at_once_is_not_swapped() -> None:
    """A row-parallel matmul, whose sum the next one multiplies."""

    def chain(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x, w = jhost.shard(x, P(None, "tp")), jhost.shard(w, P("tp"))
        return jhost.shard(x @ w, P()) @ v

    assert kinds(lowered(chain, (4, 4), (4, 4), (4, 4), tp=2)) == ["AllReduce"]


def test_effects_keep_their_order() -> None:
    """What prints a sum comes before what prints later, and waits for it there."""

    def printed(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        total = jhost.shard(x.T @ x, P())
        jax.debug.print("{}", total[0, 0], ordered=False)
        return total, (x @ w) @ v

    shapes = (jax.ShapeDtypeStruct((4, 4), jnp.float32),) * 3
    settings = on({"dp": 2}, (P("dp"), P(), P()), (P(), P("dp")))
    with sums.nothing_moving():
        program = program_of(printed, *shapes, **settings)
    assert kinds(program) == ["AllReduce"]


def test_who_needs_one_sum_waits_for_no_other() -> None:
    """The second sum is issued with the product that has the first one made."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        x = jhost.shard(x, P("dp"))
        first, y = jhost.shard(x.T @ x, P()), x @ w
        second = jhost.shard(y.T @ y, P())
        return first @ v, second, y @ w

    program = lowered(f, (8, 2), (2, 2), (2, 2), dp=2)
    assert kinds(program) == ["CollectivePermute", "CollectivePermute"]
    (note,) = remarks(program, Note)
    assert len(note.values) == 2


# --- Values ------------------------------------------------------------------------ #


@sizes_and_counts
def test_gradients_are_exact(devices: int, count: int) -> None:
    program = exact(
        gradients, *operands(2 * devices, count, WIDTH), **data_parallel(devices, count)
    )
    assert set(kinds(program)) == {"CollectivePermute"}


@pytest.mark.parametrize("devices", [3, 6])
def test_other_numbers_of_devices_sum_by_collectives(devices: int) -> None:
    program = exact(
        gradients, *operands(2 * devices, 3, WIDTH), **data_parallel(devices, 3)
    )
    assert set(kinds(program)) == {"AllReduce"}


@every_size
def test_in_the_body_of_a_scan(devices: int) -> None:
    def scanned(x: jax.Array, w: jax.Array) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return layers(x, w, w.T), None

        return lax.scan(layer, x, w)[0]

    args = array(devices, WIDTH), array(3, WIDTH, WIDTH, seed=1)
    specs = P("dp"), P()
    exact(gradients_of(scanned), *args, **on({"dp": devices}, specs, specs))


@given(
    st.sampled_from([{"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 4, "tp": 2}]),
    st.integers(1, 3),
    st.sampled_from(["off", "collective", "p2p"]),
    st.sampled_from(sums.EVERY),
)
@settings(max_examples=budget.examples(6), deadline=None)
def test_beside_tensor_parallel_loops(
    axes: dict[str, int], count: int, pipeline: PipelineKind, where: Any
) -> None:
    args = operands(2 * axes["dp"] * axes["tp"], 2 * count, WIDTH)
    specs = P(("dp", "tp")), *(P(None, "tp"), P("tp")) * count
    blocks = tensor_parallel_blocks("dp")
    with sums.standing(where):
        exact(gradients_of(blocks), *args, **on(axes, specs, specs, pipeline=pipeline))


def test_over_two_axes_at_once() -> None:
    specs = P(("a", "b")), P(), P(), P()
    axes = {"a": 2, "b": 4}
    program = exact(gradients, *operands(8, 3, WIDTH), **on(axes, specs, specs))
    assert "CollectivePermute" in kinds(program)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", [1, 0.1])
def test_devices_have_equal_bits(dtype: str, scale: float) -> None:
    """XLA would add what a device has before it is rounded, or multiply and add."""

    def scaled(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = jnp.float32 if scale != 1 else x.dtype
        total = jnp.array(scale, wide) * (x.T @ x).astype(wide)
        return jhost.shard(total.astype(x.dtype), P()), x @ w

    rng = np.random.default_rng(0)
    x, w = (jnp.array(rng.normal(size=s), dtype) for s in ((64, 32), (32, 32)))
    settings = on({"dp": 8}, (P("dp"), P()), (P(), P("dp")))
    settings["compiler_options"] = {}  # XLA's optimizations are what may go wrong
    step = jhost.jit(scaled, **settings)
    assert kinds(step.lower(x, w).host_ir) == ["CollectivePermute"] * 3
    total, _ = step(x, w)
    shards = [np.asarray(shard.data) for shard in total.addressable_shards]
    for shard in shards:
        np.testing.assert_array_equal(shard, shards[0])
    exactly = scale * np.square(x.astype(jnp.float32)).sum(0)
    rounding = 4 * float(jnp.finfo(dtype).eps)  # once by itself, and once a round
    np.testing.assert_allclose(
        np.diag(shards[0]).astype(np.float32), exactly, rtol=rounding
    )


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_no_numbers_are_those_of_the_plain_function(special: float) -> None:
    def step(x: jax.Array, w: jax.Array) -> Any:
        return jhost.shard(x.T @ x, P()), jhost.shard(x @ w, P("dp"))

    x = np.ones((8, 2), np.float32)
    x[5, 1] = special
    args = x, np.ones((2, 2), np.float32)
    settings = on({"dp": 4}, (P("dp"), P()), (P(), P("dp")))
    exact(step, *args, **settings)


def test_what_is_large_behind_the_last_work_is_made_once_the_sum_is_there() -> None:
    """A table's gradient and the terms would take memory at the same time."""

    def step(table: jax.Array, x: jax.Array, w: jax.Array) -> Any:
        x = jhost.shard(x, P("dp"))
        total, y = jhost.shard(x.T @ x, P()), x @ w
        return total, y, table.at[jnp.array([3, 0, 3])].add(w[:3])

    specs, outs = (P(), P("dp"), P()), (P(), P("dp"), P())
    args = array(8, 8), array(8, 8, seed=1), array(8, 8, seed=2)
    program = exact(step, *args, **on({"dp": 2}, specs, outs))
    order = [
        "wait" if isinstance(stmt, Wait) else "write"
        for stmt in program.body
        if isinstance(stmt, Wait)
        or (isinstance(stmt, Compute) and "scatter" in str(stmt.unit))
    ]
    assert order[-1] == "write"


def test_a_sum_ends_before_a_scan_that_holds_most() -> None:
    """Its terms, and what comes, would take memory in all iterations."""

    def step(x: jax.Array, weights: jax.Array, head: jax.Array) -> jax.Array:
        @jax.checkpoint
        def one(x: jax.Array, w: jax.Array) -> jax.Array:
            return layer(layer(x, w), w.T)

        y = lax.scan(lambda x, w: (one(x, w), None), x, weights)[0]
        return layer(y, head) @ head.T

    args = array(16, WIDTH), array(3, WIDTH, 8 * WIDTH, seed=1), array(WIDTH, WIDTH)
    specs = P("dp"), P(), P()
    program = exact(gradients_of(step), *args, **on({"dp": 2}, specs, specs))
    order = [type(stmt) for stmt in program.body if isinstance(stmt, Wait | Scan)]
    assert order[: order.index(Scan, 1)] == [Scan, Wait, Wait]
