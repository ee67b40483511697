"""How far two results lie apart, and how far they may for their dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxprs_in_params

from jhost._dtypes import summed_in

TOLERANCES = {
    "float64": 1e-12,
    "float32": 1e-4,
    "bfloat16": 2e-2,
    "float16": 4e-3,
    "complex64": 1e-4,
    "complex128": 1e-12,
}
"""How far results may lie apart, as a part of the largest: chunks are summed in another
order, and accelerators may round float32 operands of a matmul to TensorFloat-32."""

_NARROW = 0.125
"""The tolerance of floats of eight bits and fewer, where a step may be an eighth."""


def tolerance(dtype: Any) -> float:
    """How far apart values may lie, as a part of the largest; integers: not at all."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return TOLERANCES.get(jnp.dtype(dtype).name, _NARROW)


@jax.jit
def _error(a: jax.Array, b: jax.Array) -> jax.Array:
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    # `jnp.max` refuses empty arrays.
    if not a.size:
        return jnp.zeros((), jnp.float32)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return jnp.mean((a != b).astype(jnp.float32))
    # The difference of two narrow floats may be none of theirs.
    a, b = (x.astype(summed_in(x.dtype)) for x in (a, b))
    # Equal elements have no distance, infinities and NaN among them.
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
    finite = jnp.where(jnp.isfinite(b), jnp.abs(b), jnp.zeros_like(jnp.abs(b)))
    largest = jnp.max(finite)
    distance = jnp.where(same, jnp.zeros_like(finite), jnp.abs(a - b))
    # Where all wanted values are 0, there is nothing to measure a distance by.
    return jnp.max(distance) / jnp.where(largest > 0, largest, jnp.ones_like(largest))


def relative_errors(given: Any, wanted: Any) -> list[float]:
    """For each array of two trees, the largest distance as a part of the largest value.

    For other dtypes than floats it is the part of the elements that differ.
    """
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True)
    return [_relative_error(a, b) for a, b in pairs]


def _relative_error(given: Any, wanted: Any) -> float:
    if wanted.dtype == jax.dtypes.float0:  # of no values, so there is no comparing
        return 0.0
    return float(np.asarray(_error(given, _beside(wanted, given))))


def _beside(value: Any, other: Any) -> Any:
    """`value` on the devices of `other`, if that has any."""
    there = getattr(other, "sharding", None)
    return value if there is None else jax.device_put(value, there)


def tolerances_of(jaxpr: Any) -> list[float]:
    """The tolerance of each result: that of the narrowest type which goes into it.

    A sum of bfloat16's is as exact as its result's type.  So is the result that it is
    compared with.
    """
    known: dict[Any, float] = {}

    def of(atom: Any) -> float:
        if isinstance(atom, Literal):
            # A constant is exact, and makes nothing less so.
            return 0.0
        return known.setdefault(atom, tolerance(atom.aval.dtype))

    inner = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in inner.eqns:
        loosest = max(
            (
                *(of(atom) for atom in eqn.invars),
                *(each for body in jaxprs_in_params(eqn.params) for each in _in(body)),
            ),
            default=0.0,
        )
        known |= {var: max(loosest, of(var)) for var in eqn.outvars}
    return [of(atom) for atom in inner.outvars]


def _in(jaxpr: Any) -> list[float]:
    """The tolerances of all results in a body and in its own bodies."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    own = [tolerance(var.aval.dtype) for eqn in inner.eqns for var in eqn.outvars]
    bodies = [b for eqn in inner.eqns for b in jaxprs_in_params(eqn.params)]
    return own + [each for body in bodies for each in _in(body)]


def beyond_tolerance(
    given: Any, wanted: Any, allowed: float | Sequence[float] | None = None
) -> list[str]:
    """A line for each array of two trees of equal types that lies too far apart.

    That is by a part of the largest value, `allowed` (of all, or of each) or what suits
    the dtype.
    """
    leaves = jax.tree.leaves(wanted)
    limits = allowed if isinstance(allowed, Sequence) else [allowed] * len(leaves)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(wanted)]
    rows = zip(
        paths,
        [
            tolerance(leaf.dtype) if limit is None else limit
            for leaf, limit in zip(leaves, limits, strict=True)
        ],
        relative_errors(given, wanted),
        strict=True,
    )
    return [
        f"{jax.tree_util.keystr(path) or 'the result'}: they differ by {error:.1e} of "
        f"the largest value; the tolerance is {limit:.0e}"
        for path, limit, error in rows
        if not error <= limit  # not so if it is NaN
    ]
