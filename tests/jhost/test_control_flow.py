"""Loops and branches around a jhost function and in one, and calls of calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from tests.jhost.blocks import (
    ARGS,
    Function,
    each_pipeline,
    gradients,
    hosted,
    relu_block,
    rows,
    same,
    square_loss,
)

X, UP, DOWN = ARGS
UPS, DOWNS = jnp.stack([UP, -UP]), jnp.stack([DOWN, DOWN])

PART: dict[str, Any] = {"compiler_options": None}
"""For a function that is part of another program, whose options hold for it."""

# --- Around ------------------------------------------------------------------------- #


def scanned(f: Function) -> Function:
    """Layers over stacked weights."""

    def model(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (f(h, *w), None), x, (ups, downs))[0]

    return model


def test_scan_around() -> None:
    args = X, UPS, DOWNS
    same(lambda f: jax.jvp(scanned(f), args, args), relu_block, "p2p", **PART)
    same(lambda f: scanned(jax.checkpoint(f))(*args), relu_block, "p2p", **PART)

    def small(f: Function) -> Any:  # so that float32 holds the gradients exactly
        x = (X > 0).astype(X.dtype)
        return jax.grad(lambda *a: jnp.sum(scanned(f)(*a)), (0, 1, 2))(x, *args[1:])

    same(small, relu_block, "p2p", **PART)


def test_loops_around() -> None:
    def all_of(f: Function) -> Any:
        def step(_: Any, x: jax.Array) -> jax.Array:
            return f(x, UP, DOWN)

        return (
            lax.fori_loop(0, 2, step, X),
            jax.grad(lambda x: jnp.sum(lax.fori_loop(0, 2, step, x)))(X),
            lax.while_loop(
                lambda c: c[0] < 2, lambda c: (c[0] + 1, step(0, c[1])), (0, X)
            ),
            lax.map(lambda x: f(x, UP, DOWN), jnp.stack([X, -X])),
        )

    same(all_of, relu_block, "p2p", **PART)


def test_branches_around() -> None:
    def all_of(f: Function) -> Any:
        def either(x: jax.Array, taken: Any) -> jax.Array:
            return lax.cond(taken, f, lambda x, up, down: x, x, UP, DOWN)

        grad = jax.grad(lambda x, taken: jnp.sum(either(x, taken) ** 2))
        taken = jnp.array([True, False])
        return (
            [grad(X, t) for t in taken],
            jax.vmap(either)(jnp.stack([X, -X]), taken),
            lax.switch(jnp.int32(1), [jnp.copy, lambda x: f(x, UP, DOWN)], X),
        )

    same(all_of, relu_block, "collective", **PART)


# --- Inside ------------------------------------------------------------------------- #


def scan_of_marked(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    return scanned(relu_block)(x, ups, downs)


def loop_before(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    h = lax.fori_loop(0, 2, lambda i, h: h + i.astype(h.dtype), x)
    return relu_block(h, ups[0], downs[0])


def while_before(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    h = lax.while_loop(lambda h: jnp.sum(h) < 100, lambda h: h + 1, x)
    return relu_block(lax.stop_gradient(h) * x, ups[0], downs[0])


def branch_before(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    h = lax.cond(x[0, 0] > 0, lambda x: x @ ups[0], lambda x: -x @ ups[0], x)
    return rows(jnp.maximum(h, 0) @ downs[0])


INSIDE = [
    scan_of_marked,
    loop_before,
    while_before,
    branch_before,
]


@pytest.mark.parametrize("fun", INSIDE)
def test_control_flow_inside(fun: Function) -> None:
    x = (X > 0).astype(X.dtype)
    specs = P("tp"), P(None, None, "tp"), P(None, "tp")
    same(
        lambda f: jax.value_and_grad(lambda *a: jnp.sum(f(*a)), (0, 1, 2))(
            x, UPS, DOWNS
        ),
        fun,
        "p2p",
        in_shardings=specs,
    )


# --- Calls -------------------------------------------------------------------------- #


@each_pipeline
def test_jit_around_and_inside(pipeline: str) -> None:
    same(lambda f: jax.jit(f)(*ARGS), relu_block, pipeline, **PART)
    same(lambda f: gradients(f)(*ARGS), jax.jit(relu_block), pipeline)
    same(lambda f: f(*ARGS), jax.named_call(relu_block, name="block"), pipeline)


def test_jhost_functions_nest() -> None:
    inner = hosted(relu_block, "collective", **PART)
    for block in (inner, jhost.jit(relu_block)):  # its mesh is the outer one's

        def outer(*args: jax.Array, block: Function = block) -> jax.Array:
            return block(*args) + args[0]

        given, wanted = hosted(outer, "collective"), lambda *a: relu_block(*a) + a[0]
        assert jnp.array_equal(given(*ARGS), wanted(*ARGS))
        for one, other in zip(
            gradients(given)(*ARGS), gradients(wanted)(*ARGS), strict=True
        ):
            assert jnp.array_equal(one, other)


def test_shapes_are_known_without_running() -> None:
    f = hosted(relu_block, "p2p")
    for transform in (lambda f: f, gradients, jax.checkpoint):
        given = jax.eval_shape(transform(f), *ARGS)
        assert given == jax.eval_shape(transform(relu_block), *ARGS)


def test_checks_of_jax_s_own() -> None:
    grad = jax.grad(square_loss(hosted(relu_block, "p2p")))
    with jax.enable_checks(True), jax.checking_leaks(), jax.debug_nans(True):
        assert jnp.array_equal(grad(*ARGS), jax.grad(square_loss(relu_block))(*ARGS))
        with pytest.raises(FloatingPointError, match="nan"):
            grad(jnp.asarray(X).at[0, 0].set(jnp.nan), UP, DOWN)
