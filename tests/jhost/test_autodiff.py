"""Derivatives of a jhost function and in one: forward, reverse, second, custom rules.

`test_transforms.py` has the plain cases; here is what surrounds them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jhost
from jhost.testing import mesh_of
from tests.jhost.blocks import (
    ARGS,
    OTHERS,
    Function,
    each_pipeline,
    gradients,
    hosted,
    relu_block,
    rows,
    same,
    square_loss,
    tanh_block,
)

X, UP, DOWN = ARGS

# --- Around ------------------------------------------------------------------------- #


def test_jacobians() -> None:
    same(lambda f: jax.jacfwd(f, 1)(*ARGS), relu_block, "p2p")
    same(lambda f: jax.jacrev(f, 1)(*ARGS), relu_block, "collective")


def test_hessian_vector_products() -> None:
    def forward_over_reverse(f: Function) -> Any:
        return jax.jvp(jax.grad(square_loss(f), (0, 1)), ARGS, OTHERS)

    def reverse_over_forward(f: Function) -> Any:
        loss = square_loss(f)
        return jax.grad(lambda *a: jax.jvp(loss, a, OTHERS)[1], (0, 1))(*ARGS)

    same(forward_over_reverse, relu_block, "p2p")
    same(reverse_over_forward, relu_block, "collective")


@each_pipeline
def test_numerical_derivatives_agree(pipeline: str) -> None:
    args = [a / 4 for a in ARGS]
    check_grads(hosted(tanh_block, pipeline), args, order=1, rtol=2e-2, atol=2e-2)


def test_a_linear_function_can_be_transposed() -> None:
    def transform(f: Function) -> Any:
        return jax.linear_transpose(lambda x: f(x, UP, DOWN), X)(OTHERS[0])

    same(transform, lambda x, up, down: rows(x @ up @ down), "p2p")


def test_auxiliary_results() -> None:
    def with_aux(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        h = jnp.maximum(x @ up, 0)
        y = rows(h @ down)
        return jnp.sum(y * y), {"active": jnp.sum(h > 0), "y": y}

    def all_of(f: Function) -> Any:
        value, pullback, aux = jax.vjp(f, *ARGS, has_aux=True)
        return (
            jax.value_and_grad(f, (0, 1, 2), has_aux=True)(*ARGS),
            (value, pullback(jnp.float32(1)), aux),
            jax.jvp(f, ARGS, OTHERS, has_aux=True),
        )

    same(all_of, with_aux, "p2p", out_shardings=None)


def test_integers_have_tangents_of_no_type() -> None:
    def embed(ids: jax.Array, table: jax.Array, w: jax.Array) -> Any:
        return rows(jnp.maximum(table[ids] @ w.T, 0) @ w), ids + 1

    ids, zero = jnp.arange(8)[::-1], np.zeros(8, jax.dtypes.float0)

    def reverse(f: Function) -> Any:
        loss = square_loss(lambda *args: f(*args)[0])
        grads = jax.grad(loss, (0, 1, 2), allow_int=True)(ids, X, DOWN)
        assert grads[0].dtype == jax.dtypes.float0
        return grads[1:]

    def forward(f: Function) -> Any:
        value, tangent = jax.jvp(f, (ids, X, DOWN), (zero, X, DOWN))
        assert tangent[1].dtype == jax.dtypes.float0
        return value, tangent[0]

    specs: Any = {
        "in_shardings": (P(), P("tp"), P("tp")),
        "out_shardings": (P("tp"), P()),
    }
    same(reverse, embed, "p2p", **specs)
    same(forward, embed, "p2p", **specs)


def test_a_gradient_stops() -> None:
    def stops_inside(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return relu_block(x, lax.stop_gradient(up), down)

    def stops_at_the_stream(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return lax.stop_gradient(relu_block(x, up, down)) * x

    def stops_outside(f: Function) -> Any:
        loss = lambda *a: jnp.sum(lax.stop_gradient(f(*a)) * f(*a))  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(*ARGS)

    same(lambda f: gradients(f)(*ARGS), stops_inside, "collective")
    same(lambda f: gradients(f)(*ARGS), stops_at_the_stream, "p2p")
    same(stops_outside, relu_block, "collective")


# --- Inside ------------------------------------------------------------------------- #


def gradient(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.grad(lambda x: jnp.sum(tanh_block(x, up, down) ** 2))(x)


def tangent(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.jvp(lambda x: tanh_block(x, up, down), (x,), (x,))[1]


def linearized(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.linearize(lambda x: tanh_block(x, up, down), x)[1](x)


def jacobian(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.sum(jax.jacfwd(lambda x: tanh_block(x, up, down))(x), (0, 1))


def hessian_vector_product(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.jvp(lambda x: gradient(x, up, down), (x,), (x,))[1]


@pytest.mark.parametrize(
    ("fun", "pipeline"),
    [
        (gradient, "p2p"),
        (tangent, "collective"),
        (linearized, "p2p"),
        (jacobian, "collective"),
        (hessian_vector_product, "collective"),
    ],
)
def test_derivatives_inside(fun: Function, pipeline: str) -> None:
    x, *weights = ARGS
    # Of large numbers tanh is nearly 1, and XLA computes how nearly in several ways.
    same(lambda f: f(x / 8, *weights), fun, pipeline, atol=1e-4)


def test_a_derivative_of_a_derivative_inside() -> None:
    same(lambda f: gradients(f, 0)(*ARGS), gradient, "p2p", atol=1e-4)


# --- Custom rules ------------------------------------------------------------------- #


@jax.custom_jvp
def tripled(x: jax.Array) -> jax.Array:
    """relu, with three times its derivative."""
    return jnp.maximum(x, 0)


@tripled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return tripled(x), 3 * t * (x > 0).astype(x.dtype)


@jax.custom_vjp
def doubled(x: jax.Array, w: jax.Array) -> jax.Array:
    """A matmul, with twice its derivative, which has a stream of its own."""
    return x @ w


doubled.defvjp(
    lambda x, w: (doubled(x, w), (x, w)),
    lambda xw, dy: (rows(2 * dy @ xw[1].T), 2 * rows(xw[0]).T @ dy),
)


def with_jvp_rule(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return rows(tripled(x @ up) @ down)


def with_vjp_rule(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return rows(doubled(jnp.maximum(doubled(x, up), 0), down))


@pytest.mark.parametrize(
    ("fun", "pipeline"), [(with_jvp_rule, "collective"), (with_vjp_rule, "p2p")]
)
def test_custom_rules_inside_are_used(fun: Function, pipeline: str) -> None:
    same(lambda f: gradients(f)(*ARGS), fun, pipeline)


def test_a_custom_jvp_rule_in_forward_mode() -> None:
    same(lambda f: jax.jvp(f, ARGS, OTHERS), with_jvp_rule, "p2p")


def test_custom_rules_under_vmap() -> None:
    both = jnp.stack([X, -X])

    def batched(f: Function) -> Any:
        return jax.vmap(gradients(f), (0, None, None))(both, UP, DOWN)

    same(batched, with_jvp_rule, "collective")
    same(batched, with_vjp_rule, "collective")


def test_custom_rules_around() -> None:
    def with_rules(f: Function) -> Any:
        @jax.custom_jvp
        def forward(x: jax.Array) -> jax.Array:
            return f(x, UP, DOWN)

        @jax.custom_vjp
        def backward(x: jax.Array) -> jax.Array:
            return f(x, UP, DOWN)

        forward.defjvp(lambda p, t: (forward(*p), 3 * f(*t, UP, DOWN)))
        backward.defvjp(lambda x: (backward(x), None), lambda _, dy: (f(dy, UP, DOWN),))
        return jax.jvp(forward, (X,), (X,)), jax.grad(square_loss(backward))(X)

    same(with_rules, relu_block, "p2p")


# --- On a mesh of two axes ---------------------------------------------------------- #


@pytest.mark.parametrize(
    "taken",
    [
        lambda f: jax.grad(lambda a: jax.grad(f)(a).sum()),
        lambda f: lambda a: jax.vmap(jax.grad(f))(jnp.stack([a, -a])),
    ],
    ids=["grad of grad", "vmap of grad"],
)
def test_second_derivatives_of_a_root_on_a_mesh_of_two_axes(taken: Any) -> None:
    """A value was wanted in a layout that had an axis twice."""

    def root(a: jax.Array, b: jax.Array) -> jax.Array:
        a = a @ a.T
        factors = jax.scipy.linalg.cho_factor(a)
        known = lambda _, b: jax.scipy.linalg.cho_solve(factors, b)  # noqa: E731

        def tangent(g: Any, b: jax.Array) -> jax.Array:
            return lax.custom_linear_solve(
                g, b, lambda _, b: known(None, b), symmetric=True
            )

        return lax.custom_root(lambda x: a @ x - b, b, known, tangent)

    a, b = jnp.array([[4.0, 1], [1, 3]]), jnp.array([1.0, 2])
    on_mesh = jhost.jit(
        root,
        mesh=mesh_of({"x": 2, "y": 2}),
        in_shardings=(P("x", "y"), P("x")),
        out_shardings=P(),
    )
    given, wanted = (taken(lambda a, f=f: f(a, b).sum()) for f in (on_mesh, root))
    np.testing.assert_allclose(given(a), jax.jit(wanted)(a), rtol=1e-4)
