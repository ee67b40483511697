"""How parts of what is reduced become one, and what changes nothing there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from jhost._dtypes import has_infinity

Reducer: TypeAlias = Literal["sum", "max", "min", "prod", "and", "or", "softmax"]
"""How parts of a reduced factor become one; by "softmax", results together."""

COMBINE: Mapping[Reducer, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "prod": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}
"""How reducers combine two values each; and and or are bitwise on integers."""


def sum_of(dtype: np.dtype) -> Reducer:
    """What adds up: of booleans, as in JAX's products of them, whether any is true."""
    return "or" if dtype == np.bool_ else "sum"


def identity(reducer: Reducer, dtype: np.dtype) -> Any:
    """The scalar that changes nothing where it is combined with another.

    Of sums that is -0.0, as -0.0 + 0.0 is 0.0 (IEEE 754, section 6.3).
    """
    match reducer:
        case "sum" if jnp.issubdtype(dtype, jnp.complexfloating):
            value: Any = complex(-0.0, -0.0)
        case "sum" if jnp.issubdtype(dtype, jnp.floating):
            # A dtype of scales has no 0: these do not matter where values are 0.
            value = 1.0 if dtype == jnp.float8_e8m0fnu else -0.0
        case "sum" | "or":
            value = 0
        case "prod":
            value = 1
        case "and":
            value = -1 if jnp.issubdtype(dtype, jnp.signedinteger) else _most(dtype)
        case "max":
            value = _least(dtype)
        case "min":
            value = _most(dtype)
        case "softmax":
            raise AssertionError(
                "no scalar is neutral among results that belong together"
            )
    return np.asarray(value).astype(dtype)[()]


def from_zero(x: Any) -> Any:
    """`x` as a sum from 0 on gives it, which is never -0.0.

    XLA (of JAX 0.10 to 0.12) leaves the 0 away from sums of one element, and takes
    x + 0 for x; so it is selected.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(from_zero(lax.real(x)), from_zero(lax.imag(x)))
    # Integers have one zero.
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    zero = lax.full_like(x, 0)
    return lax.select(lax.eq(x, zero), zero, x)


def _least(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min
    # Some narrow floats have no infinity.
    return -np.inf if has_infinity(dtype) else jnp.finfo(dtype).min


def _most(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max
    return np.inf if has_infinity(dtype) else jnp.finfo(dtype).max
