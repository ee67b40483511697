"""Calls that JAX keeps closed until it lowers them, such as `jnp.searchsorted`.

JAX 0.12 traces this function and `jnp.nonzero` as one equation each, so
`jnp.histogram`, `jnp.digitize` and `jnp.interp` have one too.  Its transforms come
first here as well, so then the call may become the equations that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jhost._jax import is_array


def has_expansion(eqn: JaxprEqn) -> bool:
    """Whether it is such a call, of arrays alone and without effects."""
    if eqn.primitive.name != "call_hi_primitive" or eqn.effects:
        return False
    return all(map(is_array, (*eqn.invars, *eqn.outvars)))


def expansion(eqn: JaxprEqn) -> Callable[[Sequence[Any]], list[Any]]:
    """The function that JAX lowers instead of the call."""
    primitive: Any = eqn.primitive
    return lambda args: primitive.to_lojax(*args, **eqn.params)
