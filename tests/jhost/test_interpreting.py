"""An interpreted function gives what the compiled one gives, wherever it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jhost
from jhost.testing import mesh_of
from tests.lowering.traced import by_statements, interpreted

Array = jax.Array
X, W = jnp.arange(32.0).reshape(8, 4), jnp.arange(16.0).reshape(4, 4)
SPECS = P("tp"), P(None, "tp")
MESH = mesh_of({"tp": 4})


def block(x: Array, w: Array) -> Array:
    return jhost.stream((x @ w) @ w.T, axis=0, chunks=2)


@pytest.mark.parametrize("around", ["nothing", "set_mesh", "grad"])
def test_explicit_meshes(around: str) -> None:
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Explicit,))
    x, w = (
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip((X, W), SPECS, strict=True)
    )
    f: Any = interpreted(block, mesh=mesh)
    with jax.set_mesh(mesh):
        match around:
            case "set_mesh":
                result, wanted = f(x, w), block(X, W)
            case "grad":
                g: Any = jhost.jit(block, mesh=mesh)
                result = by_statements(jax.grad(lambda x: jnp.sum(g(x, w))))(x)
                wanted = jax.grad(lambda x: jnp.sum(block(x, W)))(X)
            case _:
                result = wanted = block(X, W)
    if around == "nothing":
        result = f(x, w)
    np.testing.assert_array_equal(result, wanted)
    assert jax.typeof(result).sharding.mesh.axis_types == (AxisType.Explicit,)


def test_tangents_of_integers_are_float0() -> None:
    def tangents(x: Array) -> tuple[Array, Array]:
        return jax.linearize(lambda x: (x * 2, jnp.arange(8)), x)[1](x)

    x, i = interpreted(tangents, mesh=MESH, in_shardings=P("tp"))(X)
    np.testing.assert_array_equal(x, X * 2)
    assert (i.shape, i.dtype) == ((8,), jax.dtypes.float0)


KEYS: dict[str, tuple[Callable[[Array], Array], P, P]] = {
    "gathered": (lambda k: k, P("tp"), P()),
    "exchanged": (lambda k: k, P("tp"), P(None, "tp")),
    "handed on": (lambda k: jhost.stream(k, 0, pipeline="p2p"), P("tp"), P()),
    "cut": (lambda k: k[1:3], P("tp"), P()),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_of_random_numbers_are_moved(name: str) -> None:
    f, ins, outs = KEYS[name]
    keys = jax.random.split(jax.random.key(0), (4, 4))
    result = interpreted(f, mesh=MESH, in_shardings=ins, out_shardings=outs)(keys)
    wanted = jax.random.key_data(f(keys))
    chex.assert_trees_all_equal(jax.random.key_data(result), wanted)


def test_a_search_for_nans_finds_the_user_s_alone() -> None:
    f = interpreted(block, mesh=MESH, in_shardings=SPECS)
    with jax.debug_nans(True):
        np.testing.assert_array_equal(f(X, W), block(X, W))
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(f(X * jnp.nan, W))


@pytest.mark.parametrize("mesh", [None, MESH], ids=["one device", "four"])
def test_weak_types_stay_weak(mesh: Any) -> None:
    def streamed(x: Array) -> Array:
        return jhost.stream(x * 2, axis=0, chunks=2)

    x = jnp.broadcast_to(jnp.asarray(2.0), (8,))
    assert x.weak_type
    settings: dict[str, Any] = {"mesh": mesh, "in_shardings": P("tp") if mesh else None}
    f: Any = jhost.jit(streamed, **settings)
    for result in (
        by_statements(f)(x),
        by_statements(jax.vmap(f))(x[None]),
        by_statements(lambda x: jax.vjp(f, x)[0])(x),
        f.lower(x).interpret(x)[0],
    ):
        assert result.weak_type
        assert np.all(result == 4)
