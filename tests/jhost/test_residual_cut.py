"""What the forward hands to the backward: the fewest bytes that can be made to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jhost
from tests.jhost.derived import backward, programs
from tests.lowering.on_mesh import on
from tests.lowering.traced import array

Array = jax.Array
X, W = (16, 8), (8, 32)
SPECS = (P("tp"), P(None, "tp")), P(None, "tp")


def on_four(fun: Callable[..., Any], **more: Any) -> Any:
    return jhost.jit(fun, **on({"tp": 4}, *SPECS, pipeline="off", **more))


def handed_over(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """The types of what the forward makes for the backward alone."""
    args = [array(*shape, seed=n) for n, shape in enumerate(shapes)]
    forward, _ = backward(on_four(fun), *args)
    return [f"{r.dtype}{list(r.shape)}" for r in forward.results[1:]]


@pytest.mark.parametrize(
    "activation",
    [jax.nn.gelu, jax.nn.silu, jnp.tanh, lambda z: z**3 + jnp.sin(z)],
    ids=["gelu", "silu", "tanh", "a formula"],
)
def test_one_array_stands_for_all_that_an_activation_needs(activation: Any) -> None:
    def f(x: Array, w: Array) -> Array:
        return activation(x @ w) * 2

    assert handed_over(f, X, W) == ["float32[16, 8]"]


def test_what_is_computed_from_arguments_alone_is_not_handed_over() -> None:
    def f(x: Array, w: Array) -> Array:
        return jnp.sin(x) @ jnp.exp(w)

    assert handed_over(f, X, W) == []


def test_a_mask_is_handed_over_before_what_it_was_made_of() -> None:
    def f(x: Array, w: Array) -> Array:
        return jax.nn.relu(x @ w) * 2

    assert handed_over(f, X, W) == ["bool[16, 8]"]


def test_a_smaller_value_is_handed_over_before_a_larger_one() -> None:
    """The statistics of a norm, not the rows that it has normed."""

    def f(x: Array, w: Array) -> Array:
        return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1)) @ w

    assert handed_over(f, X, W) == ["float32[4, 1]"]


def test_matmuls_and_sums_are_not_repeated() -> None:
    def f(x: Array, w: Array) -> Array:
        return jax.nn.softmax(x @ w, axis=0) ** 2

    assert sorted(handed_over(f, X, W)) == ["float32[1, 8]", "float32[16, 8]"]
    _, back = backward(on_four(f), array(*X), array(*W))
    assert str(back).count("dot_general") == 2  # of the two cotangents
    assert "reduce_max" not in str(back)


def test_a_policy_says_itself_what_is_saved() -> None:
    """The sine, though its derivative would be as well off with what it is of."""

    def f(x: Array, w: Array) -> Array:
        y = checkpoint_name(jnp.sin(x @ w), "saved")
        return jnp.sin(y) * y

    policy = jax.checkpoint_policies.save_only_these_names("saved")
    loss = jax.checkpoint(lambda *xs: jnp.sum(on_four(f)(*xs)), policy=policy)
    forward, *_ = programs(jax.grad(loss, (0, 1)), array(*X), array(*W, seed=1))
    saved = {result.name for result in forward.results if result.shape == (16, 8)}
    assert len(saved) == 2  # and the result
    assert str(forward).count("sin(") == 2


# --- Any function ------------------------------------------------------------------- #

UNARY = [jnp.negative, jnp.abs, lambda v: v * v, lambda v: 2 * v + 1]
BINARY = [jnp.add, jnp.multiply, jnp.maximum, lambda a, b: jnp.where(a > b, a, b)]


@st.composite
def formulas(draw: st.DrawFn) -> list[tuple[Any, list[int]]]:
    """Steps, each a function and which of the values before it takes."""
    steps: list[tuple[Any, list[int]]] = []
    for number in range(draw(st.integers(1, 8))):
        before = st.integers(0, number + 1)
        if draw(st.booleans()):
            steps.append((draw(st.sampled_from(UNARY)), [draw(before)]))
        else:
            steps.append((draw(st.sampled_from(BINARY)), [draw(before), draw(before)]))
    return steps


@hypothesis.given(formulas())
def test_gradients_of_any_formula_are_exact(formula: list[tuple[Any, Any]]) -> None:
    def f(x: Array, w: Array) -> Array:
        values = [x @ w, (x + 1) @ w]
        for fun, operands in formula:
            values.append(fun(*(values[n] for n in operands)) % 64)
        return values[-1]

    args = array(*X), array(*W, seed=1)
    hosted = on_four(f, compiler_options=None)
    given, wanted = (
        jax.jit(jax.grad(lambda *xs, g=g: jnp.sum(g(*xs)), (0, 1)))(*args)
        for g in (hosted, f)
    )
    for one, other in zip(given, wanted, strict=True):
        assert jnp.array_equal(one, other)
