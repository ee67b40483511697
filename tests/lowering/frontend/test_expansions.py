"""Calls that JAX expands late: what a search reads moves, and never a whole dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.statements import Communicate
from tests.lowering.on_mesh import exact, tp

ROWS = P("tp")
VALUES = (np.arange(256, dtype=np.float32) * 37 % 101 - 50) / 4
EDGES = np.arange(-8, 8, dtype=np.float32)
HEIGHTS = np.arange(16, dtype=np.float32) % 3


def received(fun: Callable[..., Any], *args: Any, outs: Any = ROWS) -> int:
    """The most elements of a transfer, of a function that gives what it should."""
    ins = (ROWS, *(P() for _ in args[1:]))
    program = exact(fun, *args, **tp(4, ins, outs))
    moved = [s for s in statements(program) if isinstance(s, Communicate)]
    return max((int(np.prod(stmt.out.shape)) for stmt in moved), default=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_search_for_sharded_values_moves_nothing(side: str) -> None:
    def search(x: jax.Array, edges: jax.Array) -> jax.Array:
        return jnp.searchsorted(edges, x, side=side)

    values = np.array([*VALUES[:253], np.nan, np.inf, -np.inf], np.float32)
    assert not received(search, values, EDGES)


def test_a_search_in_sharded_values_moves_what_it_reads() -> None:
    assert received(jnp.searchsorted, np.sort(VALUES), EDGES, outs=P()) == len(EDGES)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, edges: jnp.digitize(x, edges),
        lambda x, edges: jnp.interp(x, edges, jnp.asarray(HEIGHTS)),
        lambda x, edges: jax.vmap(lambda x: jnp.searchsorted(edges, x))(x),
        lambda x, edges: jax.lax.map(lambda n: jnp.searchsorted(edges, x * n), edges)[
            1
        ],
        jax.grad(lambda x, edges: (jnp.interp(x, edges, edges * 2) * x).sum()),
    ],
    ids=["digitize", "interp", "vmap", "map", "grad"],
)
def test_functions_that_search_keep_their_parts(fun: Callable[..., Any]) -> None:
    assert received(fun, VALUES, EDGES) <= len(VALUES) // 4


def test_a_histogram_is_a_sum_over_devices() -> None:
    def counts(x: jax.Array) -> jax.Array:
        return jnp.histogram(x, bins=8, range=(-12, 12))[0]

    assert received(counts, VALUES, outs=P()) == 8


def test_positions_of_what_is_not_zero_are_found_in_parts() -> None:
    def found(x: jax.Array) -> jax.Array:
        return jnp.nonzero(x > 11, size=8)[0]

    assert received(found, VALUES, outs=P()) <= 16
