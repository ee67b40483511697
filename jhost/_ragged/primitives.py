"""The product of rows in groups as a primitive, which is linear in both operands."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jhost._jax import Kernels, def_jvp, def_transpose, define_primitive
from jhost._ragged.forms import Form, product
from jhost._ragged.operands import can_multiply


def _multiply(*operands: jax.Array, **params: Any) -> list[jax.Array]:
    # Here: Pallas takes 0.2 s to import, and only a program for GPUs needs it.
    from jhost._ragged.kernels import multiply

    return multiply(*operands, **params)


ragged_dot_p = define_primitive(
    "ragged_dot", product, kernels=Kernels(_multiply, can_multiply)
)
"""`form`, and `precision` and `preferred_element_type` as in `jax.lax.ragged_dot`.

Both operands are of one dtype.
"""


def multiplied(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    form: Form,
    precision: Any,
    preferred_element_type: DTypeLike | None = None,
) -> list[Any]:
    """The one result, in the dtype to which the operands' promote if no other is said.

    One of them may be a cotangent, and wider.
    """
    # A user may have set "strict", which mixes no dtypes.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
    return ragged_dot_p.bind(
        lhs.astype(dtype),
        rhs.astype(dtype),
        sizes,
        form=form,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any | None], **params: Any
) -> tuple[list[Any], list[Any]]:
    lhs, rhs, sizes = primals
    of_lhs, of_rhs, _ = tangents
    pairs = [] if of_lhs is None else [(of_lhs, rhs)]
    pairs += [] if of_rhs is None else [(lhs, of_rhs)]
    parts = [ragged_dot_p.bind(*pair, sizes, **params)[0] for pair in pairs]
    return ragged_dot_p.bind(*primals, **params), [functools.reduce(lax.add, parts)]


def _transpose(
    cotangents: Sequence[Any | None],
    lhs: Any | None,
    rhs: Any | None,
    sizes: Any,
    *,
    form: Form,
    precision: Any,
    preferred_element_type: Any,
) -> list[Any]:
    (cotangent,) = cotangents
    # Each form is linear in either operand, and each transpose is another form.
    operands: tuple[Any, Any, Form]
    match form, lhs is None:
        case "rows", True:
            operands = cotangent, rhs, "rows_transposed"
        case "rows_transposed", True:
            operands = cotangent, rhs, "rows"
        case "groups", True:
            operands = rhs, cotangent, "rows_transposed"
        case "rows", _:
            operands = lhs, cotangent, "groups"
        case "rows_transposed", _:
            operands = cotangent, lhs, "groups"
        case _:
            operands = lhs, cotangent, "rows"
    left, right, wanted = operands
    return multiplied(left, right, sizes, wanted, precision)


def_jvp(ragged_dot_p, _jvp)
def_transpose(ragged_dot_p, _transpose)
