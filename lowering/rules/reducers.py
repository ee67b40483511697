"""How parts of what is reduced become one, and what changes nothing there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax

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


def identity(reducer: Reducer, dtype: np.dtype) -> Any:
    """The scalar that changes nothing where it is combined with another."""
    match reducer:
        case "sum" | "or":
            value: Any = 0
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


def _least(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min
    # Some narrow floats have no infinity.
    return -np.inf if _has_infinity(dtype) else jnp.finfo(dtype).min


def _most(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max
    return np.inf if _has_infinity(dtype) else jnp.finfo(dtype).max


def _has_infinity(dtype: np.dtype) -> bool:
    return bool(np.isinf(np.asarray(np.inf).astype(dtype)))
