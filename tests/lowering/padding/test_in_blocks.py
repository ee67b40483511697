"""Sums and searches along sharded dims: only totals move, and what each part has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import exact, on, tp
from tests.lowering.traced import interpreted

ROWS = P("tp")


def _received(program: Program) -> list[tuple[int, ...]]:
    found = [s for s in statements(program) if isinstance(s, Communicate)]
    return [stmt.out.shape for stmt in found]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("scan", [lax.cumsum, lax.cummax, lax.cummin, lax.cumprod])
def test_totals_are_all_that_moves(
    scan: Callable[..., jax.Array], reverse: bool
) -> None:
    x = integers(16, 3) % 3
    program = exact(
        lambda x: scan(x, axis=0, reverse=reverse), x, **tp(4, (ROWS,), ROWS)
    )
    assert _received(program) == [(4, 3)]


def test_a_nan_is_in_all_that_follow_it() -> None:
    x = np.array(integers(16))
    x[6] = np.nan
    exact(lambda x: lax.cummax(x, axis=0), x, **tp(4, (ROWS,), ROWS))


_SCANS = (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp)
_COLUMNS = ([-0.0], [-0.0, 0.0], [0.0, -0.0], [-0.0, 1.0, -1.0], [-0.0, np.nan, np.inf])


@pytest.mark.parametrize("rows", [4, 6, 8])
def test_zeros_keep_their_signs(rows: int) -> None:
    """With a row a device, with two, and with rows that some devices lack."""
    columns = [np.resize(column, rows) for column in _COLUMNS]
    x = jnp.array(columns, jnp.float32).T

    def function(x: jax.Array) -> list[jax.Array]:
        x = jhost.shard(x, ROWS)
        made = [scan(x, 0, reverse=each) for scan in _SCANS for each in (False, True)]
        made += [lax.cumsum(y) for y in (x.astype(jnp.bfloat16), lax.complex(x, x))]
        made.append(jax.vmap(lax.cumsum, 1, 1)(x))
        made.append(jax.grad(lambda y: (jnp.cumsum(y, 0) * x).sum())(x))
        made.append(lax.cumsum(x[:, :0]))
        return [part for each in made for part in (each.real, each.imag)]

    given = jhost.jit(function, **tp(4, P(), P()))(x)
    wanted = jax.jit(function)(x)
    chex.assert_trees_all_close(given, wanted, rtol=1e-6)
    for one, other in zip(given, wanted, strict=True):
        is_number = ~np.isnan(np.asarray(other, np.float32))
        signs = [np.signbit(np.asarray(each, np.float32)) for each in (one, other)]
        np.testing.assert_array_equal(signs[0] & is_number, signs[1] & is_number)


def test_sums_of_exponentials_are_made_in_blocks() -> None:
    x = jnp.asarray(integers(16, 3) / 4, jnp.float32)
    x = x.at[:5, 0].set(-np.inf).at[6, 1].set(np.nan)

    def function(x: jax.Array) -> jax.Array:
        return lax.cumlogsumexp(x, axis=0, reverse=True)

    f = jhost.jit(function, **tp(4, (ROWS,), ROWS))
    chex.assert_trees_all_close(f(x), jax.jit(function)(x), rtol=1e-6)
    assert _received(f.lower(x).host_ir) == [(4, 3)]


def test_sums_of_exponentials_in_blocks_that_are_padded() -> None:
    """Two devices have three blocks, and a test for NaN reads each twice."""
    x = jnp.asarray(integers(24, 8) / 4, jnp.float32)

    def function(x: jax.Array) -> jax.Array:
        return lax.cumlogsumexp(x, axis=0)

    f = jhost.jit(function, **on({"a": 3, "b": 2}, (P("a"),), P("b")))
    chex.assert_trees_all_close(f(x), jax.jit(function)(x), rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_first_of_a_complex_product_is_multiplied_by_nothing(reverse: bool) -> None:
    """One times a complex infinity is NaN."""
    x = jnp.array([np.inf, np.inf, 1, 1j, np.inf, np.inf], np.complex64)[:, None]

    def first(x: jax.Array) -> jax.Array:
        product = lax.cumprod(jhost.shard(x, ROWS), axis=0, reverse=reverse)
        return product[-2:] if reverse else product[:2]

    given = jhost.jit(first, **tp(4, P(), P()))(x)
    np.testing.assert_array_equal(given, jax.jit(first)(x))


def test_totals_of_zeros_are_all_that_moves() -> None:
    x = np.full(8, -0.0, np.float32)
    program = exact(lambda x: 1 / jnp.cumsum(x), x, **tp(4, (ROWS,), ROWS))
    assert _received(program) == [(4,)]


def test_a_gradient_sums_from_the_other_end() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (jnp.cumsum(x, 0) * x).sum()

    x = jnp.asarray(integers(16, 3), jnp.float32)
    program = exact(jax.grad(loss), x, **tp(4, (ROWS,), ROWS))
    assert _received(program) == [(4, 3), (4, 3)]


def test_a_scan_sums_in_each_iteration() -> None:
    def steps(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (jnp.cumsum(x, 1) % 5, None), x, None, length=2)[0]

    settings = on({"a": 2, "b": 2}, (P("b", "a"),), P("b", "a"))
    program = exact(steps, integers(4, 16), **settings)
    assert _received(program) == [(2, 2)]


def test_a_dim_that_does_not_divide_is_summed_in_blocks_too() -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.cumsum(jhost.shard(x[1:], ROWS), axis=0, reverse=True)

    program = exact(f, integers(16), **tp(4, (ROWS,), P()))
    assert (4,) in _received(program)


# --- Searches ----------------------------------------------------------------------- #


def _searched(fun: Callable[..., Any], x: Any, **more: Any) -> list[tuple[int, ...]]:
    settings = tp(4, (P(None, "tp"),), P())
    return _received(exact(lambda x: fun(x, 1, **more), x, **settings))


@pytest.mark.parametrize("search", [lax.argmax, lax.argmin])
@pytest.mark.parametrize(
    "dtype", ["int32", "uint8", "bool", "float32", "bfloat16", "float8_e4m3fn", "int4"]
)
def test_a_pair_of_each_device_is_all_that_moves(
    search: Callable[..., jax.Array], dtype: str
) -> None:
    x = jnp.asarray(integers(3, 16) % 3 - 1).astype(dtype)  # full of ties
    moved = _searched(search, x, index_dtype=np.int32)
    assert {math.prod(shape) for shape in moved} <= {12, 24}


_SPECIAL = (np.nan, -0.0, 0.0, -np.inf, np.inf, 1.0)


@given(st.lists(st.sampled_from(_SPECIAL), min_size=8, max_size=8))
def test_the_first_of_ties_and_the_first_nan_are_found(values: list[float]) -> None:
    x = np.array([values], np.float32)

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.argmax(x, 1), jnp.argmin(x, 1)

    run = interpreted(both, **tp(4, (P(None, "tp"),), P()))
    chex.assert_trees_all_equal(run(x), jax.jit(both)(x))


@pytest.mark.parametrize("size", [5, 7, 13])
def test_a_search_of_a_dim_that_does_not_divide(size: int) -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jhost.shard(x, P(None, "tp"))
        return jnp.argmin(x, 1), lax.argmax(x, 1, np.uint8)

    for x in (integers(3, size) % 3, np.full((3, size), -np.inf, np.float32)):
        moved = _received(exact(f, x, **tp(4, (P(),), P())))
        assert moved
        assert all(math.prod(shape) <= 48 for shape in moved)


def test_an_index_too_narrow_for_padding_is_searched_for_in_the_whole() -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.argmax(jhost.shard(x, ROWS), 0, np.int8)

    exact(f, np.full(126, -np.inf, np.float32), **on({"tp": 8}, (P(),), P()))


@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
def test_the_largest_of_each_device_are_all_that_moves(dtype: str) -> None:
    x = jnp.asarray(integers(2, 64) % 5).astype(dtype)
    moved = _received(
        exact(lambda x: lax.top_k(x, 3), x, **tp(4, (P(None, "tp"),), P()))
    )
    # All values of 4 devices, and of where they are the places of those chosen.
    assert sorted(math.prod(shape) for shape in moved) == [2 * 3, 2 * 3 * 4]


def test_a_gradient_of_the_largest_goes_back_to_where_they_are() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (lax.top_k(x, 2)[0] ** 2).sum()

    x = jnp.asarray(integers(2, 64), jnp.float32)
    columns = P(None, "tp")
    program = exact(jax.grad(loss), x, **tp(4, (columns,), columns))
    assert all(math.prod(shape) <= 16 for shape in _received(program))


def test_a_draw_moves_a_pair_of_each_device() -> None:
    def draw(x: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.categorical(key, x)

    settings = on({"a": 2, "b": 2}, (P("b", "a"), P()), P("b"))
    program = exact(draw, integers(4, 16) / 4, jax.random.key(3), **settings)
    assert {math.prod(shape) for shape in _received(program)} <= {2, 4, 8}


def test_a_search_of_each_row_in_a_scan() -> None:
    def steps(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            found = jax.vmap(jnp.argmax)(x)
            return x.at[jnp.arange(4), found].add(-5), found

        return lax.scan(step, x, None, length=3)[1]

    columns = P(None, ("b", "a"))
    program = exact(steps, integers(4, 16), **on({"a": 2, "b": 2}, (columns,), P()))
    assert all(math.prod(shape) <= 32 for shape in _received(program))
