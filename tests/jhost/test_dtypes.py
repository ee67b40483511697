"""What dtypes hold, whatever their size in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec as P

import jhost
from jhost._dtypes import bits, has_infinity, holds, summed_in
from tests.lowering.on_mesh import tp


@pytest.mark.parametrize(
    ("dtype", "count", "sums"),
    [
        (np.bool_, 1, np.bool_),
        (jnp.int2, 2, np.int8),
        (jnp.int4, 4, np.int8),
        (jnp.uint4, 4, np.uint8),
        (np.int8, 8, np.int8),
        (np.int32, 32, np.int32),
        (jnp.float4_e2m1fn, 4, np.float32),
        (jnp.float8_e4m3fn, 8, np.float32),
        (jnp.float8_e5m2, 8, np.float32),
        (jnp.bfloat16, 16, np.float32),
        (np.float32, 32, np.float32),
        (np.float64, 64, np.float64),
        (np.complex64, 32, np.complex64),
    ],
)
def test_a_dtype_has_bits_and_one_that_its_sums_are_made_in(
    dtype: Any, count: int, sums: Any
) -> None:
    assert (bits(dtype), summed_in(dtype)) == (count, np.dtype(sums))


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        (jnp.int2, jnp.int4),
        (jnp.int4, np.int8),
        (jnp.uint4, np.uint8),
        (jnp.float4_e2m1fn, jnp.float8_e4m3fn),
        (jnp.float8_e4m3fn, jnp.bfloat16),
        (jnp.bfloat16, np.float32),
        (np.complex64, np.complex128),
    ],
)
def test_what_holds_more_holds_less(narrow: Any, wide: Any) -> None:
    assert holds(wide, narrow)
    assert not holds(narrow, wide)
    assert holds(narrow, narrow)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float16, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.float8_e5m2),
        # As many digits and less range, but smaller numbers.
        (jnp.float8_e4m3b11fnuz, jnp.float8_e4m3fn),
        (np.int8, np.uint8),
        (np.int8, np.float32),
        (np.complex64, np.float32),
    ],
)
def test_of_some_neither_holds_the_other(one: Any, other: Any) -> None:
    assert not holds(one, other)
    assert not holds(other, one)


def test_some_narrow_floats_have_no_infinity() -> None:
    assert has_infinity(jnp.float8_e5m2)
    assert not has_infinity(jnp.float8_e4m3fn)


# --- Dtypes of the user's ----------------------------------------------------------- #


class _Rules:
    """How JAX represents scales, and adds two of them: the larger one is kept."""

    allow_conversion = True

    @staticmethod
    def physical_element_aval(dtype: Any) -> ShapedArray:
        return ShapedArray((), dtype.of)

    @staticmethod
    def add(dtype: Any, x: Any, y: Any) -> Any:
        numbers = (lax.convert_element_type(each, dtype.of) for each in (x, y))
        return lax.convert_element_type(lax.max(*numbers), dtype)

    @staticmethod
    def zero(dtype: Any) -> Any:
        return lax.convert_element_type(np.array(-np.inf, dtype.of), dtype)

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        return dtype


_Extended: Any = type(jax.random.key(0).dtype).__base__


@dataclasses.dataclass(frozen=True)
class Scales(_Extended):
    of: np.dtype
    name: str = "scales"
    type: Any = jax.dtypes.extended
    _rules: Any = _Rules


SCALES = Scales(np.dtype(np.float32))


@jax.custom_vjp
def scaled(x: jax.Array, scales: jax.Array) -> jax.Array:
    del scales  # only the backward reads them
    return x


scaled.defvjp(
    lambda x, scales: (x, scales),
    lambda scales, ct: (
        ct,
        lax.convert_element_type(
            (lax.convert_element_type(scales, np.float32) + ct.max(0)) / 2, SCALES
        ),
    ),
)


@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")])
def test_a_dtype_of_the_users_need_not_say_its_size(spec: P) -> None:
    def function(x: jax.Array, scales: jax.Array) -> jax.Array:
        narrow = lax.convert_element_type(scales, SCALES)
        step = lambda x, _: (scaled(x, narrow) * 2, None)  # noqa: E731
        return lax.scan(step, x, None, length=3)[0].sum()

    fun = jax.grad(function, (0, 1))
    args = np.ones((8, 4), np.float32), np.arange(4, dtype=np.float32)
    given = jhost.jit(fun, **tp(4, (spec, P("tp")), P()))(*args)
    chex.assert_trees_all_equal(given, jax.jit(fun)(*args))
