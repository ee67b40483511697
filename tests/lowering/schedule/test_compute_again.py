"""What is cheap is computed again rather than kept, in a program and between scans."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jhost
from jhost._annotate import Pipeline
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Allocate, Scan
from jhost.lowering.schedule.recompute.loops import with_copies
from jhost.lowering.verify.program import verify
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import array, asked, check

MESH = mesh_of(tp=4)
ROWS, MODEL, HIDDEN, LAYERS = 16, 8, 48, 3
X, GATE, UP = array(ROWS, MODEL), array(MODEL, HIDDEN, seed=1), array(MODEL, HIDDEN)
DOWN = array(HIDDEN, MODEL, seed=2)
SPECS = P("tp"), P(None, "tp"), P(None, "tp"), P("tp")
STACKED = tuple(P(None, *spec) for spec in SPECS[1:])
HIDDEN_PART = (ROWS, HIDDEN // 4)
"""What a device has of a value between the two matmuls."""


def bent(x: jax.Array) -> jax.Array:
    """An activation with a derivative of two factors, exact on integers."""
    return jnp.clip(x, -2, 2) * jnp.clip(x, -1, 3)


def gated(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    y = jhost.stream((bent(x @ gate) * (x @ up)) @ down, axis=0)
    return jhost.shard(jnp.clip(y, -3, 3), P("tp"))


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *args: jnp.sum(f(*args)), (0, 1, 2, 3))


def allocated(program: Program, shape: tuple[int, ...]) -> int:
    """How many buffers of that shape loops write in chunks."""
    stmts = (stmt for stmt in statements(program) if isinstance(stmt, Allocate))
    return sum(stmt.buffer.shape == shape for stmt in stmts)


# --- In a program ------------------------------------------------------------------- #


def test_a_backward_s_loop_reads_what_matmuls_make_or_read() -> None:
    """What both matmuls made, and the product that one reads in each pass."""
    settings: dict[str, Any] = {"mesh": MESH, "in_shardings": SPECS, "pipeline": "p2p"}
    program = check(gradients(gated), X, GATE, UP, DOWN, **settings)
    assert allocated(program, HIDDEN_PART) == 3


def test_layers_written_out() -> None:
    def model(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for _ in range(2):
            x = gated(x, *weights)
        return x

    settings: dict[str, Any] = {"mesh": MESH, "in_shardings": SPECS, "pipeline": "p2p"}
    program = check(gradients(model), X, GATE, UP, DOWN, **settings)
    assert allocated(program, HIDDEN_PART) == 6


def copied(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """What is computed where it is first read, of a program with copies."""
    program, late = with_copies(asked(fun, *shapes))
    verify(program)
    return sorted(late)


def test_what_takes_more_to_keep_is_not_computed_again() -> None:
    """The sum would need both its terms, which nothing else reads."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        total = (x @ w) + (x @ jnp.sin(w))
        return jhost.stream(total @ w, axis=0) + total

    assert not copied(f, (4, 4), (4, 4))


def test_what_is_read_with_another_s_transfer_is_not_behind_work() -> None:
    """The product is read in each step of one loop, as the rows come."""

    def f(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        rows = x @ w
        product = jnp.sin(y) * y
        return jhost.stream(product @ w, axis=0), product.T @ rows

    assert not copied(f, (4, 4), (4, 4), (4, 4))


def test_an_operand_of_a_matmul_on_both_sides_is_kept() -> None:
    """It is written to memory once instead of twice: a weight's cast, say."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        low = w.astype(jnp.bfloat16).astype(jnp.float32)
        hidden = jhost.stream(jnp.tanh(x @ low), axis=0)
        return lax.dot_general(hidden, low, (((1,), (1,)), ((), ())))

    assert not copied(f, (4, 4), (4, 4))


def test_what_is_kept_anyway_costs_nothing() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x @ w
        bent = jnp.tanh(y) * y
        return jhost.stream(bent @ w, axis=0) + bent, y

    assert len(copied(f, (4, 4), (4, 4))) == 2


def test_of_results_there_is_no_copy() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ w)
        return jhost.stream(y @ w, axis=0) + y, y

    assert not copied(f, (4, 4), (4, 4))


def test_what_is_serial_stays_one_value() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        bent = jhost.serial(jnp.tanh(y))
        return jhost.stream(bent @ w, axis=0) + bent + y

    assert not copied(f, (4, 4), (4, 4))


@pytest.mark.parametrize("pipeline", ["off", "p2p"])
def test_without_a_pipeline_xla_computes_where_it_reads(pipeline: Pipeline) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        bent = jnp.tanh(y)
        return jhost.stream(bent @ w, axis=0, pipeline=pipeline) + bent + y

    assert bool(copied(f, (4, 4), (4, 4))) == (pipeline == "p2p")


# --- Between scans ------------------------------------------------------------------ #


def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return gated(x, *weights), None

    return lax.scan(layer, x, weights)[0]


def stacked(program: Program) -> list[tuple[int, ...]]:
    """The shapes of what the first scan of a program stacks."""
    first = next(stmt for stmt in program.body if isinstance(stmt, Scan))
    return [y.shape for y in first.ys]


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param("off", marks=pytest.mark.slow),
        pytest.param("collective", marks=pytest.mark.slow),
        "p2p",
    ],
)
def test_a_scan_stacks_what_matmuls_make_or_read(pipeline: Pipeline) -> None:
    """What both matmuls made, and the product that one reads in each pass."""
    weights = [jnp.stack([w] * LAYERS) for w in (GATE, UP, DOWN)]
    settings: dict[str, Any] = {"in_shardings": (SPECS[0], *STACKED)}
    settings |= {"mesh": MESH, "pipeline": pipeline}
    program = check(gradients(layers), X, *weights, **settings)
    assert stacked(program).count((LAYERS, *HIDDEN_PART)) == 3


def bytes_stacked(fun: Callable[..., Any], *args: Any) -> int:
    """Of values of four bytes an element, by a program on one device."""
    return 4 * sum(map(math.prod, stacked(check(fun, *args, mesh=mesh_of(tp=1)))))


def test_what_is_stacked_twice_and_read_as_a_whole() -> None:
    """A value that is read otherwise too is stacked, and others are made of it."""

    def f(x: jax.Array, ws: jax.Array) -> Any:
        def first(x: jax.Array, w: jax.Array) -> Any:
            y = x @ w
            bent = jnp.clip(y, -2, 2)
            return bent, (y, bent * 2, bent * 2, bent + w)

        def second(x: jax.Array, ys: Any) -> Any:
            y, one, other, more = ys
            return x * other + y, one - more

        x, (y, one, other, more) = lax.scan(first, x, ws)
        return lax.scan(second, x, (y, one, other, more), reverse=True), y, one

    ws = array(LAYERS, MODEL, MODEL)
    assert bytes_stacked(f, array(MODEL, MODEL), ws) == 2 * 4 * ws.size


def test_a_constant_and_what_is_sliced_are_handed_on() -> None:
    """And what no scan but a third one reads."""

    def f(x: jax.Array, table: jax.Array, ws: jax.Array) -> Any:
        def first(x: jax.Array, w: jax.Array) -> Any:
            return x @ w, (w + table, w * 3)

        def second(x: jax.Array, y: jax.Array) -> Any:
            return x + y, y * x

        x, (one, other) = lax.scan(first, x, ws)
        x, products = lax.scan(second, x, one)
        return (
            lax.scan(second, x, (other + 0) * 1),
            lax.scan(second, x, other),
            products,
        )

    table, ws = array(MODEL, MODEL), array(LAYERS, MODEL, MODEL, seed=1)
    assert bytes_stacked(f, array(MODEL, MODEL), table, ws) == 4 * ws.size


def test_a_slice_that_is_handed_on_as_it_is() -> None:
    def f(x: jax.Array, ws: jax.Array) -> Any:
        def first(x: jax.Array, w: jax.Array) -> Any:
            return x @ w, jnp.sign(w)

        def second(held: jax.Array, sign: jax.Array) -> Any:
            return sign, sign * 2

        x, signs = lax.scan(first, x, ws)
        return lax.scan(second, x, signs)

    assert bytes_stacked(f, array(4, 4), array(LAYERS, 4, 4)) == 0


def test_a_weight_that_both_scans_read_is_sliced_once() -> None:
    """The backward makes the cast again, of the slice that it has already."""

    def f(x: jax.Array, ws: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return bent(x @ w.astype(jnp.bfloat16).astype(jnp.float32)) * w, None

        return jnp.sum(lax.scan(layer, x, ws)[0])

    x, ws = array(MODEL, MODEL), array(LAYERS, MODEL, MODEL, seed=1)
    program = check(jax.grad(f, (0, 1)), x, ws, mesh=mesh_of(tp=1))
    *_, back = (stmt for stmt in program.body if isinstance(stmt, Scan))
    assert len({b.name for b in back.xs}) == len(back.xs)
    assert stacked(program).count(ws.shape) == 2  # the product, and what it was of


def test_what_a_policy_names_is_stacked() -> None:
    def f(x: jax.Array, ws: jax.Array) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            named = checkpoint_name(bent(x @ w), "bent")
            return jnp.clip(named @ w.T, -2, 2), None

        policy = jax.checkpoint_policies.save_only_these_names("bent")
        return jnp.sum(lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0])

    ws = array(LAYERS, MODEL, HIDDEN)
    program = check(jax.grad(f, 1), X, ws, mesh=mesh_of(tp=1))
    assert (LAYERS, ROWS, HIDDEN) in stacked(program)


def test_a_scan_of_no_iteration() -> None:
    weights = [jnp.stack([w] * LAYERS)[:0] for w in (GATE, UP, DOWN)]
    check(gradients(layers), X, *weights, mesh=mesh_of(tp=1))
