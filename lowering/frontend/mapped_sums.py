"""Sums over a vmapped axis, as sums over a dim.

Under `jax.vmap(..., axis_name=)` JAX keeps `lax.psum` as it is, and writes the number
of the mapped dim in place of the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import Array, lax
from jax.extend.core import JaxprEqn

_REDUCTIONS: Mapping[str, Callable[..., Array]] = {
    "psum": lax.reduce_sum,
    "pmax": lax.reduce_max,
    "pmin": lax.reduce_min,
}


def reduces_dims(eqn: JaxprEqn) -> bool:
    """Whether it is a `lax.psum`, `pmax` or `pmin` over dims, and over no mesh axis."""
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    axes = eqn.params["axes"]
    return bool(axes) and all(isinstance(axis, int) for axis in axes)


def reduction(eqn: JaxprEqn) -> Callable[[Sequence[Any]], list[Array]]:
    """The same over the dims of each operand."""
    reduce, axes = _REDUCTIONS[eqn.primitive.name], eqn.params["axes"]
    return lambda args: [reduce(x, axes) for x in args]
