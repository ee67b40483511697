"""Rows in another order, whose cotangents are rows in the order before.

JAX's lookup has sums as its transpose, and does not know that each row is taken once.
XLA's kernel for these is slower than one that looks up, and nothing is fused with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jhost._jax import def_jvp, def_transpose, define_primitive


def permuted(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """The rows `[m, d]` in an order of theirs, `[m]`, that `inverse` undoes."""
    (made,) = permute_rows_p.bind(rows, order, inverse)
    return made


def inverse_of(order: jax.Array) -> jax.Array:
    """The order that undoes an order."""
    places = jnp.arange(len(order), dtype=order.dtype)
    return places.at[order].set(places, unique_indices=True, mode="promise_in_bounds")


def _taken(rows: jax.Array, order: jax.Array, inverse: jax.Array) -> list[jax.Array]:
    def take(rows: jax.Array, order: jax.Array) -> jax.Array:
        # Each row is taken once, and is there: XLA has nothing to clip or to fill.
        return rows.at[order].get(unique_indices=True, mode="promise_in_bounds")

    for _ in range(order.ndim - 1):
        take = jax.vmap(take)
    return [take(rows, order)]


permute_rows_p = define_primitive("permute_rows", _taken)
"""Rows `[..., m, d]` by an order and its inverse, `[..., m]`."""


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any | None]
) -> tuple[list[Any], list[Any]]:
    made = permute_rows_p.bind(tangents[0], *primals[1:])
    return permute_rows_p.bind(*primals), made


def _transpose(
    cotangents: Sequence[Any | None], rows: None, order: Any, inverse: Any
) -> list[Any]:
    # A lookup as well, where the transpose of JAX would be a scatter that adds.
    return permute_rows_p.bind(cotangents[0], inverse, order)


def_jvp(permute_rows_p, _jvp)
def_transpose(permute_rows_p, _transpose)
