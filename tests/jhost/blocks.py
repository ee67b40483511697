"""Blocks with streams on four devices, and how they compare with plain functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.testing import assert_close
from tests.lowering.on_mesh import tp
from tests.lowering.traced import array

Function: TypeAlias = Callable[..., Any]

each_pipeline = pytest.mark.parametrize("pipeline", ["collective", "p2p"])
"""For a test of a function with a stream, in either kind of pipeline."""

SPECS = (P("tp"), P(None, "tp"), P("tp"))
"""Rows of x, columns of up and rows of down: gather, two matmuls, reduce-scatter."""

ARGS = array(8, 8), array(8, 16, seed=1), array(16, 8, seed=2)
"""Small integers, so that sums in any order are exact."""

OTHERS = array(8, 8, seed=3), array(8, 16, seed=4), array(16, 8, seed=5)


def rows(x: jax.Array) -> jax.Array:
    return jhost.stream(x, axis=0)


def relu_block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return rows(jnp.maximum(x @ up, 0) @ down)


def tanh_block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return rows(jnp.tanh(x @ up) @ down)


def hosted(fun: Function, pipeline: str, **more: Any) -> Any:
    """`fun` by jhost on four devices; outside of jhost its marks do nothing."""
    chunks = 2 if pipeline == "collective" else "auto"
    how: dict[str, Any] = {"pipeline": pipeline, "chunks": chunks, **more}
    return jhost.jit(fun, **{**tp(4, SPECS, P("tp")), **how})


def square_loss(f: Function) -> Function:
    return lambda *args: jnp.sum(f(*args) ** 2)


def gradients(f: Function, *numbers: int) -> Function:
    return jax.grad(square_loss(f), numbers or (0, 1, 2))


assert_same = functools.partial(assert_close, tolerance=0)


def same(
    transform: Callable[[Function], Any],
    fun: Function,
    pipeline: str,
    atol: float = 0,
    **more: Any,
) -> None:
    """`transform` gives the same of `fun` by jhost as of `fun` itself."""
    given = transform(hosted(fun, pipeline, **more))
    wanted = jax.jit(lambda: transform(fun))()  # one program to compile
    assert_close(given, wanted, tolerance=atol)
