"""Dim rules of primitives that work along some dims and repeat over the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn

from jhost.lowering.rules.building import along, leading
from jhost.lowering.rules.dim_rule import DimRule, Shard, bind, shape_of
from jhost.lowering.rules.registry import rule

# --- Along one dim or a few --------------------------------------------------- #


@rule("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "top_k")
def along_axis(eqn: JaxprEqn) -> DimRule:
    """The dim that is scanned, or searched, stays whole."""
    # A scan over parts would need each part's total before the next part can start.
    return along(eqn, (eqn.params["axis"],))


@rule("argmax", "argmin", "reduce_xor")
def along_axes(eqn: JaxprEqn) -> DimRule:
    """Reductions whose parts do not combine with any of the reducers."""
    # Parts of an argmax combine by values that the result no longer has, and no
    # collective of XLA's reduces by xor.
    return along(eqn, eqn.params["axes"])


@rule("reduce")
def reduce(eqn: JaxprEqn) -> DimRule:
    """A reduction by a function of the user's; the initial values are scalars."""
    # No collective takes a function to reduce by.
    return along(eqn, eqn.params["dimensions"])


@rule("sort")
def sort(eqn: JaxprEqn) -> DimRule:
    """The sorted dim stays whole, in the keys and in the values sorted with them."""
    return along(eqn, (eqn.params["dimension"],))


@rule("approx_top_k")
def approx_top_k(eqn: JaxprEqn) -> DimRule:
    """The searched dim stays whole."""
    rank = len(shape_of(eqn.invars[0]))
    # JAX's default is -1, which it leaves in the parameters (0.10 to 0.12).
    return along(eqn, (eqn.params["reduction_dimension"] % rank,))


# --- Over leading dims -------------------------------------------------------- #


@rule("fft")
def fft(eqn: JaxprEqn) -> DimRule:
    """The last dims are transformed."""
    rank = len(shape_of(eqn.invars[0]))
    made = leading(eqn, rank - len(eqn.params["fft_lengths"]))
    return dataclasses.replace(made, rebind=_rebind_fft)


def _rebind_fft(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
    """Transforms, and leaves the result in row-major order.

    A collective that follows, along another dim than the first, makes XLA:CPU (of JAX
    0.10 to 0.12) choose another order, which its own transform refuses when it runs.
    """
    del shard
    rows = Layout(tuple(range(len(shape_of(eqn.invars[0])))))
    return [with_layout_constraint(out, rows) for out in bind(eqn, args)]


@rule(
    "cholesky",
    "cholesky_update",
    "eig",
    "eigh",
    "geqp3",
    "geqrf",
    "hessenberg",
    "householder_product",
    "lu",
    "ormqr",
    "qr",
    "schur",
    "svd",
    "symmetric_product",
    "triangular_solve",
    "tridiagonal",
)
def matrices(eqn: JaxprEqn) -> DimRule:
    """Linear algebra: the first operand is a batch of matrices."""
    return leading(eqn, len(shape_of(eqn.invars[0])) - 2)


@rule("lu_pivots_to_permutation", "tridiagonal_solve")
def vectors(eqn: JaxprEqn) -> DimRule:
    """Linear algebra: the first operand is a batch of vectors."""
    return leading(eqn, len(shape_of(eqn.invars[0])) - 1)


@rule("bitcast_convert_type", "random_unwrap", "random_wrap")
def reinterpret(eqn: JaxprEqn) -> DimRule:
    """The dims that both sides have are factors; one element may become a last dim."""
    (operand,), (result,) = eqn.invars, eqn.outvars
    return leading(eqn, min(len(shape_of(operand)), len(shape_of(result))))
