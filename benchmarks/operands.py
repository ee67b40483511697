"""Operands on the devices: made there, in sets larger than their caches together."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks.case import Operand

CACHE_BYTES = 60_000_000
"""The L2 of an H200; two of them are passed before a set is used again."""

MOST_SETS = 8

Set = tuple[jax.Array, ...]


def set_count(operands: Sequence[Operand], mesh: Mesh) -> int:
    """How many sets pass the cache twice: at least two, at most eight."""
    share = sum(2 * math.prod(_local_shape(o, mesh)) for o in operands)
    return min(max(2, math.ceil(2 * CACHE_BYTES / share)), MOST_SETS)


def _local_shape(operand: Operand, mesh: Mesh) -> tuple[int, ...]:
    return NamedSharding(mesh, operand.spec).shard_shape(operand.shape)


def random_set(operands: tuple[Operand, ...], mesh: Mesh, seed: int) -> Set:
    """Normal values of each operand's scale."""
    return maker(operands, mesh, integers=False)(seed)


def integer_set(operands: tuple[Operand, ...], mesh: Mesh, seed: int) -> Set:
    """Small multiples of each operand's unit, whose sums bfloat16 holds exactly."""
    return maker(operands, mesh, integers=True)(seed)


@functools.lru_cache(maxsize=64)
def maker(
    operands: tuple[Operand, ...], mesh: Mesh, *, integers: bool
) -> Callable[[int], Set]:
    make = _integers if integers else _normal

    def values(seed: jax.Array) -> Set:
        # JAX's default generator: each device draws its own part of the one array.
        keys = jax.random.split(jax.random.key(seed), len(operands))
        return tuple(make(key, o) for key, o in zip(keys, operands, strict=True))

    shardings = tuple(NamedSharding(mesh, operand.spec) for operand in operands)
    return jax.jit(values, out_shardings=shardings)


def _normal(key: jax.Array, operand: Operand) -> jax.Array:
    values = jax.random.normal(key, operand.shape, jnp.float32) * operand.scale
    return values.astype(jnp.bfloat16)


def _integers(key: jax.Array, operand: Operand) -> jax.Array:
    drawn = jax.random.uniform(key, operand.shape, jnp.float32)
    density = 1.0
    if operand.nonzeros is not None:
        density = min(1.0, operand.nonzeros / operand.shape[operand.along])
    signs = jnp.where(drawn < density / 2, -1.0, jnp.where(drawn < density, 1.0, 0.0))
    return (signs * operand.unit).astype(jnp.bfloat16)
