"""How reducers combine two parts, and the neutral element of each reducer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

from jhost._dtypes import has_infinity

Reducer: TypeAlias = Literal["sum", "max", "min", "prod", "and", "or", "softmax"]
"""How parts of a reduced factor become one.

"softmax" combines all results of an equation at once, by the statistics among them.
"""

COMBINE: Mapping[Reducer, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "prod": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}
"""How reducers combine two values; "and" and "or" are bitwise on integers."""


def sum_of(dtype: np.dtype) -> Reducer:
    """The reducer of sums: "or" for booleans, as in JAX's products of booleans."""
    return "or" if dtype == np.bool_ else "sum"


def identity(reducer: Reducer, dtype: np.dtype) -> Any:
    """The scalar that changes no value that it is combined with.

    For sums it is -0.0: 0.0 would turn -0.0 into 0.0 (IEEE 754, section 6.3).
    """
    match reducer:
        case "sum" if jnp.issubdtype(dtype, jnp.complexfloating):
            value: Any = complex(-0.0, -0.0)
        case "sum" if jnp.issubdtype(dtype, jnp.floating):
            # float8_e8m0fnu, the dtype of block scales, has no 0.  Any scale will do
            # where the values of the block are 0.
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


def has_identity(reducer: Reducer, dtype: np.dtype) -> bool:
    """Whether `identity` changes no value at all.

    float8_e8m0fnu has no 0.  Of complex numbers, 1 times inf is inf + NaN i, and a
    maximum compares real parts first, so that NaN loses.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return reducer == "sum"
    return reducer != "sum" or dtype != jnp.float8_e8m0fnu


def from_zero(x: Any) -> Any:
    """`x` as a sum that begins with 0 gives it, so never -0.0.

    XLA (of JAX 0.10 to 0.12) simplifies a sum of one element, and x + 0, to x.  So the
    zero is selected.
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
