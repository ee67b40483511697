"""A jhost function in another, with each kind of parameter that a primitive may have.

Programs, functions, trees and types among the parameters of an equation have to survive
what lowering does to a function inside: it is inlined with its own settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental import io_callback, pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import PartitionSpec as P

import jhost
from jhost.testing import assert_close
from tests.lowering.hand_built import mesh_of

Array = jax.Array
Function = Callable[[Array], Any]

MATRIX = np.array([[4, 1, 0, 0], [2, 5, 1, 0], [0, 1, 6, 1], [1, 0, 0, 3]], np.float32)
X: Any = np.array([1.0, 2.0, -3.0, 4.0], np.float32)


@jax.custom_jvp
def with_jvp(x: Array) -> Array:
    return jnp.sin(x)


with_jvp.defjvp(lambda x, t: (with_jvp(*x), 3 * t[0]))


@jax.custom_vjp
def with_vjp(x: Array) -> Array:
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: (g * jnp.tanh(x),))


@jax.custom_batching.custom_vmap
def with_vmap(x: Array) -> Array:
    return jnp.sin(x)


with_vmap.def_vmap(lambda size, batched, x: (2 * jnp.sin(x), batched[0]))


@custom_partitioning
def partitioned(x: Array) -> Array:
    return jnp.sin(x)


def _partition(mesh: Any, args: Any, result: Any) -> Any:
    return mesh, jnp.sin, result.sharding, (args[0].sharding,)


partitioned.def_partition(partition=_partition, sharding_rule="i -> i")


def solved(x: Array) -> Array:
    return lax.custom_linear_solve(
        lambda v: MATRIX @ v,
        x,
        lambda _, b: jnp.linalg.inv(MATRIX) @ b,
        lambda _, b: jnp.linalg.inv(MATRIX).T @ b,
    )


def root(x: Array) -> Array:
    return lax.custom_root(
        lambda y: y**3 - x,
        x,
        lambda _, x: jnp.sign(x) * jnp.abs(x) ** (1 / 3),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


def linear(x: Array) -> Array:
    r = lax.stop_gradient(jnp.sin(x))
    return linear_call(lambda r, x: x * r, lambda r, t: 5 * t * r, r, x)


def scattered(x: Array) -> Array:
    return jnp.zeros(8, x.dtype).at[jnp.array([1, 3, 1, 7])].multiply(x)


def applied(x: Array) -> Array:
    return jnp.ones(4, x.dtype).at[jnp.array([2, 0])].apply(lambda y: y * 3) * x


def reduced(x: Array) -> Array:
    return lax.reduce(x, np.float32(1), lambda a, b: a * b + a, (0,)) * x


def windows(x: Array) -> Array:
    return lax.reduce_window(
        x, np.float32(-8), lambda a, b: jnp.maximum(a, b), (2,), (1,), "SAME"
    )


def called_back(x: Array) -> Array:
    return io_callback(lambda v: 2 * np.asarray(v), jax.typeof(x), x)


def pure(x: Array) -> Array:
    return jax.pure_callback(
        lambda v: 2 * np.asarray(v), jax.typeof(x), x, vmap_method="sequential"
    )


def by_platform(x: Array) -> Array:
    return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)


def mapped(x: Array) -> Array:
    mesh = mesh_of(tp=4)
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(x)


def branches(x: Array) -> Array:
    small = x[0] < 2
    return lax.cond(small, with_jvp, with_vjp, x) + lax.cond(small, solved, jnp.cos, x)


def looped(x: Array) -> Array:
    def step(c: Any) -> Any:
        return c[0] + 1, with_jvp(solved(c[1]))

    return lax.while_loop(lambda c: c[0] < 2, step, (0, x))[1]


def scanned(x: Array) -> Array:
    def step(h: Array, _: None) -> tuple[Array, Array]:
        return with_vjp(solved(h)), linear(h)

    last, seen = lax.scan(step, x, None, length=2)
    return last + jnp.sum(seen, 0)


def checkpointed(x: Array) -> Array:
    return jax.checkpoint(lambda x: with_vjp(solved(jnp.sin(x))))(x)


def several_sorted(x: Array) -> Array:
    keys, values = lax.sort((x, 2 * x), num_keys=1)
    return keys * values + lax.top_k(x, 4)[0]


def composite(x: Array) -> Array:
    return lax.composite(lambda x, k: x * k, "jhost.test")(x, k=np.float32(3))


def states(x: Array) -> Array:
    def body(ref: Any) -> None:
        ref[...] = jnp.sin(ref[...])

    return pl.run_state(body)(x)


PROGRAMS: dict[str, Function] = {
    "scan": scanned,
    "while": looped,
    "cond": branches,
    "checkpoint": checkpointed,
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "custom_vmap": with_vmap,
    "custom_partitioning": partitioned,
    "custom_linear_solve": solved,
    "custom_root": root,
    "linear_call": linear,
    "inv": lambda x: jnp.linalg.inv(MATRIX * x),
    "solve": lambda x: jnp.linalg.solve(MATRIX + jnp.sin(x), x),
    "scatter": scattered,
    "scatter apply": applied,
    "reduce": reduced,
    "reduce_window": windows,
    "sort": several_sorted,
    "io_callback": called_back,
    "pure_callback": pure,
    "platform_dependent": by_platform,
    "shard_map": mapped,
    "composite": composite,
    "associative_scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "map": lambda x: lax.map(with_jvp, x),
    "states": states,
}


def nested(f: Function, **settings: Any) -> Function:
    inner = jhost.jit(f, **settings)
    return jhost.jit(lambda x: jax.tree.map(jnp.negative, inner(x)), **settings)


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "no mesh": dict,
    "sharded": lambda: {
        "mesh": mesh_of(tp=4),
        "in_shardings": P("tp"),
        "compiler_options": None,  # which an outer `jax.jit` would miss
    },
}


WITHOUT_A_MESH = (
    "scan",
    "cond",
    "checkpoint",
    "custom_jvp",
    "custom_vjp",
    "custom_partitioning",
    "custom_linear_solve",
    "io_callback",
    "shard_map",
    "states",
)
"""What jhost hands to JAX in ways of their own; other operations are as with a mesh."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(pytest.param(n, SETTINGS["sharded"], id=f"{n}-sharded") for n in PROGRAMS),
        *(
            pytest.param(n, SETTINGS["no mesh"], id=f"{n}-no mesh")
            for n in WITHOUT_A_MESH
        ),
    ],
)
def test_a_function_in_another_gives_what_it_gives_by_itself(
    name: str, settings: Callable[[], dict[str, Any]]
) -> None:
    f = PROGRAMS[name]
    given, plain = nested(f, **settings()), lambda x: -f(x)
    with jax.numpy_dtype_promotion("standard"):
        alike(given, plain)


def alike(given: Function, plain: Function) -> None:
    """In value and gradient, or both refuse that one, in JAX's words."""
    try:
        wanted = with_gradient(plain)(X)
    except Exception as error:
        with pytest.raises(type(error)):
            with_gradient(given)(X)
        assert_close(given(X), jax.jit(plain)(X), tolerance=1e-5)
    else:
        found = with_gradient(given)(X)
        assert_close(found[0], wanted[0], tolerance=1e-5)
        assert_close(found[1], wanted[1], tolerance=1e-4)


def with_gradient(f: Function) -> Function:
    """In one program: XLA takes three times as long for one of each."""
    return jax.jit(lambda x: (f(x), jax.grad(lambda x: jnp.sum(f(x)))(x)))


def test_a_solve_inside_under_set_mesh() -> None:
    """What JAX binds again as it lowers it knew another mesh by its types."""
    with jax.set_mesh(mesh_of(tp=4)):
        f = jhost.jit(solved, in_shardings=P("tp"))
        assert_close(f(X), jax.jit(solved)(X), tolerance=1e-5)
