"""Programs that XLA partitions, where all that moves crosses a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from tests import apart
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import array

MESH = mesh_of(dp=2, tp=4)
X, UP, DOWN = array(16, 8), array(8, 16, seed=1), array(16, 8, seed=2)
SPECS = P("dp"), P(None, "tp"), P("tp")
SETTINGS: dict[str, Any] = {"mesh": MESH, "in_shardings": SPECS}


@pytest.fixture(autouse=True)
def in_processes() -> Iterator[None]:
    with apart.in_processes():
        yield


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jnp.clip(x @ up, -2, 2) @ down, axis=0)


def is_left(lowered: jhost.Lowered) -> bool:
    """Whether the note says so, and no `shard_map` is in what XLA gets."""
    said = "XLA partitions this program" in str(lowered.explain())
    assert said == ("manual_computation" not in lowered.as_text())
    return said


def test_what_moves_between_processes_is_left_to_xla() -> None:
    f = jhost.jit(mlp, **SETTINGS)
    assert is_left(f.lower(X, UP, DOWN))
    chex.assert_trees_all_equal(f(X, UP, DOWN), mlp(X, UP, DOWN))


def test_the_explanation_has_no_communications_that_are_not_made() -> None:
    explanation = jhost.explain(jhost.jit(mlp, **SETTINGS), X, UP, DOWN)
    assert not explanation.communications
    (stream,) = explanation.streams
    assert not stream.hides


def test_what_was_asked_for_is_not_left_to_xla() -> None:
    f = jhost.jit(mlp, **SETTINGS, pipeline="p2p")
    assert not is_left(f.lower(X, UP, DOWN))


def test_nor_is_a_program_in_which_nothing_moves() -> None:
    f = jhost.jit(jnp.sin, mesh=MESH, in_shardings=P("dp"))
    assert not is_left(f.lower(X))


def test_nor_is_attention_that_xla_would_write_out() -> None:
    q = array(2, 8, 4, 8)
    spec = P(None, "dp", "tp")
    f = jhost.jit(
        lambda q: jnp.sum(jhost.dot_product_attention(q, q, q, is_causal=True)),
        mesh=MESH,
        in_shardings=spec,
    )
    assert not is_left(f.lower(q))


def test_shardings_that_are_asked_for_inside_are_constraints() -> None:
    def layer(x: jax.Array, up: jax.Array) -> Any:
        return jhost.shard(jnp.clip(x @ up, -2, 2), P(P.UNCONSTRAINED, "dp")), None

    def model(x: jax.Array, ups: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(layer, x, ups)[0], 0)

    ups = array(3, 8, 8, seed=3)
    f = jhost.jit(model, mesh=MESH, in_shardings=(P("dp"), P(None, "tp")))
    lowered = f.lower(X, ups)
    assert is_left(lowered)
    assert '[{?}, {"dp"}]' in lowered.as_text()
    chex.assert_trees_all_equal(f(X, ups), model(X, ups))


def test_functions_inside_are_left_to_xla_with_it() -> None:
    block = jhost.jit(mlp, **SETTINGS)

    def model(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> Any:
            return block(x, up, down), None

        return lax.scan(layer, x, None, length=2)[0]

    f = jhost.jit(model, **SETTINGS)
    assert is_left(f.lower(X, UP, DOWN))
    chex.assert_trees_all_equal(f(X, UP, DOWN), model(X, UP, DOWN))


@pytest.mark.parametrize("along_tp", [False, True])
def test_collectives_begin_early_if_all_are_over_the_same_devices(
    along_tp: bool,
) -> None:
    """Others may wait for each other forever: XLA orders only those of one group."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.clip(x @ w, -2, 2) @ jnp.sin(v)

    first = P("tp") if along_tp else P()
    specs = P("dp"), first, P("dp")
    off = jhost.jit(f, mesh=MESH, in_shardings=specs, pipeline="off")
    lowered = off.lower(X, array(8, 16), array(16, 64))
    assert is_left(lowered)
    assert ("collectives early" in str(lowered.explain())) == (not along_tp)


def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jnp.sum(mlp(x, up, down) ** 2)


XS = jnp.stack([X, X + 1])


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("derive", "x"),
    [
        (lambda f: jax.grad(f, (0, 1, 2)), X),
        (lambda f: jax.grad(jax.checkpoint(f), 1), X),
        (lambda f: jax.vmap(jax.grad(f), (0, None, None)), XS),
        (lambda f: jax.jacfwd(jax.grad(f)), X[:2, :]),
    ],
    ids=["grad", "checkpoint", "vmap of grad", "second order"],
)
def test_derivatives_are_the_plain_functions(
    derive: Any, x: jax.Array, outer: Any
) -> None:
    f = jhost.jit(loss, **SETTINGS)
    chex.assert_trees_all_equal(
        outer(derive(f))(x, UP, DOWN), jax.jit(derive(loss))(x, UP, DOWN)
    )


def test_types_of_explicit_meshes_are_kept() -> None:
    types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=types)
    with jax.set_mesh(mesh):
        args = [
            jax.device_put(value, NamedSharding(mesh, spec))
            for value, spec in zip((X, UP, DOWN), SPECS, strict=True)
        ]
        result = jhost.jit(mlp)(*args)
    np.testing.assert_array_equal(result, mlp(X, UP, DOWN))
