"""How many bytes a program is said to hold at each of its products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jhost.lowering.schedule.blocks import blocks_of
from jhost.lowering.schedule.held import held
from tests.lowering.traced import built

SIDE = 8
VALUE = 4 * SIDE * SIDE
"""Bytes of each value."""


def twice(x: jax.Array, w: jax.Array) -> Any:
    """A cheap value that two contractions read, as a loss's cotangent."""
    y = jnp.tanh(x @ w)
    return y @ w, y.T @ x


def kept(x: jax.Array, w: jax.Array) -> Any:
    """What it is made of is read later as well."""
    z = x @ w
    y = jnp.tanh(z)
    return y @ w, y.T @ x, z @ w


def fused(x: jax.Array, w: jax.Array) -> Any:
    """No contraction reads it, so that it is only read from what it is made of."""
    z = x @ w
    y = jnp.tanh(z)
    return z @ w, y.sum()


def both(x: jax.Array, w: jax.Array) -> Any:
    """One contraction reads two that are made of one, whose place one can take."""
    z = x @ w
    return jnp.tanh(z) @ jnp.sin(z), x @ w


def of_two(x: jax.Array, w: jax.Array) -> Any:
    """What is made of two values takes the place of the one that nothing reads."""
    z, other = x @ w, w @ x
    return jnp.tanh(z * other) @ x, z @ w


def narrow(x: jax.Array, w: jax.Array) -> Any:
    """A value of half the bytes is in no other's place."""
    y = (x @ w).astype(jnp.bfloat16)
    return y @ w.astype(jnp.bfloat16), y @ y


@pytest.mark.parametrize(
    ("fun", "values"),
    [
        (twice, [1, 1, 1]),
        (kept, [1, 2, 2, 1]),
        (fused, [1, 1]),
        (both, [1, 2, 0]),
        (of_two, [1, 2, 2, 1]),
        # The cast weight is made of a param, and is written too.
        (narrow, [1, 2, 0.5]),
    ],
)
def test_what_a_contraction_reads_is_written_in_place_of_what_it_is_made_of(
    fun: Callable[..., Any], values: list[float]
) -> None:
    program = built(fun, (SIDE, SIDE), (SIDE, SIDE))
    blocks, there = blocks_of(program), held(program)
    at = [there[n] for n, block in enumerate(blocks.all) if block.contracts]
    assert at == [number * VALUE for number in values]
