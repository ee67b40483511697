"""What cannot be inside or around a jhost function, and says why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import jet
from jax.sharding import PartitionSpec as P

import jhost
from jhost import errors
from tests.jhost.blocks import ARGS, Function, assert_same, hosted, relu_block, rows
from tests.lowering.hand_built import mesh_of

X, UP, DOWN = ARGS
PARTS = jnp.concatenate([X, -X, X + 1, X])


def by_parts(f: Function) -> Function:
    """`f` of each device's rows."""
    return jax.shard_map(f, mesh=mesh_of(tp=4), in_specs=P("tp"), out_specs=P("tp"))


def test_a_shard_map_inside_works_where_there_is_no_mesh() -> None:
    def block(x: jax.Array) -> jax.Array:
        return rows(by_parts(jnp.sort)(x) @ UP)

    assert_same(jhost.jit(block)(PARTS), block(PARTS))


def test_a_mesh_inside_a_shard_map_is_refused() -> None:
    f = hosted(relu_block, "p2p")
    specs = jhost.jit(relu_block, in_shardings=P("tp"))
    for g in (f, specs):
        with pytest.raises(errors.UnsupportedError, match="in the body of"):
            by_parts(lambda x, g=g: g(x, UP, DOWN))(PARTS)


def test_without_a_mesh_a_function_works_on_the_part_of_a_shard_map() -> None:
    def loss(f: Function) -> Function:
        def of_part(x: jax.Array, up: jax.Array) -> jax.Array:
            return lax.psum(jnp.sum(f(x, up, DOWN) ** 2), "tp")

        specs = (P("tp"), P())
        mesh = mesh_of(tp=4)
        return jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=P())

    given, wanted = loss(jhost.jit(relu_block)), loss(relu_block)
    grad = jax.value_and_grad(given, (0, 1))
    wanted = jax.jit(jax.value_and_grad(wanted, (0, 1)))
    assert_same(grad(PARTS, UP), wanted(PARTS, UP))


def test_pmap_around() -> None:
    x = PARTS.reshape(4, 8, 8)
    mapped = jax.pmap(lambda x: jhost.jit(relu_block)(x, UP, DOWN))
    assert_same(mapped(x), jax.vmap(lambda x: relu_block(x, UP, DOWN))(x))
    with pytest.raises(
        errors.UnsupportedError, match="each device already works on its own shard"
    ):
        jax.pmap(lambda x: hosted(relu_block, "p2p")(x, UP, DOWN))(x)


def test_a_reference_with_a_stream_is_refused() -> None:
    def makes(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        ref = jax.new_ref(x @ up)
        ref[...] = jnp.maximum(ref[...], 0)
        return rows(ref[...] @ down)

    with pytest.raises(
        errors.UnsupportedError, match=r"a reference .*at test_unsupported.py:\d+"
    ):
        hosted(makes, "p2p")(*ARGS)


def test_jet_is_refused() -> None:
    f = hosted(relu_block, "p2p")
    with pytest.raises(errors.UnsupportedError, match=r"Nest jax\.jvp"):
        jet.jet(lambda x: f(x, UP, DOWN), (X,), ((X, X),))
