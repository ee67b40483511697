"""What dtypes hold: range and precision, which their size in memory tells little about.

An int4 takes a byte, as an int8 does, and floats of 4, 6 and 8 bits take one as well.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes


def bits(dtype: Any) -> int:
    """The bits of a number; of a complex one, the bits of each part."""
    if dtype == np.bool_:  # `jnp.iinfo` refuses it
        return 1
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    return (jnp.iinfo if is_integer else jnp.finfo)(dtype).bits


def holds(wide: Any, narrow: Any) -> bool:
    """Whether each number of the dtype `narrow` is one of `wide`, of the same kind."""
    if wide == narrow:
        return True
    for kind in (jnp.signedinteger, jnp.unsignedinteger):
        if _both(kind, wide, narrow):
            return bits(wide) >= bits(narrow)
    kinds = (jnp.floating, jnp.complexfloating)
    return any(_both(kind, wide, narrow) for kind in kinds) and _is_finer(wide, narrow)


def summed_in(dtype: Any) -> np.dtype:
    """The dtype in which sums are made: float32, int8 or uint8 for what that holds.

    XLA:CPU (of JAX 0.10 to 0.12) does not wrap sums of int4 round where it adds them up
    itself, and NCCL knows no integers below 8 bits.
    """
    if jnp.issubdtype(dtype, dtypes.extended):
        return dtype  # keys, which nobody adds up
    widest = (np.dtype(each) for each in (np.float32, np.int8, np.uint8))
    return next((each for each in widest if holds(each, dtype)), np.dtype(dtype))


def has_infinity(dtype: Any) -> bool:
    """Whether floats of a dtype can be infinite: some narrow ones cannot."""
    return bool(np.isinf(np.asarray(np.inf).astype(dtype)))


def _both(kind: Any, *dtypes: Any) -> bool:
    return all(jnp.issubdtype(dtype, kind) for dtype in dtypes)


def _is_finer(wide: Any, narrow: Any) -> bool:
    """Whether floats have as many digits, as large numbers and as small ones."""
    one, other = jnp.finfo(wide), jnp.finfo(narrow)
    finer = one.nmant >= other.nmant
    farther = float(one.max) >= float(other.max)
    # Subnormals count: without them the cast of a small number gives 0.
    smaller = float(one.smallest_subnormal) <= float(other.smallest_subnormal)
    return finer and farther and smaller
