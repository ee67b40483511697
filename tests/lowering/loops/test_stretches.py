"""Chunks of a gathered dim, with some rows of each device's part, that read windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.explain import count_loops
from tests import budget
from tests.lowering.loops.test_edges import tame
from tests.lowering.on_mesh import exact, tp
from tests.lowering.traced import array

Array: TypeAlias = jax.Array
Mix: TypeAlias = Callable[[Array, Array], Array]


def block(mix: Mix, rows: int, chunks: int, pipeline: Any = "collective") -> Any:
    """A product of some rows, a mix of them, and a product."""

    def f(x: Array, up: Array, few: Array, down: Array) -> Array:
        hidden = jhost.shard(x[:rows] @ up + 1, P(None, "tp"))
        mixed = jhost.stream(
            tame(mix(hidden, few)), 0, pipeline=pipeline, chunks=chunks
        )
        y = mixed @ down
        return jnp.pad(y, ((0, -len(y) % 4), (0, 0)))

    return f


def args(few: int = 5) -> list[Array]:
    shapes = (32, 4), (4, 8), (few, 8), (8, 4)
    return [array(*shape, seed=seed) for seed, shape in enumerate(shapes)]


INS = P("tp"), P(None, "tp"), P(None, "tp"), P("tp")


def longer(low: int, high: int) -> Mix:
    """Rows of sevens before the others, and behind them."""
    return lambda x, few: jnp.pad(x, ((low, high), (0, 0)), constant_values=7)


def apart(low: int, high: int, gaps: int = 1) -> Mix:
    """The same between them, too."""
    return lambda x, few: lax.pad(x, 7.0, ((low, high, gaps), (0, 0, 0)))


def pooled(extent: int, low: int, high: int) -> Mix:
    def mix(x: Array, few: Array) -> Array:
        pads = [(low, high), (0, 0)]
        window = extent, 1
        return lax.reduce_window(x, -jnp.inf, lax.max, window, window, pads)

    return mix


def added(at: int) -> Mix:
    """With a few rows added to as many of them, and fives to all others."""

    def mix(x: Array, few: Array) -> Array:
        ends = at, len(x) - at - len(few)
        return x + jnp.pad(few, (ends, (0, 0)), constant_values=5)

    return mix


def joined(x: Array, few: Array) -> Array:
    """Three rows more, of another array."""
    return jnp.concatenate([x, few[:3]])


@pytest.mark.parametrize("pipeline", ["p2p", "collective"])
def test_no_chunk_is_joined(pipeline: Any) -> None:
    """An operand has all rows that the result has, with padding."""

    def f(x: Array, up: Array, few: Array, down: Array) -> Array:
        y = jhost.stream(x[:29] @ up + 1, 0, pipeline=pipeline, chunks=4)
        return joined(jhost.shard(y, P(None, "tp")), few) @ down

    exact(f, *args(), **tp(4, INS, P("tp")))


def test_a_roll_by_nothing_ends_no_stream() -> None:
    """An empty slice is joined to an array, which is the array."""

    def f(x: Array, up: Array) -> Array:
        y = jhost.stream(x + 1, 0, pipeline="p2p", chunks=4)
        return jnp.roll(y, 0, axis=0) @ up

    program = exact(f, *args()[:2], **tp(4, (P("tp"), P()), P()))
    assert count_loops(program) == 1


@pytest.mark.parametrize(
    ("mix", "rows"),
    [(longer(0, 3), 29), (longer(0, 1), 31), (apart(0, 1), 32), (added(14), 32)],
    ids=["longer", "by one", "apart", "added"],
)
def test_each_row_counts_from_its_own_place(mix: Mix, rows: int) -> None:
    program = exact(block(mix, rows, 2), *args(), **tp(4, INS, P("tp")))
    assert count_loops(program) == 1


mixes = st.one_of(
    st.builds(longer, st.integers(0, 3), st.integers(0, 4)),
    st.builds(apart, st.integers(0, 2), st.integers(0, 3), st.integers(1, 2)),
    st.builds(pooled, st.integers(1, 3), st.integers(0, 1), st.integers(0, 2)),
    st.builds(added, st.integers(0, 20)),
)


@given(
    mix=mixes,
    rows=st.integers(28, 32),
    few=st.integers(1, 8),
    chunks=st.integers(1, 4),
    derived=st.booleans(),
)
@settings(max_examples=budget.examples(12))
def test_rows_of_all_stretches_are_exact(
    mix: Mix, rows: int, few: int, chunks: int, derived: bool
) -> None:
    f = block(mix, rows, chunks)

    def loss(*args: Array) -> Array:
        y = f(*args)
        return jnp.sum(y * (lax.iota(y.dtype, len(y)) % 3)[:, None])

    if derived:
        exact(jax.grad(loss, (0, 1, 2, 3)), *args(few), **tp(4, INS, INS))
    else:
        exact(f, *args(few), **tp(4, INS, P("tp")))
