"""Sizes that do not divide, across the borders of bodies: padded on both sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import programs, statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate
from tests import budget
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import exact, tp
from tests.lowering.traced import notes

ROWS = tp(4, (P("tp"),), None)


def scanned(step: Callable[[Any, jax.Array], Any], start: Any, x: jax.Array) -> Any:
    """A scan over two numbers of the type of `x`."""
    return lax.scan(step, start, jnp.arange(1, 3, dtype=x.dtype))


def repeated(step: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, c: step(c), x)


def doubled_below(most: int, x: jax.Array) -> jax.Array:
    """A condition that reads all of what is carried."""
    return lax.while_loop(lambda c: c.max() < most, lambda c: c * 2 + 1, x)


def steps(x: jax.Array) -> jax.Array:
    return scanned(lambda c, k: (c * k - c.max(0), None), x, x)[0]


CROSSING: dict[str, Callable[[jax.Array], Any]] = {
    "a carried value": lambda x: steps(x[1:]).sum(0),
    "a carried value and its differences": lambda x: scanned(
        lambda c, k: (c * k % 7, jnp.diff(c, axis=0).max(0)), x[1:], x
    )[1],
    "a constant": lambda x: scanned(
        lambda c, k: (c + (jnp.diff(x, axis=0) * k).min(0), None), x[0], x
    )[0],
    "slices of a stack": lambda x: lax.scan(
        lambda c, part: (c + part.max(0), part.sum()),
        x[0],
        jnp.stack([x[1:], jnp.diff(x, axis=0)]),
    ),
    "a stack": lambda x: scanned(lambda c, k: (c, jnp.diff(c, axis=0) * k), x, x)[
        1
    ].sum(1),
    "a stack that a scan takes": lambda x: lax.scan(
        lambda c, part: (c + part.sum(0), None),
        x[0],
        scanned(lambda c, k: (c, c[1:] * k), x, x)[1],
    )[0],
    "a scan in a scan": lambda x: lax.scan(
        lambda c, _: (steps(c), c.min(0)), x[1:], None, length=2
    )[1],
    "a loop": lambda x: repeated(lambda c: c - c.min(0), x[1:]).sum(0),
    "a condition": lambda x: doubled_below(90, x[:-1]).sum(0),
    "branches": lambda x: lax.cond(
        x[0, 0] > 3, lambda y: y - y.max(0), lambda y: y * 2, x[1:]
    ).sum(0),
    "one branch reads windows": lambda x: lax.switch(
        jnp.int32(x[0, 0]),
        [lambda y: y, lambda y: jnp.roll(y, 1, 0), lambda y: -y],
        x[1:],
    ).sum(0),
}


def moved_at_once(program: Program) -> int:
    """The rows of the largest value that a device receives."""
    moved = [s.out.shape for s in statements(program) if isinstance(s, Communicate)]
    return max(math.prod(shape) // 3 for shape in moved)


@pytest.mark.parametrize("name", CROSSING)
def test_no_device_receives_more_than_edges(name: str) -> None:
    program = exact(CROSSING[name], integers(16, 3), **ROWS)
    # 4 rows of 16 are a device's part, and edges and sums are a row each.
    assert moved_at_once(program) <= 2
    assert notes(program) or any(each.remarks for each in programs(program))


@budget.first_is_quick("name", ["a carried value", "a stack", "branches"])
def test_gradients_and_a_row_more_of_them(name: str) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (jnp.float32(CROSSING[name](x)) ** 2).sum()

    x = np.float32(integers(16, 3) % 4)
    exact(
        lambda x: jax.vmap(jax.grad(loss))(jnp.stack([x, x + 1])),
        x,
        **tp(4, None, None),
    )
    assert moved_at_once(exact(jax.grad(loss), x, **ROWS)) <= 2


def test_what_padding_holds_is_in_no_result() -> None:
    """The logarithm of a padded row is not a number, iteration after iteration."""

    def f(x: jax.Array) -> Any:
        step = lambda c, _: (jnp.log2(c), (c.sum(0), jnp.argmax(c, 0)))  # noqa: E731
        return lax.scan(step, x[1:], None, length=2)

    exact(f, np.full((16, 3), 4.0, np.float32), **ROWS)


def test_the_user_shards_a_carried_value_that_does_not_divide() -> None:
    sharded = tp(4, None, P(None))
    program = exact(
        lambda x: steps(jhost.shard(x, P("tp"))), integers(10, 3), **sharded
    )
    assert moved_at_once(program) <= 12  # the result alone is gathered
