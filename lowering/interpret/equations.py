"""Equations that NumPy can run too: it compiles nothing, and is a second opinion.

JAX runs the equations whose results may differ between the two: narrow floats, whose
sums XLA makes in wider dtypes; maxima and minima of zeros; and functions that each of
them approximates in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of

Params: TypeAlias = Mapping[str, Any]
Run: TypeAlias = Callable[..., Any]


def by_numpy(eqn: JaxprEqn, args: Sequence[Any], params: Params) -> list[Any] | None:
    """The results of `eqn` for NumPy's `args`, or None where JAX has to run it."""
    # Under these settings JAX raises where a NaN appears, and NumPy does not.
    if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
        return None
    operands = _arrays(eqn, args)
    if operands is None:
        return None
    run = _MOVES.get(eqn.primitive.name)
    if run is None and _is_exact(eqn.primitive.name, operands, params):
        run = _EXACT.get(eqn.primitive.name)
    if run is None:
        return None
    with np.errstate(all="ignore"):  # XLA overflows in silence
        out = run(*operands, **params)
    return out if eqn.primitive.multiple_results else [np.asarray(out)]


def _arrays(eqn: JaxprEqn, args: Sequence[Any]) -> list[np.ndarray] | None:
    """The operands as NumPy arrays, or None; Python numbers get a variable's dtype."""
    if len(args) != len(eqn.invars) or not all(map(_is_known, args)):
        return None
    pairs = zip(eqn.invars, args, strict=True)
    return [np.asarray(x, getattr(x, "dtype", aval_of(v).dtype)) for v, x in pairs]


def _is_known(value: Any) -> bool:
    if isinstance(value, jax.Array):
        extended = jnp.issubdtype(value.dtype, jax.dtypes.extended)
        return not (isinstance(value, Tracer) or extended)
    return isinstance(value, np.ndarray | np.generic | bool | int | float)


def _is_exact(name: str, operands: Sequence[np.ndarray], params: Params) -> bool:
    """Whether NumPy gives XLA's numbers, up to the order of additions in a sum."""
    dtypes = {x.dtype for x in operands}
    wanted = params.get("preferred_element_type")
    if len(dtypes) != 1 or (wanted is not None and {np.dtype(wanted)} != dtypes):
        return False
    (dtype,) = dtypes
    if dtype.name in ("float32", "float64"):
        return name not in _OF_INTEGERS
    return dtype.isbuiltin == 1 and dtype.kind in "biu"


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
    out = x.copy()
    out[_window(x, update.shape, starts)] = update
    return out


_MOVES: dict[str, Run] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "copy": lambda x: x,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "optimization_barrier": lambda *xs: [*xs],
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "slice": _slice,
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
    return (left @ right.swapaxes(-1, -2)).reshape([*shared, *free])


def _rows(x: np.ndarray, contracted: Sequence[int], batch: Sequence[int]) -> np.ndarray:
    """`x` with dims [*batch, free, contracted], the last two merged."""
    free = [dim for dim in range(x.ndim) if dim not in {*contracted, *batch}]
    sizes = [int(np.prod([x.shape[d] for d in dims])) for dims in (free, contracted)]
    ordered = x.transpose([*batch, *free, *contracted])
    return ordered.reshape([*(x.shape[dim] for dim in batch), *sizes])


def _elementwise(function: Run) -> Run:
    return lambda *xs, **_: function(*xs)


_OF_INTEGERS = ("and", "max", "min", "not", "or", "xor")
"""Primitives that NumPy runs on integers only.

For floats, NumPy and XLA differ in which of 0.0 and -0.0 is the larger, for example.
"""

_EXACT: dict[str, Run] = {
    "add": _elementwise(np.add),
    "and": _elementwise(np.bitwise_and),
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
    "reduce_sum": lambda x, *, axes, **_: x.sum(tuple(axes), dtype=x.dtype),
    "sub": _elementwise(np.subtract),
    "xor": _elementwise(np.bitwise_xor),
}
