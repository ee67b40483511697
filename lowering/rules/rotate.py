"""The dim rule of a rotation: `jnp.roll` by a static number.

JAX writes it as a concatenation of two slices, and neither slice has equal parts.
`frontend/shifts.py` makes one equation of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import define_primitive
from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    JoinedReads,
    Shard,
    bind,
    rule,
    shape_of,
)
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.windows import window_of


def _rotated(x: jax.Array, _: jax.Array, *, dim: int, start: int) -> list[jax.Array]:
    size = x.shape[dim]
    first = lax.slice_in_dim(x, start, size, axis=dim)
    return [lax.concatenate([first, lax.slice_in_dim(x, 0, start, axis=dim)], dim)]


def _with_0_added(x: jax.Array) -> list[jax.Array]:
    """The sum `x + 0`, which XLA (jaxlib 0.10 to 0.12) would take for `x`."""
    if jnp.iscomplexobj(x):
        (real,), (imag,) = _with_0_added(lax.real(x)), _with_0_added(lax.imag(x))
        return [lax.complex(real, imag)]
    zeros = lax.full_like(x, 0)
    return [lax.select(lax.eq(x, zeros), zeros, x)]


rotate_p = define_primitive("rotate", _rotated)
"""The elements of `dim` from `start` on, then those before it.

It takes the array twice, because a dim can be read in one kind of window only: once
for the first elements of the result, once for those that come round.
"""

plus_zero_p = define_primitive("plus_zero", _with_0_added)
"""Its operand with 0.0 added to each element, which turns -0.0 into 0.0."""


@rule("rotate")
def rotate(eqn: JaxprEqn) -> DimRule:
    """One operand is read from `start` on, the other for the elements before it."""
    shape, dim, start = shape_of(eqn.invars[0]), eqn.params["dim"], eqn.params["start"]
    size = shape[dim]
    factors = Factors()
    dims = factors.dims(shape)
    seam = size - start
    reads = (
        WindowReads(size=size, first=start, steps=(0, seam)),
        WindowReads(size=size, first=-seam, steps=(seam, size)),
    )

    def read(mapped: FactorDim | None, reads: WindowReads) -> FactorDim:
        assert mapped is not None
        return dataclasses.replace(mapped, reads=reads)

    windows = [read(dims[dim], each) for each in reads]
    operands: list[Dims] = [(*dims[:dim], w, *dims[dim + 1 :]) for w in windows]
    made = factors.rule(operands, [dims])
    factor = windows[0].factor

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        if shard.parts(factor) == 1 and shard.size(factor) == size:
            x = lax.slice_in_dim(args[0], 0, size, axis=dim)
            return bind(eqn, [x, x])
        first, rest = (
            window_of(x, dim, mapped, shard)
            for x, mapped in zip(args, windows, strict=True)
        )
        places = shard.positions(factor)
        places = lax.broadcast_in_dim(places, first.shape, (dim,))
        return [lax.select(lax.lt(places, lax.full_like(places, seam)), first, rest)]

    joined = JoinedReads(dim=dim, factor=factor, reads=reads)
    return dataclasses.replace(
        made, rebind=rebind, counted=made.windowed, joined=joined
    )
