"""Dim rules of random numbers: a part draws the bits that the whole has there.

JAX's threefry generator, in its partitionable form (the default), hashes a key with the
position of an element in the flattened array.  So a part needs only the positions of
its own elements.  Other generators draw in an order that depends on the size, so their
arrays stay whole.  So do batches of their keys, because JAX draws for all keys of a
batch together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from jhost._jax import hashes_positions, makes_threefry_keys
from jhost.lowering.rules.building import Factors, leading
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Shard,
    factors_of,
    part_shape,
    shape_of,
)
from jhost.lowering.rules.elementwise import elementwise
from jhost.lowering.rules.registry import rule, without_factors

_hash: Callable[..., Any] = threefry2x32_p.bind
_WHOLE = "this generator draws other bits for a part than for the whole array"

# --- Bits --------------------------------------------------------------------- #


@rule("random_bits")
def random_bits(eqn: JaxprEqn) -> DimRule:
    """The dims of a batch of keys come first; the dims drawn are counted factors."""
    if not hashes_positions(eqn):
        return without_factors(eqn, _WHOLE)
    factors = Factors()
    keys = factors.dims(shape_of(eqn.invars[0]))
    drawn = factors.dims(eqn.params["shape"])

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        high, low = _counts(drawn, eqn.params["shape"], shard)
        first, second = (_in_front(word, drawn) for word in _words(args[0]))
        local = part_shape((*keys, *drawn), shape_of(eqn.outvars[0]), shard)
        high, low = (_behind(count, local) for count in (high, low))
        high, low = _hash(first, second, high, low)
        return [_narrowed(high, low, eqn.params["bit_width"])]

    made = factors.rule([keys], [(*keys, *drawn)], rebind)
    return dataclasses.replace(made, counted=frozenset(factors_of(drawn)))


def _words(keys: Any) -> list[Any]:
    """The two words of each key."""
    data = jax.random.key_data(keys)
    return [lax.index_in_dim(data, word, -1, keepdims=False) for word in range(2)]


def _in_front(word: Any, drawn: Dims) -> Any:
    """A word of each key, with dims of size 1 for what is drawn from the key."""
    return lax.expand_dims(word, range(word.ndim, word.ndim + len(drawn)))


def _behind(count: Any, shape: Sequence[int]) -> Any:
    """The counts of the drawn numbers, repeated for each key of the batch."""
    batch = range(len(shape) - count.ndim)
    return lax.broadcast(count, [shape[dim] for dim in batch])


def _narrowed(high: Any, low: Any, width: int) -> Any:
    """Two words as one number: side by side, or combined by xor and cut.

    So does `_threefry_random_bits_partitionable` in JAX (0.10 to 0.12).
    """
    dtype = np.dtype(f"uint{width}")
    if width < 64:
        return lax.convert_element_type(high ^ low, dtype)
    high, low = (lax.convert_element_type(word, dtype) for word in (high, low))
    return lax.shift_left(high, jnp.full_like(high, 32)) | low


# --- Counts ------------------------------------------------------------------- #


@rule("iota_2x32_shape")
def iota_2x32_shape(eqn: JaxprEqn) -> DimRule:
    """The position of each element in the flattened array: all dims are counted."""
    factors = Factors()
    dims = factors.dims(eqn.params["shape"])

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> Sequence[Any]:
        del args
        return _counts(dims, eqn.params["shape"], shard)

    made = factors.rule([], [dims, dims], rebind)
    return dataclasses.replace(made, counted=frozenset(factors_of(dims)))


def _counts(dims: Dims, shape: Sequence[int], shard: Shard) -> tuple[Any, Any]:
    """The high and low words of the positions of a part in an array of `shape`."""
    local = part_shape(dims, shape, shard)
    high = low = jnp.zeros(local, np.uint32)
    for number, dim in enumerate(dims):
        assert isinstance(dim, FactorDim)
        steps = lax.convert_element_type(shard.positions(dim.factor), np.uint32)
        stride = math.prod(shape[number + 1 :])
        more = lax.broadcast_in_dim(steps * _low(stride), local, (number,))
        total = low + more
        # In smaller arrays the high word of every position is 0.
        if math.prod(shape) > 1 << 32:
            # An unsigned sum that is less than its term has wrapped round.
            carry = lax.convert_element_type(total < low, np.uint32)
            more = lax.broadcast_in_dim(_high_word(steps, stride), local, (number,))
            high = high + more + carry
        low = total
    return high, low


def _low(number: int) -> np.uint32:
    return np.uint32(number & 0xFFFFFFFF)


def _high_word(steps: Any, stride: int) -> Any:
    """The high word of `steps * stride`, computed by halves of words.

    JAX has integers of 64 bits only where `jax_enable_x64` is set.
    """
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    top, bottom = steps >> half, steps & mask
    upper, lower = np.uint32(stride >> 16 & 0xFFFF), np.uint32(stride & 0xFFFF)
    middle = top * lower + (bottom * lower >> half)
    rest = (middle & mask) + bottom * upper
    carried = (middle >> half) + (rest >> half)
    return steps * _low(stride >> 32) + top * upper + carried


# --- Keys --------------------------------------------------------------------- #


@rule("random_split")
def random_split(eqn: JaxprEqn) -> DimRule:
    """The dims of a batch of keys are factors; one key's new keys stay together."""
    rank = len(shape_of(eqn.invars[0]))
    # One key has no batch to cut, whatever its generator.
    if rank and not makes_threefry_keys(eqn.invars[0]):
        return without_factors(eqn, _WHOLE)
    return leading(eqn, rank)


@rule("random_fold_in", "random_seed")
def keys_one_by_one(eqn: JaxprEqn) -> DimRule:
    """Each key is made by itself."""
    if shape_of(eqn.outvars[0]) and not makes_threefry_keys(eqn.outvars[0]):
        return without_factors(eqn, _WHOLE)
    return elementwise(eqn)
