"""Operands that can be told apart, in place of arrays whose elements are all equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def drawn(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with random numbers where an array of floats has one alone.

    The numbers are the same in every process, and lie as those did.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    keys = jax.random.split(jax.random.key(0), max(len(leaves), 1))
    return jax.tree.unflatten(
        tree,
        [
            _random(key, leaf) if _is_alike(leaf) else leaf
            for key, leaf in zip(keys, leaves, strict=True)
        ],
    )


def _is_alike(leaf: Any) -> bool:
    """Whether it is an array of several equal floats."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or leaf.size < 2:
        return False
    return bool(jax.jit(lambda x: jnp.min(x) == jnp.max(x))(leaf))


def _random(key: jax.Array, leaf: Any) -> jax.Array:
    def make(key: jax.Array) -> jax.Array:
        numbers = jax.random.uniform(key, leaf.shape, jnp.float32, 0.5, 1.5)
        return numbers.astype(leaf.dtype)

    sharding = leaf.sharding if getattr(leaf, "committed", False) else None
    return jax.jit(make, out_shardings=sharding)(key)
