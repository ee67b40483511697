"""`jax.vmap` of a jhost function and in one, with and without `spmd_axis_name`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from tests.jhost.blocks import (
    ARGS,
    SPECS,
    Function,
    assert_same,
    each_pipeline,
    gradients,
    hosted,
    relu_block,
    same,
)
from tests.lowering.hand_built import mesh_of

X, UP, DOWN = ARGS
BOTH = jnp.stack([X, -X])


def over_rows(f: Function, **how: Any) -> Function:
    return jax.vmap(f, (0, None, None), **how)


@each_pipeline
def test_the_batch_has_a_mesh_axis_around(pipeline: str) -> None:
    """The batch stays sharded over dp; the weights' gradient is summed over it once."""
    mesh, how = mesh_of(dp=2, tp=4), {"spmd_axis_name": "dp"}
    x = jax.device_put(BOTH, NamedSharding(mesh, P("dp", "tp")))
    f = hosted(relu_block, pipeline, mesh=mesh, compiler_options=None)
    y = jax.jit(over_rows(f, **how))(x, UP, DOWN)
    assert_same(y, over_rows(relu_block)(BOTH, UP, DOWN))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("dp", "tp")), 3)
    given, wanted = gradients(over_rows(f, **how)), gradients(over_rows(relu_block))
    assert_same(given(x, UP, DOWN), wanted(BOTH, UP, DOWN))


@each_pipeline
def test_the_batch_has_a_mesh_axis_inside(pipeline: str) -> None:
    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.shard(relu_block(x, up, down), P("tp"))

    inner = over_rows(block, spmd_axis_name="dp")
    x_spec = P("dp", "tp")
    mesh, ins = mesh_of(dp=2, tp=4), (x_spec, *SPECS[1:])
    f = hosted(inner, pipeline, mesh=mesh, in_shardings=ins, out_shardings=x_spec)
    assert_same(f(BOTH, UP, DOWN), inner(BOTH, UP, DOWN))
    assert_same(gradients(f)(BOTH, UP, DOWN), gradients(inner)(BOTH, UP, DOWN))


def test_an_axis_that_is_taken_is_refused_as_by_jax() -> None:
    f = hosted(relu_block, "p2p")
    with pytest.raises(ValueError, match=r"spmd_axis_name \('tp',\) cannot appear"):
        over_rows(f, spmd_axis_name="tp")(jnp.stack([X] * 4), UP, DOWN)


def test_vmap_inside() -> None:
    x_spec = P(None, "tp")
    specs: dict[str, Any] = {
        "in_shardings": (x_spec, *SPECS[1:]),
        "out_shardings": x_spec,
    }
    batched = over_rows(relu_block)
    same(lambda f: f(BOTH, UP, DOWN), batched, "p2p", **specs)
    same(lambda f: gradients(f)(BOTH, UP, DOWN), batched, "p2p", **specs)


def test_collectives_over_the_mapped_axis() -> None:
    def less_mean(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return relu_block(x, up, down) - lax.psum(x, "i")

    same(lambda f: over_rows(f, axis_name="i")(BOTH, UP, DOWN), less_mean, "collective")


def test_vmap_of_vmap() -> None:
    ups = jnp.stack([UP, -UP, UP + 1])

    def twice(f: Function) -> Any:
        return jax.vmap(over_rows(f), (None, 0, None))(BOTH, ups, DOWN)

    same(twice, relu_block, "p2p")


def test_a_custom_vmap_rule_inside_is_used() -> None:
    @jax.custom_batching.custom_vmap
    def relu(x: jax.Array) -> jax.Array:
        return jnp.maximum(x, 0)

    @relu.def_vmap
    def _(size: int, batched: Any, x: jax.Array) -> Any:
        return 3 * jnp.maximum(x, 0), True

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream(relu(x @ up) @ down, axis=0)

    same(lambda f: (f(*ARGS), over_rows(f)(BOTH, UP, DOWN)), block, "p2p")
