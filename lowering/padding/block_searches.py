"""Searches in blocks: the best of each block, and then the best of these.

A search of all elements gives the same, with ties and NaN, because blocks are in order
and are compared as elements are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost.lowering.padding.blocks import blocks_of
from jhost.lowering.rules.dim_rule import bind, shape_of
from jhost.lowering.rules.reducers import Reducer, identity

_Found: TypeAlias = tuple[Any, Any]

SEARCHES: Mapping[str, tuple[Callable[[Any, Any], Any], Reducer]] = {
    "argmax": (lax.gt, "max"),
    "argmin": (lax.lt, "min"),
}


def best_in_blocks(eqn: JaxprEqn, blocks: int) -> Callable[[Any], Any] | None:
    """Where the best element is: pairs of an element and its index are reduced.

    That is how JAX defines it (0.10 to 0.12).
    """
    (dim,), dtype = eqn.params["axes"], eqn.params["index_dtype"]
    better, reducer = SEARCHES[eqn.primitive.name]
    size = shape_of(eqn.invars[0])[dim]
    # Indices of padding would wrap round, and come first.
    if size + -size % blocks - 1 > jnp.iinfo(dtype).max:
        return None

    def best(found: _Found, other: _Found) -> _Found:
        (x, i), (y, j) = found, other
        wins = lax.bitwise_or(better(x, y), lax.ne(x, x))  # NaN is the best
        first = lax.bitwise_and(lax.eq(x, y), lax.lt(i, j))
        return lax.select(wins, x, y), lax.select(lax.bitwise_or(wins, first), i, j)

    def searched(x: Any) -> Any:
        worst = identity(reducer, x.dtype)
        # The index of nothing is 0: of elements that are all the worst the first is
        # found.
        start = worst, np.zeros((), dtype)
        x = blocks_of(x, dim, blocks, worst)
        index = lax.broadcasted_iota(dtype, (blocks * x.shape[dim + 1],), 0)
        index = lax.reshape(index, x.shape[dim : dim + 2])
        index = lax.broadcast_in_dim(index, x.shape, (dim, dim + 1))
        each = lax.reduce((x, index), start, best, (dim + 1,))
        return lax.reduce(each, start, best, (dim,))[1]

    return searched


def most_in_blocks(eqn: JaxprEqn, blocks: int) -> Callable[[Any], Any] | None:
    """The largest elements and where they are: of each block, and then of these.

    Equal ones come in the order of their indices, in each block as in all.
    """
    dim, k = eqn.params["axis"], eqn.params["k"]
    whole = shape_of(eqn.invars[0])[dim]
    size = whole // blocks
    most = min(k, size)
    # Taking so many of each block moves the whole anyway.  And padding would need
    # values behind all others, but in the order of `top_k` some NaN are last.
    if not most or whole % blocks or 4 * most > size:
        return None

    def searched(x: Any) -> list[Any]:
        x = blocks_of(x, dim, blocks, None)
        values, places = bind(eqn, [x], axis=dim + 1, k=most)
        block = lax.broadcasted_iota(places.dtype, places.shape, dim)
        places = lax.add(places, lax.mul(block, lax.full_like(block, size)))
        values, places = (lax.collapse(v, dim, dim + 2) for v in (values, places))
        values, found = bind(eqn, [values])
        return [values, _taken_along(places, found, dim)]

    return searched


def _taken_along(x: Any, places: Any, dim: int) -> Any:
    """Elements at `places` of a dim, which differ by the others."""
    others = tuple(d for d in range(x.ndim) if d != dim)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(dim,),
        start_index_map=(dim,),
        operand_batching_dims=others,
        start_indices_batching_dims=others,
    )
    indices = lax.broadcast_in_dim(places, (*places.shape, 1), range(places.ndim))
    return lax.gather(x, indices, numbers, (1,) * x.ndim, mode="promise_in_bounds")
