"""A dim as blocks of one size."""

from __future__ import annotations

from typing import Any

from jax import lax

from jhost.lowering.rules.windows import padded


def blocks_of(x: Any, dim: int, blocks: int, fill: Any) -> Any:
    """`x` with `dim` as two: that many blocks, and the elements of each.

    Where they do not divide it, `fill` stands behind the last element.
    """
    more = -x.shape[dim] % blocks
    if more:
        x = padded(x, dim, fill, (0, more))
    shape = x.shape
    return lax.reshape(
        x, (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
    )
