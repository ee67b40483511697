"""Arrays of size 0: JAX takes them everywhere, and so does jhost.

XLA takes an empty operand of a `jax.shard_map` for a constant, and refuses a call with
no other operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.testing import mesh_of
from tests.lowering.traced import interpreted

Array = jax.Array

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "nothing contracted": (lambda x, y: x @ y, ((4, 0), (0, 4))),
    "nothing computed": (lambda x, y: x @ y, ((0, 4), (4, 0))),
    "one operand twice": (lambda x: x @ x.T, ((4, 0),)),
    "a sum of nothing": (lambda x: jnp.cos(x.sum()), ((0,),)),
    "made of its shape": (lambda x: jnp.pad(x, ((0, 0), (2, 2))), ((4, 0),)),
    "with others": (lambda x, y: (jnp.concatenate([x, y], 1), x), ((4, 0), (4, 4))),
    "streamed": (lambda x: jhost.stream(jnp.sin(x) @ jnp.ones((0, 4)), 0), ((4, 0),)),
    "a maximum": (lambda x: jnp.max(x, axis=1, initial=-1.0), ((4, 0),)),
}


@pytest.mark.parametrize(
    "run", [jhost.jit, interpreted], ids=["compiled", "interpreted"]
)
@pytest.mark.parametrize("spec", [P("tp"), P()], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_empty_arrays(name: str, spec: P, run: Any) -> None:
    f, shapes = FUNCTIONS[name]
    args = [jnp.zeros(shape) for shape in shapes]
    specs = tuple(spec if shape[0] % 4 == 0 else P() for shape in shapes)
    how: dict[str, Any] = {"mesh": mesh_of({"tp": 4}), "in_shardings": specs}
    chex.assert_trees_all_equal(run(f, **how)(*args), f(*args))


def test_gradients_of_nothing() -> None:
    def loss(f: Any) -> Any:
        return jax.grad(lambda x, y: jnp.sum(f(x, y) ** 2), (0, 1))

    args = jnp.zeros((4, 0)), jnp.zeros((0, 4))
    how: dict[str, Any] = {"mesh": mesh_of({"tp": 4}), "in_shardings": (P("tp"), P())}
    given = loss(jhost.jit(jnp.matmul, **how))(*args)
    chex.assert_trees_all_equal(given, loss(jnp.matmul)(*args))


def test_no_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 4)[:0]
    how: dict[str, Any] = {"mesh": mesh_of({"tp": 4}), "in_shardings": P("tp")}
    gathered = jhost.jit(lambda k: k, out_shardings=P(), **how)(keys)
    assert (gathered.shape, gathered.dtype) == (keys.shape, keys.dtype)
