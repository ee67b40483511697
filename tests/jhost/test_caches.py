"""What jhost keeps of functions: while they live, and no longer."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost._jax import ClosedJaxpr
from jhost.lowering.ir.program import Program
from jhost.testing import mesh_of

X = jnp.ones((8, 8))

SETTINGS: dict[str, Any] = {
    "one device": {},
    "four devices": {"mesh": mesh_of({"tp": 4}), "in_shardings": P("tp")},
    "interpreted": {"interpret": True},
}


def use_new_function(**settings: Any) -> Callable[..., Any]:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.tanh(x @ x), axis=0, chunks=2)

    g: Callable[..., Any] = jhost.jit(f, **settings)
    jax.block_until_ready((g(X), jax.grad(lambda x: jnp.sum(g(x)))(X)))
    return g


def held() -> int:
    """How many programs and jaxprs there are."""
    gc.collect()
    kinds = map(type, gc.get_objects())
    return sum(issubclass(kind, Program | ClosedJaxpr) for kind in kinds)


@pytest.mark.parametrize("name", ["one device", "four devices"])
def test_a_dropped_function_leaves_nothing(name: str) -> None:
    use_new_function(**SETTINGS[name])
    before, count = held(), 2
    tracemalloc.start()
    for _ in range(count):  # this fills what is made once
        use_new_function(**SETTINGS[name])
    gc.collect()
    start, _ = tracemalloc.get_traced_memory()
    for _ in range(count):
        use_new_function(**SETTINGS[name])
    gc.collect()
    end, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held() <= before
    assert (end - start) / count < 20_000  # bytes; it was a megabyte


@pytest.mark.parametrize("name", SETTINGS)
def test_jax_clear_caches_releases_what_living_functions_made(name: str) -> None:
    jax.clear_caches()
    before = held()
    f = use_new_function(**SETTINGS[name])
    assert held() > before
    jax.clear_caches()
    assert held() <= before
    assert f(X).shape == X.shape
