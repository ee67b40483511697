"""The three products of rows in groups; each has the others as derivatives.

As many rows as `sizes` says, `[g]`, are in each of g groups, one group behind another.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

Form: TypeAlias = Literal["rows", "rows_transposed", "groups"]
"""The operands and the result of a product, behind leading dims that all share:

- rows `[m, k]` with a matrix for each group, `[g, k, n]`, give rows, `[m, n]`;
- rows `[m, n]` with these matrices transposed give rows, `[m, k]`;
- rows `[m, k]` with rows `[m, n]`, summed over each group, give matrices, `[g, k, n]`.

Rows behind all groups give 0, and matrices of empty groups are 0.
"""


def numbers(form: Form, batch: int) -> lax.RaggedDotDimensionNumbers:
    """The form as `jax.lax.ragged_dot_general` takes it, with so many dims in front.

    It gives the groups in front of these.
    """
    front = tuple(range(batch))
    contracted = {
        "rows": (batch + 1, batch + 1),
        "rows_transposed": (batch + 1, batch + 2),
        "groups": (batch, batch),
    }
    of_lhs, of_rhs = contracted[form]
    return lax.RaggedDotDimensionNumbers(
        (((of_lhs,), (of_rhs,)), (front, front)),
        lhs_ragged_dimensions=(batch,),
        rhs_group_dimensions=() if form == "groups" else (batch,),
    )


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    form: Form,
    precision: Any,
    preferred_element_type: DTypeLike | None,
) -> list[jax.Array]:
    """The one result, by JAX."""
    batch = lhs.ndim - 2
    made = lax.ragged_dot_general(
        lhs,
        rhs,
        sizes,
        numbers(form, batch),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return [jnp.moveaxis(made, 0, batch) if form == "groups" else made]
