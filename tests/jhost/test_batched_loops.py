"""A `while` with a condition for each of a batch, as `jax.vmap` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from tests.jhost.blocks import assert_same
from tests.lowering.on_mesh import tp
from tests.lowering.traced import array, check


def counted(x: jax.Array) -> Any:
    """Some of a batch go on for longer than others, and one not at all."""
    return lax.while_loop(
        lambda s: s[1] < 5, lambda s: (s[0] * 2, s[1] + 3, ~s[2]), (x, x, x > 0)
    )


def of_rows(x: jax.Array) -> Any:
    return lax.while_loop(lambda s: jnp.sum(s) < 20, lambda s: jnp.abs(s) + 1, x)


def with_constants(x: jax.Array) -> Any:
    """What the condition and the body read differs in the batch, what they hand on."""
    last = jnp.sum(x) + 3
    return lax.while_loop(
        lambda s: s[0] < last, lambda s: (s[0] + 2, s[1] + x), (0.0, x * 0)
    )


def nested(x: jax.Array) -> Any:
    return lax.while_loop(lambda s: jnp.sum(s) < 90, lambda s: of_rows(s) * 2, x)


SINGLE, ROWS = jnp.arange(8) - 1, array(8, 3)
CASES = [(counted, SINGLE), (of_rows, ROWS), (with_constants, ROWS), (nested, ROWS)]
each_case = pytest.mark.parametrize(("f", "x"), CASES)


@each_case
def test_in_a_jhost_function(f: Callable[..., Any], x: jax.Array) -> None:
    check(jax.vmap(f), x, **tp(4, (P("tp"),), P("tp")))


@each_case
def test_around_one(f: Callable[..., Any], x: jax.Array) -> None:
    assert_same(jax.vmap(jhost.jit(f))(x), jax.jit(jax.vmap(f))(x))


@each_case
def test_twice(f: Callable[..., Any], x: jax.Array) -> None:
    twice = jnp.stack([x, x + 1, x - 3, x * 2])
    check(jax.vmap(jax.vmap(f)), twice, **tp(4, (P("tp"),), P("tp")))


def test_forward_derivatives_go_through() -> None:
    def f(x: jax.Array) -> Any:
        return jax.jvp(jax.vmap(of_rows), (x,), (x + 1,))

    check(f, ROWS, **tp(4, (P("tp"),), P("tp")))


def test_random_numbers_that_are_drawn_until_they_fit() -> None:
    keys = jax.random.split(jax.random.key(1), 8)
    draw = jax.vmap(lambda key: jax.random.poisson(key, 3.0))
    assert_same(
        jhost.jit(draw, **tp(4, (P("tp"),), P("tp")))(keys), jax.jit(draw)(keys)
    )
