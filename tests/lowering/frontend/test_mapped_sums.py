"""Sums over vmapped axes are sums over dims, which move their terms' sum alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate
from jhost.testing import mesh_of
from tests.lowering.traced import check

REDUCTIONS = {"psum": "sum", "pmax": "max", "pmin": "min"}


def moved(program: Program) -> list[tuple[Any, ...]]:
    """The kind, the reducer and the shape of what each communication sends."""
    return [
        (stmt.kind, stmt.reducer, stmt.source.shape)
        for stmt in statements(program)
        if isinstance(stmt, Communicate)
    ]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_sum_over_a_mapped_axis_is_an_all_reduce(name: str) -> None:
    def each(x: jax.Array) -> jax.Array:
        return getattr(lax, name)(2 * x, "i")

    f = jax.vmap(each, axis_name="i", out_axes=None)
    x = np.arange(32, dtype=np.int32).reshape(8, 4)
    program = check(f, x, mesh=mesh_of({"dp": 4}), in_shardings=P("dp"))
    assert moved(program) == [("AllReduce", REDUCTIONS[name], (4,))]


def two_axes(x: jax.Array) -> jax.Array:
    inner = jax.vmap(lambda x: lax.psum(x * x, ("i", "j")), axis_name="j", out_axes=0)
    return jax.vmap(inner, axis_name="i")(x)


def in_a_scan(x: jax.Array) -> Any:
    def step(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total + lax.psum(x, "i"), lax.pmax(x, "i")

    def each(x: jax.Array) -> Any:
        return lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x)

    return jax.vmap(each, axis_name="i")(x)


def several(x: jax.Array) -> Any:
    def each(x: jax.Array) -> Any:
        return lax.psum((x, x + 1), "i"), lax.psum(1, "i"), lax.axis_index("i")

    return jax.vmap(each, axis_name="i")(x)


@pytest.mark.parametrize("f", [two_axes, in_a_scan, several])
def test_results_are_those_of_the_plain_function(f: Callable[..., Any]) -> None:
    x = np.arange(64, dtype=np.int32).reshape(8, 4, 2) - 20
    check(f, x, mesh=mesh_of({"dp": 2, "tp": 2}), in_shardings=P("dp", "tp"))


def test_a_step_of_pmap_moves_its_gradients_once() -> None:
    """As code for `jax.pmap` becomes with `jax.vmap`: replicas along a dim."""

    def update(w: jax.Array, x: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - lax.psum(gradient, "replica")

    f = jax.vmap(update, in_axes=(None, 0), out_axes=None, axis_name="replica")
    w, x = np.ones((16, 8), np.float32), np.ones((4, 2, 16), np.float32)
    specs = P(), P("dp")
    program = check(f, w, x, mesh=mesh_of({"dp": 4}), in_shardings=specs)
    assert moved(program) == [("AllReduce", "sum", (16, 8))]
