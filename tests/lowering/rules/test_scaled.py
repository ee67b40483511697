"""Products of narrow values: blocks go with their scales, and narrow is what moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.rules.table import rule_of
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import tp

BLOCK = 32
ROWS, DEPTH = P(None, "tp"), P(None, None, "tp")
Product = Callable[..., jax.Array]


def scaled_matmul(x: Any, w: Any, of_x: Any, of_w: Any) -> jax.Array:
    return jax.nn.scaled_matmul(x, w, of_x, of_w)


def scaled_dot(x: Any, w: Any, of_x: Any, of_w: Any) -> jax.Array:
    numbers = (((2,), (2,)), ((0,), (0,)))
    return jax.lax.scaled_dot(
        x,
        w,
        lhs_scale=of_x,
        rhs_scale=of_w,
        dimension_numbers=numbers,
        preferred_element_type=jnp.float32,
    )


def operands(depth: int = 8 * BLOCK, rows: int = 16) -> tuple[Any, ...]:
    """Integers, and powers of two as their scales: all sums are exact."""

    def scales(count: int, seed: int) -> Any:
        few = np.abs(integers(1, count, depth // BLOCK, seed=seed)) % 2
        return jnp.asarray(2.0**few, jnp.float8_e8m0fnu)

    narrow = jnp.float8_e4m3fn
    x, w = (
        jnp.asarray(integers(1, count, depth, seed=seed), narrow)
        for seed, count in enumerate((rows, 8))
    )
    return x, w, scales(rows, 2), scales(8, 3)


def lowers_on_cpu() -> bool:
    """Whether JAX has `jax.nn.scaled_matmul` on CPUs: 0.10 has not."""
    try:
        jax.jit(scaled_matmul).lower(*operands())
    except NotImplementedError:
        return False
    return True


PRODUCTS = [
    pytest.param(
        scaled_matmul,
        marks=pytest.mark.skipif(not lowers_on_cpu(), reason="not in this JAX on CPUs"),
    ),
    scaled_dot,
]


def exact(fun: Product, *args: Any, **settings: Any) -> list[tuple[str, int, int]]:
    """What moves: kind, bytes and chunks, where results are those without jhost."""
    given = jhost.jit(fun, **settings)
    chex.assert_trees_all_equal(
        np.asarray(given(*args)), np.asarray(jax.jit(fun)(*args))
    )
    rows = jhost.explain(given, *args).communications
    return [(row.kind, row.bytes, row.chunks) for row in rows]


@pytest.mark.parametrize("product", PRODUCTS)
def test_rows_stay_where_they_are(product: Product) -> None:
    assert not exact(product, *operands(), **tp(4, (ROWS, P(), ROWS, P()), ROWS))


@pytest.mark.parametrize("product", PRODUCTS)
def test_narrow_values_and_their_scales_come_in_chunks(product: Product) -> None:
    def streamed(*args: Any) -> jax.Array:
        return jhost.stream(product(*args), axis=1)

    settings = tp(4, (ROWS, ROWS, ROWS, ROWS), DEPTH, pipeline="p2p")
    values, scales = 3 * 4 * 8 * BLOCK, 3 * 4 * 8  # of three devices, a byte each
    assert exact(streamed, *operands(), **settings) == [
        ("CollectivePermute", values, 3),
        ("CollectivePermute", scales, 3),
    ]


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_contracted_dim_is_cut_between_blocks(product: Product) -> None:
    moved = exact(product, *operands(), **tp(4, (DEPTH,) * 4, ROWS))
    assert moved == [("ReduceScatter", 3 * 4 * 8 * 4, 1)]


@pytest.mark.parametrize(
    ("spec", "blocks", "rows", "moved"),
    [(DEPTH, 6, 16, ["ReduceScatter"]), (ROWS, 8, 6, ["AllGather"])],
    ids=["blocks", "rows"],
)
def test_blocks_and_rows_that_do_not_divide_are_padded(
    spec: P, blocks: int, rows: int, moved: list[str]
) -> None:
    """Six on four devices are two each, with padding on the last."""

    def uneven(x: Any, w: Any, of_x: Any, of_w: Any) -> jax.Array:
        x, of_x = jhost.shard(x, spec), jhost.shard(of_x, spec)
        return scaled_dot(x, w, of_x, of_w)

    settings = tp(4, P(), ROWS if spec == DEPTH else P())
    sent = exact(uneven, *operands(blocks * BLOCK, rows), **settings)
    assert [kind for kind, _, _ in sent] == moved


@pytest.mark.skipif(not lowers_on_cpu(), reason="not in this JAX on CPUs")
@pytest.mark.parametrize("gradient", [False, True], ids=["value", "gradient"])
def test_what_jax_quantizes_comes_narrow_too(gradient: bool) -> None:
    """By `jax.nn.scaled_dot_general`, of rows over devices; what comes is narrow."""
    config = jax.nn.get_scaled_dot_general_config("mxfp8")

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.scaled_dot_general(
            x,
            w,
            (((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
            configs=[config] * 3,
        )

    def of_both(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *both: product(*both).sum(), (0, 1))(x, w)

    rows = P("tp")
    x, w = integers(4 * BLOCK, 2 * BLOCK), integers(4 * BLOCK, 2 * BLOCK, seed=1)
    outs: Any = (rows, rows) if gradient else rows
    fun: Any = of_both if gradient else product
    moved = exact(fun, x, w, **tp(4, (rows, rows), outs))
    gathered = [size for kind, size, _ in moved if kind == "AllGather"]
    narrow, scales = 3 * BLOCK * 2 * BLOCK, 3 * BLOCK * 2  # of three devices
    assert gathered[:2] == [narrow, scales]


def test_a_scale_for_all_of_a_dim_goes_with_every_part() -> None:
    x, w, _, of_w = operands()

    def product(x: Any, w: Any, of_w: Any) -> jax.Array:
        return scaled_dot(x, w, None, of_w)

    moved = exact(product, x, w, of_w, **tp(4, (DEPTH, DEPTH, DEPTH), ROWS))
    assert [kind for kind, _, _ in moved] == ["ReduceScatter"]


def test_blocks_of_two_sizes_are_cut_where_both_end() -> None:
    x, w, of_x, of_w = (
        jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn)
        for shape in ((1, 4, 96), (1, 8, 96), (1, 4, 6), (1, 8, 4))
    )
    (eqn,) = jax.make_jaxpr(scaled_dot)(x, w, of_x, of_w).eqns
    rule = rule_of(eqn)
    (reduced,) = (n for n, reducer in enumerate(rule.reducers) if reducer)
    assert rule.sizes[reduced] == 2
    assert [dims[2].scale for dims in rule.operands if dims[2]] == [48, 48, 3, 2]
    assert rule.contracts
