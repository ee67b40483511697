"""What NumPy makes of JAX's primitives.

`MOVES` only move elements or write them in another type, so NumPy gives XLA's bits.
`EXACT` compute, and NumPy gives XLA's numbers for some types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Run: TypeAlias = Callable[..., Any]


# --- Primitives that move elements -------------------------------------------------- #


def _broadcast(
    x: np.ndarray,
    *,
    shape: Sequence[int],
    broadcast_dimensions: Sequence[int],
    **_: Any,
) -> Any:
    ones = [1] * len(shape)
    for size, dim in zip(x.shape, broadcast_dimensions, strict=True):
        ones[dim] = size
    return np.broadcast_to(x.reshape(ones), tuple(shape))


def _slice(
    x: np.ndarray,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> Any:
    steps = strides or [1] * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, steps))]


def _window(
    x: np.ndarray, sizes: Sequence[int], starts: Sequence[Any]
) -> tuple[slice, ...]:
    """Where a window is; XLA clamps its start so that it lies inside."""
    firsts = [
        min(max(int(start), 0), whole - size)
        for start, whole, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return tuple(slice(f, f + size) for f, size in zip(firsts, sizes, strict=True))


def _dynamic_slice(x: np.ndarray, *starts: Any, slice_sizes: Sequence[int]) -> Any:
    return x[_window(x, slice_sizes, starts)]


def _dynamic_update_slice(x: np.ndarray, update: np.ndarray, *starts: Any) -> Any:
    # A copy: interpreted values are shared by all statements that read them.
    out = x.copy()
    out[_window(x, update.shape, starts)] = update
    return out


def _iota(
    *, dtype: np.dtype, shape: Sequence[int], dimension: int, **_: Any
) -> np.ndarray:
    numbers = np.arange(shape[dimension]).astype(dtype)
    return _broadcast(numbers, shape=shape, broadcast_dimensions=(dimension,))


def _pad(
    x: np.ndarray, value: np.ndarray, *, padding_config: Sequence[tuple[int, int, int]]
) -> np.ndarray:
    """Elements of `x` at their places, but for those that negative padding cuts off."""
    sizes, places, kept = [], [], []
    for size, (low, high, between) in zip(x.shape, padding_config, strict=True):
        at = low + np.arange(size) * (between + 1)
        sizes.append(low + size + max(size - 1, 0) * between + high)
        inside = (at >= 0) & (at < sizes[-1])
        places.append(at[inside])
        kept.append(inside)
    out = np.full(sizes, value, x.dtype)
    out[np.ix_(*places)] = x[np.ix_(*kept)]
    return out


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    out = cases[0]
    for number, case in enumerate(cases[1:], 1):
        out = np.where(which == number, case, out)
    return out


def _split(x: np.ndarray, *, sizes: Sequence[int], axis: int) -> list[np.ndarray]:
    return np.split(x, np.cumsum(sizes)[:-1], axis)


def _reshape(
    x: np.ndarray,
    *,
    new_sizes: Sequence[int],
    dimensions: Sequence[int] | None,
    **_: Any,
) -> np.ndarray:
    order = range(x.ndim) if dimensions is None else dimensions
    return np.transpose(x, order).reshape(new_sizes)


MOVES: dict[str, Run] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "copy": lambda x: x,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "optimization_barrier": lambda *xs: [*xs],
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "squeeze": lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
}


# --- Primitives that compute -------------------------------------------------------- #


def _dot_general(
    x: np.ndarray, y: np.ndarray, *, dimension_numbers: Any, **_: Any
) -> np.ndarray:
    (contracted, others), batches = dimension_numbers[0], dimension_numbers[1]
    left = _rows(x, contracted, batches[0])
    right = _rows(y, others, batches[1])
    shared = [x.shape[dim] for dim in batches[0]]
    free = [
        value.shape[dim]
        for value, used in (
            (x, {*contracted, *batches[0]}),
            (y, {*others, *batches[1]}),
        )
        for dim in range(value.ndim)
        if dim not in used
    ]
    # JAX's order of dims in the result: batch, then the left's others, then the
    # right's.
    return (left @ right.swapaxes(-1, -2)).reshape([*shared, *free])


def _rows(x: np.ndarray, contracted: Sequence[int], batch: Sequence[int]) -> np.ndarray:
    """`x` with dims [*batch, free, contracted], the last two merged."""
    free = [dim for dim in range(x.ndim) if dim not in {*contracted, *batch}]
    sizes = [int(np.prod([x.shape[d] for d in dims])) for dims in (free, contracted)]
    ordered = x.transpose([*batch, *free, *contracted])
    return ordered.reshape([*(x.shape[dim] for dim in batch), *sizes])


def _elementwise(function: Run) -> Run:
    return lambda *xs, **_: function(*xs)


def converts(given: np.dtype, wanted: Any) -> bool:
    """Whether NumPy and XLA agree on each number of `given` in the type `wanted`.

    They do not on floats that no integer is near to, nor on values that are
    rounded to a narrow float.
    """
    if jnp.issubdtype(wanted, jax.dtypes.extended):
        return False
    # Not `ml_dtypes`' narrow integers, such as int4: for these `isbuiltin` is 2.
    of_integers = given.kind in "biu" and given.isbuiltin == 1
    wanted = np.dtype(wanted)
    if wanted.name in ("float32", "float64"):
        return of_integers or given.name in ("bfloat16", "float16", wanted.name)
    return of_integers and wanted.kind in "biu" and wanted.isbuiltin == 1


OF_INTEGERS = ("and", "clamp", "max", "min", "not", "or", "xor")
"""Primitives that NumPy runs on integers only.

For floats, NumPy and XLA differ in which of 0.0 and -0.0 is the larger, for example.
"""

EXACT: dict[str, Run] = {
    "add": _elementwise(np.add),
    "and": _elementwise(np.bitwise_and),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": lambda x, *, new_dtype, **_: x.astype(new_dtype),
    "dot_general": _dot_general,
    "eq": _elementwise(np.equal),
    "ge": _elementwise(np.greater_equal),
    "gt": _elementwise(np.greater),
    "le": _elementwise(np.less_equal),
    "lt": _elementwise(np.less),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "mul": _elementwise(np.multiply),
    "ne": _elementwise(np.not_equal),
    "neg": _elementwise(np.negative),
    "not": _elementwise(np.bitwise_not),
    "or": _elementwise(np.bitwise_or),
    # With `dtype`, or NumPy would add up narrow integers in 64 bits, which do not wrap.
    "reduce_sum": lambda x, *, axes, **_: x.sum(tuple(axes), dtype=x.dtype),
    "sub": _elementwise(np.subtract),
    "xor": _elementwise(np.bitwise_xor),
}
