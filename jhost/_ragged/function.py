"""`jhost.ragged_dot`: what it takes, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jhost import errors
from jhost._jax import varying_alike
from jhost._ragged.primitives import multiplied

_DIMS = {"lhs": "mk", "rhs": "gkn", "group_sizes": "g"}
"""The letters of each array's dims."""


def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Computes `jax.lax.ragged_dot`, and multiplies each row once on GPUs, too.

    Each row is multiplied by the matrix of its group: the first `group_sizes[0]` rows
    by `rhs[0]`, the next `group_sizes[1]` rows by `rhs[1]`, and so on.  Rows behind all
    groups give 0.

    XLA has no kernel for this on GPUs (JAX 0.10 to 0.12): it multiplies all rows by the
    matrices of all groups.  This function is a kernel on NVIDIA GPUs from Ampere on,
    for bfloat16 and float16, and for float32 with the precision "default" or "highest".
    Otherwise it is JAX's function.  A kernel works on one device.  So it is used in
    jhost functions (also for `jax.lax.ragged_dot`), in a `jax.shard_map` over all mesh
    axes, and on one device.  Exported programs use JAX's function, and so do programs
    that are compiled ahead for other GPUs.

    It has derivatives of every order and mode.  `jax.vmap` maps matrices along with
    rows.

    Args:
        lhs: the rows, of shape `(m, k)` and any dtype.
        rhs: a matrix for each group, of shape `(g, k, n)` and any dtype.  Both operands
            are cast to their promoted dtype.
        group_sizes: integers of shape `(g,)`.
        precision: as in `jax.lax.dot_general`.
        preferred_element_type: the dtype of the result; by default the operands'
            promoted dtype.

    Returns:
        An array of shape `(m, n)` and dtype `preferred_element_type`, or of the
        operands' promoted dtype without it.

    Raises:
        OperandsError: shapes or dtypes do not fit together.

    Example:
        >>> import jax.numpy as jnp
        >>> import jhost
        >>> rows, experts = jnp.ones((6, 4)), jnp.ones((3, 4, 8))
        >>> jhost.ragged_dot(rows, experts, jnp.array([3, 0, 2]))[:, 0]
        Array([4., 4., 4., 4., 4., 0.], dtype=float32)
    """
    arrays = [jnp.asarray(x) for x in (lhs, rhs, group_sizes)]
    if offenders := [*_offenders(*arrays)]:
        raise errors.OperandsError(
            "jhost.ragged_dot got arrays that do not fit together.", offenders
        )
    # `jax.lax.ragged_dot` promotes as well; kernels have operands of one dtype.
    dtype = jnp.promote_types(arrays[0].dtype, arrays[1].dtype)
    arrays[:2] = (x.astype(dtype) for x in arrays[:2])
    if precision is None:
        precision = jax.config.jax_default_matmul_precision or "default"
    if preferred_element_type is not None:
        preferred_element_type = np.dtype(preferred_element_type)
    if isinstance(precision, list):
        # Params have to be hashable.
        precision = tuple(precision)
    lhs, rhs, sizes = varying_alike(arrays)
    (made,) = multiplied(lhs, rhs, sizes, "rows", precision, preferred_element_type)
    return made


def _offenders(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Iterator[str]:
    for (name, dims), x in zip(_DIMS.items(), (lhs, rhs, sizes), strict=True):
        if x.ndim != len(dims):
            yield f"{name} has shape {x.shape}, but needs the dims {', '.join(dims)}"
    if not jnp.issubdtype(sizes.dtype, np.integer):
        yield f"group_sizes is {sizes.dtype}, but rows are counted by integers"
    # Sizes are only compared where all arrays have the dims that are named.
    if (lhs.ndim, rhs.ndim, sizes.ndim) != (2, 3, 1):
        return
    if lhs.shape[1] != rhs.shape[1]:
        yield (
            f"rows of lhs have {lhs.shape[1]} elements, but matrices of rhs take "
            f"{rhs.shape[1]}: shapes {lhs.shape} and {rhs.shape}"
        )
    if len(sizes) != len(rhs):
        yield f"rhs has {len(rhs)} groups, but group_sizes has {len(sizes)}"
