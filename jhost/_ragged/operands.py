"""The operands that kernels take, in a file that does not import Pallas."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jhost._ragged.forms import Form

_DTYPES = {np.dtype(x) for x in (jnp.bfloat16, jnp.float16, np.float32)}
PRECISIONS = {
    given: precision
    for precision in (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
    for given in (precision.name.lower(), precision, (precision, precision))
}
"""Those in which Triton multiplies float32 as XLA does; narrower ones need none."""


def can_multiply(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    *,
    form: Form,
    precision: Any,
    preferred_element_type: DTypeLike | None,
) -> bool:
    """Whether there is a kernel for operands of these types."""
    dtypes = {lhs.dtype, np.dtype(preferred_element_type or lhs.dtype)}
    precise = lhs.dtype != np.float32 or precision in PRECISIONS
    # A kernel has a tile at least.
    sized = min(*lhs.shape, *rhs.shape, *sizes.shape) > 0
    return dtypes <= _DTYPES and precise and sized
