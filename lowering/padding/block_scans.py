"""Cumulative sums, products, maxima and minima in blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from jhost.lowering.padding.blocks import blocks_of
from jhost.lowering.rules.reducers import COMBINE, Reducer, from_zero, identity
from jhost.lowering.rules.windows import padded

SCANS: Mapping[str, tuple[Callable[..., Any], Reducer]] = {
    "cummax": (lax.cummax, "max"),
    "cummin": (lax.cummin, "min"),
    "cumprod": (lax.cumprod, "prod"),
    "cumsum": (lax.cumsum, "sum"),
}


def scan_in_blocks(eqn: JaxprEqn, blocks: int) -> Callable[[Any], Any]:
    """A scan of each block, and one of their totals."""
    dim, reverse = eqn.params["axis"], eqn.params["reverse"]
    scan, reducer = SCANS[eqn.primitive.name]

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
        # The totals of the blocks before each block; nothing before the first.
        before = padded(totals, dim, nothing, (-1, 1) if reverse else (1, -1))
        others = [d for d in range(x.ndim) if d != dim + 1]
        before = lax.broadcast_in_dim(before, x.shape, others)
        made = lax.collapse(COMBINE[reducer](before, inside), dim, dim + 2)
        if made.shape[dim] == whole:
            return made
        return lax.slice_in_dim(made, 0, whole, axis=dim)

    return scanned
