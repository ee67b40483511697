"""Random numbers for flax layers in tests: of JAX's own XLA compiles each shape long."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.random import define_prng_impl

nnx: Any = pytest.importorskip("flax.nnx")


def rngs() -> Any:
    """The generators of a new layer, which draw the same each time."""
    return nnx.Rngs(quick_key())


def quick_key() -> jax.Array:
    """A key whose numbers are random enough for parameters."""
    return jax.random.key(0, impl=_quick())


@functools.cache
def _quick() -> Any:
    return define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.asarray(seed).astype(jnp.uint32).reshape(1),
        split=lambda key, shape: _mixed(_counts(*shape, 1) + _mixed(key)),
        fold_in=lambda key, data: _mixed(key + _mixed(jnp.asarray(data, jnp.uint32))),
        random_bits=_bits,
        name="quick",
        tag="quick",
    )


def _bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    bits = _mixed(_counts(*shape) + key[0])
    if bit_width == 64:
        bits, more = (x.astype(jnp.uint64) for x in (bits, _mixed(bits)))
        return bits << jnp.uint64(32) | more
    return bits.astype(f"uint{bit_width}")


def _counts(*shape: int) -> jax.Array:
    return lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + jnp.uint32(1)


def _mixed(x: jax.Array) -> jax.Array:
    """A hash of integers, by multiplications and shifts."""
    for shift, factor in ((15, 0x9E3779B1), (13, 0x85EBCA77)):
        x = x * jnp.uint32(factor)
        x = x ^ x >> jnp.uint32(shift)
    return x
