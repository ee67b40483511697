"""Streams that nobody marked, in the programs that people write: exact numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.testing import mesh_of
from tests import finding

Weights: TypeAlias = tuple[jax.Array, jax.Array]
Layer: TypeAlias = Callable[[jax.Array, Weights], jax.Array]

SPECS = (P("tp"), (P(None, "tp"), P("tp")))


def plain(x: jax.Array, weights: Weights) -> jax.Array:
    up, down = weights
    return x + jnp.abs(x @ up) @ down


# --- How people write a layer ------------------------------------------------------- #


def twice_back(layer: Layer) -> Layer:
    """Its rule is not what JAX would derive."""
    f = jax.custom_vjp(layer)

    def back(pull: Any, given: jax.Array) -> Any:
        return jax.tree.map(lambda a: 2 * a, pull(given))

    f.defvjp(lambda x, w: jax.vjp(layer, x, w), back)
    return f


def twice_along(layer: Layer) -> Layer:
    f = jax.custom_jvp(layer)

    @f.defjvp
    def along(at: Any, tangents: Any) -> Any:
        made, tangent = jax.jvp(layer, at, tangents)
        return made, 2 * tangent

    return f


def on_shards(layer: Layer) -> Layer:
    """What a device has of the result stays there."""
    negative = jax.shard_map(
        jnp.negative, mesh=mesh_of({"tp": 2}), in_specs=P("tp"), out_specs=P("tp")
    )
    return lambda x, w: negative(layer(x, w))


def scans(layer: Layer) -> Layer:
    def again(x: jax.Array, w: Weights) -> jax.Array:
        return lax.scan(lambda x, _: (layer(x, w), None), x, length=2)[0]

    def outer(x: jax.Array, w: Weights) -> jax.Array:
        stacked = jax.tree.map(lambda a: jnp.stack([a, -a]), w)
        return lax.scan(lambda x, w: (again(x, w), None), x, stacked)[0]

    return outer


KINDS: Sequence[Callable[[Layer], Layer]] = (
    jax.jit,
    jax.checkpoint,
    twice_back,
    twice_along,
    on_shards,
    scans,
)


# --- The same numbers --------------------------------------------------------------- #


def integers(*shape: int) -> np.ndarray:
    """Few of them are not 0, so that sums of products stay exact."""
    generator = np.random.default_rng(sum(shape))
    return generator.choice([-1.0, 0, 0, 1], shape).astype(np.float32)


@hypothesis.given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=2),
    st.sampled_from([P(), P("tp"), P(None, "tp")]),
    st.booleans(),
)
@hypothesis.settings(max_examples=6, deadline=None)
def test_found_streams_in_any_layer_give_what_the_plain_function_gives(
    kinds: list[Any], rows: P, backward: bool
) -> None:
    def step(x: jax.Array, weights: Weights, times: int) -> Any:
        layer = plain
        for kind in kinds:
            layer = kind(layer)

        def loss(x: jax.Array, weights: Weights) -> jax.Array:
            return times * jnp.sum(layer(x, weights))

        if backward:
            return jax.value_and_grad(loss, (0, 1))(x, weights)
        return layer(x, weights)

    def args() -> Any:
        return jnp.asarray(integers(8, 4)), (integers(4, 8), integers(8, 4)), 3

    settings: dict[str, Any] = {"static_argnums": 2, "donate_argnums": 0}
    expected = jax.jit(step, **settings)(*args())
    hypothesis.assume(max(np.max(np.abs(a)) for a in jax.tree.leaves(expected)) < 2**22)
    f = jhost.jit(
        step, mesh=mesh_of({"tp": 2}), in_shardings=(rows, SPECS[1]), **settings
    )
    with finding.everywhere():
        assert any(stream.found for stream in f.lower(*args()).explain().streams)
        given = f(*args())
    jax.tree.map(np.testing.assert_array_equal, given, expected)


def test_what_a_roll_by_nothing_leaves_is_read_by_no_loop() -> None:
    """An array without elements was gathered for readers of whom there were none."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.roll(x @ w, 0, 0) @ w * x)

    args, gradients = (integers(8, 4), integers(4, 4)), jax.grad(loss, (0, 1))
    mesh = mesh_of({"dp": 2, "tp": 4})
    f = jhost.jit(gradients, mesh=mesh, in_shardings=(P("tp", "dp"), P("dp")))
    with finding.everywhere():
        given = f(*args)
    jax.tree.map(np.testing.assert_array_equal, given, jax.jit(gradients)(*args))
