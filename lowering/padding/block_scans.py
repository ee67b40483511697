"""Cumulative sums, products, maxima and minima in blocks, and sums of exponentials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost.lowering.padding.blocks import blocks_of
from jhost.lowering.rules.reducers import Reducer, from_zero, identity
from jhost.lowering.rules.windows import padded


def _log_add_exp(x: Any, y: Any) -> Any:
    """As in `jnp.logaddexp`, without its calls."""
    apart = lax.sub(x, y)
    more = lax.log1p(lax.exp(lax.neg(lax.abs(apart))))
    # Two infinities of one sign are NaN apart, and have their sum.
    is_nan = lax.ne(apart, apart)
    return lax.select(is_nan, lax.add(x, y), lax.add(lax.max(x, y), more))


SCANS: Mapping[str, tuple[Callable[..., Any], Callable[[Any, Any], Any], Reducer]] = {
    "cumlogsumexp": (lax.cumlogsumexp, _log_add_exp, "max"),
    "cummax": (lax.cummax, lax.max, "max"),
    "cummin": (lax.cummin, lax.min, "min"),
    "cumprod": (lax.cumprod, lax.mul, "prod"),
    "cumsum": (lax.cumsum, lax.add, "sum"),
}
"""Each with how two parts combine, and a reducer with the same neutral element."""


def scan_in_blocks(eqn: JaxprEqn, blocks: int) -> Callable[[Any], Any] | None:
    """A scan of each block, and one of their totals."""
    (x,) = eqn.invars
    # Of complex numbers there is no least one to begin with.
    if eqn.primitive.name == "cumlogsumexp" and jnp.iscomplexobj(x.aval):
        return None
    dim, reverse = eqn.params["axis"], eqn.params["reverse"]
    scan, combine, reducer = SCANS[eqn.primitive.name]

    def scanned(x: Any) -> Any:
        whole, nothing = x.shape[dim], identity(reducer, x.dtype)
        x = blocks_of(x, dim, blocks, nothing)
        inside = scan(x, axis=dim + 1, reverse=reverse)
        # XLA takes an element for its own sum.  The first of the whole is added to 0.
        if reducer == "sum" and x.shape[dim + 1] == 1:
            inside = from_zero(inside)
        last = 0 if reverse else x.shape[dim + 1] - 1
        # The last partial result of a block is its total, so no second pass adds it up.
        totals = lax.index_in_dim(inside, last, dim + 1, keepdims=False)
        totals = scan(totals, axis=dim, reverse=reverse)
        # The totals of the blocks before each block.
        before = padded(totals, dim, nothing, (-1, 1) if reverse else (1, -1))
        others = [d for d in range(x.ndim) if d != dim + 1]
        before = lax.broadcast_in_dim(before, x.shape, others)
        # There is none before the first.  A neutral element is not nothing: complex 1
        # times an infinity is NaN.
        number = lax.broadcasted_iota(np.int32, x.shape, dim)
        first = lax.eq(number, lax.full_like(number, blocks - 1 if reverse else 0))
        made = lax.select(first, inside, combine(before, inside))
        made = lax.collapse(made, dim, dim + 2)
        if made.shape[dim] == whole:
            return made
        return lax.slice_in_dim(made, 0, whole, axis=dim)

    return scanned
