"""What dtypes hold, whatever their size in memory."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jhost._dtypes import bits, has_infinity, holds, summed_in


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
