"""Values of 64 bits, made in `jax.enable_x64` and used outside: as by `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from tests.lowering.hand_built import mesh_of

Function: TypeAlias = Callable[[jax.Array], Any]

# Types that are not there are asked for, and JAX warns of each.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype")

with jax.enable_x64(True):
    VALUES = {
        "int64": jnp.asarray(np.arange(8) + 2**40),
        "uint64": jnp.asarray(np.arange(8, dtype=np.uint64) + np.uint64(2**63)),
        "float64": jnp.asarray(np.arange(8) / 3),
        "complex128": jnp.asarray(np.arange(8) / 3j),
    }

PROGRAMS: dict[str, Function] = {
    "as it is": lambda x: x,
    "kept": lambda x: (x + x, lax.rev(x, (0,)), jnp.sort(x) if x.ndim else x),
    "cast": lambda x: (jnp.real(x).astype(jnp.int16), x[:4].astype(jnp.complex64)),
    "narrowed": lambda x: (jnp.sum(x), x.reshape(2, 4) * 2),
    "scan": lambda x: lax.scan(lambda c, _: (c + c, c), x, None, length=2),
    "cond": lambda x: lax.cond(x[0] == x[0], lambda x: x + x, lambda x: x, x),
    "stream": lambda x: jhost.stream(x + x, axis=0, chunks=2),
    "closed over": lambda x: (x + VALUES["float64"].astype(x.dtype), VALUES["int64"]),
}


def settings() -> dict[str, dict[str, Any]]:
    mesh = mesh_of(tp=4)
    sharded = {"mesh": mesh, "in_shardings": P("tp")}
    return {"no mesh": {}, "sharded": sharded}


def same_bits(given: Any, wanted: Any) -> None:
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True)
    for one, other in pairs:
        assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("int64", "no mesh"),
        ("int64", "sharded"),
        ("uint64", "sharded"),
        ("float64", "no mesh"),
        ("complex128", "sharded"),
    ],
)
def test_types_are_those_of_jit(kind: str, how: str) -> None:
    x = VALUES[kind]
    with jax.numpy_dtype_promotion("standard"), jax.enable_checks(True):
        for f in PROGRAMS.values():
            same_bits(jhost.jit(f, **settings()[how])(x), jax.jit(f)(x))


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: jax.grad(lambda x: f(x)[0]),
    "vmap": lambda f: lambda x: jax.vmap(f)(x.reshape(1, 8)),
    "jit": lambda f: jax.jit(f),
    "vmap of grad": lambda f: jax.vmap(
        jax.grad(lambda x: f(x[None] + VALUES["float64"])[0])
    ),
}


@pytest.mark.parametrize("how", ["no mesh", "sharded"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_derivatives_and_batches(
    transform: Callable[[Function], Function], how: str
) -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.sin(x) * x

    x = VALUES["float64"]
    with jax.numpy_dtype_promotion("standard"):
        given = transform(jhost.jit(f, **settings()[how]))
        same_bits(given(x), transform(jax.jit(f))(x))


def test_types_that_are_not_there_stay_narrow() -> None:
    for x in (np.arange(8), np.float64(3), 3):
        same_bits(jhost.jit(lambda x: x + x)(x), jax.jit(lambda x: x + x)(x))
