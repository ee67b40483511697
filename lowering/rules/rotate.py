"""The dim rule of a rotation: `jnp.roll` by a static number.

JAX writes it as a concatenation of two slices, and neither slice has equal parts.
`frontend/shifts.py` makes one equation of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import define_primitive
from jhost.lowering.rules.dim_rule import DimRule, shape_of
from jhost.lowering.rules.joining import joining
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.registry import rule


def _rotated(x: jax.Array, *, dim: int, start: int) -> list[jax.Array]:
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
"""The elements of `dim` from `start` on, then those before it."""

plus_zero_p = define_primitive("plus_zero", _with_0_added)
"""Its operand with 0.0 added to each element, which turns -0.0 into 0.0."""


@rule("rotate")
def rotate(eqn: JaxprEqn) -> DimRule:
    """A dim is read from `start` on, and again for the elements before it."""
    dim, start = eqn.params["dim"], eqn.params["start"]
    size = shape_of(eqn.invars[0])[dim]
    seam = size - start
    reads = (
        WindowReads(size=size, first=start, steps=(0, seam)),
        WindowReads(size=size, first=-seam, steps=(seam, size)),
    )
    return joining(eqn, dim, [(0, each) for each in reads])
