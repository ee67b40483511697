"""In loops a transfer is issued as soon as its source is there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute, For, Wait
from jhost.lowering.schedule.schedule_loops import ScheduleLoops
from tests.lowering.on_mesh import exact, on
from tests.lowering.traced import array, loops

Array = jax.Array
ROWS, COLUMNS = P("tp"), P(None, "tp")
HOW: dict[str, dict[str, Any]] = {"p2p": {}, "collective": {"chunks": 2}}
each_pipeline = pytest.mark.parametrize("pipeline", HOW)


def weight_gradient(x: Array, w: Array, y: Array) -> Array:
    """Both are gathered: y for the product with what x becomes."""
    return jnp.swapaxes(jhost.stream(x, 0) @ w, 0, 1) @ y


def block(x: Array, up: Array, down: Array) -> Array:
    return jhost.stream((x @ up) @ down, 0)


def lowered(fun: Any, pipeline: str, ins: Any, out: Any, *args: Array) -> Program:
    settings = on({"tp": 4}, ins, out, pipeline=pipeline, **HOW[pipeline])
    return exact(fun, *args, **settings)


def order(loop: For) -> list[str]:
    """What an iteration does, in short."""
    kinds = Compute | Communicate | Wait
    return [type(s).__name__.lower() for s in loop.body if isinstance(s, kinds)]


@each_pipeline
def test_a_second_value_is_on_its_way_while_the_first_is_worked_on(
    pipeline: str,
) -> None:
    specs = (ROWS, COLUMNS, ROWS), ROWS
    args = array(32, 4), array(4, 16, seed=1), array(32, 4, seed=2)
    (loop,) = loops(lowered(weight_gradient, pipeline, *specs, *args))
    first_work = order(loop).index("compute")
    assert order(loop)[:first_work] == ["communicate", "communicate", "wait"]
    assert "wait" in order(loop)[first_work:]


@each_pipeline
def test_what_an_iteration_makes_is_sent_when_it_is_made(pipeline: str) -> None:
    args = array(32, 4), array(4, 16, seed=1), array(16, 4, seed=2)
    specs = (ROWS, COLUMNS, ROWS), ROWS
    (loop,) = loops(lowered(block, pipeline, *specs, *args))
    assert order(loop) == ["communicate", "wait", "compute", "communicate", "wait"]


def test_sums_that_nothing_waits_for_stand_beside_what_is_sent() -> None:
    """The gradient of x is sent before that of w, which is written first, is made."""

    def backward(x: Array, w: Array, dy: Array) -> tuple[Array, Array]:
        dy = jhost.stream(dy, 0)
        return jnp.swapaxes(x, 0, 1) @ dy, dy @ jnp.swapaxes(w, 0, 1)

    args = array(32, 4), array(4, 16, seed=1), array(32, 16, seed=2)
    specs = (ROWS, COLUMNS, COLUMNS), (COLUMNS, ROWS)
    (loop,) = loops(lowered(backward, "p2p", *specs, *args))
    received, sent = ["communicate", "compute"], ["communicate", "wait", "compute"]
    assert order(loop) == [*received, *sent, "wait"]


def test_doing_it_twice_changes_nothing() -> None:
    specs = (ROWS, COLUMNS, ROWS), ROWS
    args = array(32, 4), array(4, 16, seed=1), array(32, 4, seed=2)
    once = lowered(weight_gradient, "p2p", *specs, *args)
    assert str(ScheduleLoops().apply(once)) == str(once)
