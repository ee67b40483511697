"""Gradients summed over chunks of a batch, and over microbatches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.statements import Compute, walk
from tests.jhost.blocks import (
    ARGS,
    Function,
    each_pipeline,
    hosted,
    relu_block,
    rows,
    same,
)
from tests.lowering.on_mesh import program_of, tp
from tests.lowering.traced import check

X, UP, DOWN = ARGS
MICROBATCHES = jnp.stack([X, -X, X + 1])


def accumulated(f: Function) -> Any:
    """The gradient of the weights, a microbatch at a time."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(f(x, *weights) ** 2)

    def step(total: Any, x: jax.Array) -> Any:
        grads = jax.grad(loss)((UP, DOWN), x)
        return jax.tree.map(jnp.add, total, grads), None

    zeros = jax.tree.map(jnp.zeros_like, (UP, DOWN))
    return lax.scan(step, zeros, MICROBATCHES)[0]


@each_pipeline
def test_microbatches(pipeline: str) -> None:
    same(accumulated, relu_block, pipeline, compiler_options=None)


def test_all_microbatches_inside() -> None:
    def all_of(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        del x, up, down
        return accumulated(relu_block)

    same(lambda f: f(*ARGS), all_of, "collective", out_shardings=None)


@each_pipeline
def test_sums_of_a_scan_beside_a_stream(pipeline: str) -> None:
    """They begin with zeros, of a matrix and of a scalar, in a program with a loop."""

    def f(x: jax.Array, w: jax.Array, xs: jax.Array) -> Any:
        def step(sums: Any, a: jax.Array) -> Any:
            return (sums[0] + a.T @ a, sums[1] + jnp.sum(a)), None

        zeros = jnp.zeros((8, 8)), jnp.zeros(())
        return rows(x @ w), lax.scan(step, zeros, xs)[0]

    specs = P("tp"), P(None, "tp"), P(None, "tp")
    how = tp(4, specs, (P(None, "tp"), P()), pipeline=pipeline)
    check(f, X, UP, MICROBATCHES, **how)


@each_pipeline
def test_gradients_of_bfloat16_are_summed_in_float32(pipeline: str) -> None:
    """The first chunk gives 256, the three others 1 each: in bfloat16 nothing more."""
    x = jnp.full((16, 8), 0.25, jnp.bfloat16).at[0].set(256)
    w = jnp.ones((8, 16), jnp.bfloat16)

    def grad(x: jax.Array, w: jax.Array) -> jax.Array:
        f = hosted(
            lambda x, w: rows(x @ w),
            pipeline,
            chunks=4,
            in_shardings=(P("tp"), P(None, "tp")),
            out_shardings=P(None, "tp"),
        )
        return jax.grad(lambda w: jnp.sum(f(x, w)))(w)

    assert jnp.bfloat16(256) + jnp.bfloat16(1) == 256
    wanted = np.float32(jnp.bfloat16(256 + 15 / 4))
    np.testing.assert_array_equal(np.float32(grad(x, w)), wanted)
    assert wanted == 260


def test_the_accumulator_in_the_loop_is_float32() -> None:
    def weight_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jhost.stream(x, 0, chunks=2).T @ dy

    args = jnp.ones((16, 8), jnp.bfloat16), jnp.ones((16, 16), jnp.bfloat16)
    specs = (P("tp"), P(None, "tp")), P(None, "tp")
    program = program_of(weight_gradient, *args, **tp(4, *specs))
    sums = [s for s in walk(program.body) if isinstance(s, Compute) and s.reducer]
    assert [buffer.dtype for s in sums for buffer in s.outs] == [jnp.float32]
