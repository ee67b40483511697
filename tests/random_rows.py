"""Steps of random programs that look rows up and update them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

_MODES = st.sampled_from(["clip", "fill", "promise_in_bounds"])
_UPDATES = st.sampled_from(["add", "subtract", "multiply", "max", "min"])
_SHAPES = st.sampled_from([(), (1,), (4,), (8,), (2, 2), (4, 2), (0,), (3,)])


def _numbers(draw: Any, size: int, mode: str, shape: Sequence[int]) -> np.ndarray:
    """Indices; out of bounds, on both sides, where that has a meaning."""
    beyond = 0 if mode == "promise_in_bounds" else 3
    number = st.integers(-size - beyond, size - 1 + beyond)
    count = math.prod(shape)
    given = draw(st.lists(number, min_size=count, max_size=count))
    dtype = draw(st.sampled_from([np.int32, np.int8]))
    return np.array(given, dtype).reshape(shape)


def _index(draw: Any, shape: tuple[int, ...], dim: int, mode: str) -> tuple[Any, ...]:
    """Along one dim, or along two with the one before."""
    index = _numbers(draw, shape[dim], mode, draw(_SHAPES))
    first = (slice(None),) * dim
    if dim == 0 or not draw(st.booleans()):
        return (*first, index)
    return (*first[1:], _numbers(draw, shape[dim - 1], mode, index.shape), index)


def _text(index: tuple[Any, ...]) -> str:
    return ", ".join(":" if isinstance(i, slice) else str(i.tolist()) for i in index)


def _gather(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    mode = draw(_MODES)
    index = _index(draw, shape, dim, mode)
    return (
        f", {_text(index)}, {mode}",
        lambda x: x.at[index].get(mode=mode, fill_value=-1),
    )


def _take_along_axis(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Each row has indices of its own, which come from the value."""
    mode = draw(st.sampled_from(["clip", "fill"]))

    def function(x: Any) -> Any:
        index = jnp.nan_to_num(x).astype(np.int32)
        return jnp.take_along_axis(x, index, axis=dim, mode=mode, fill_value=-1)

    return f", {dim}, {mode}", function


def _scatter(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Updates made of the value that they change."""
    name, mode = draw(_UPDATES), draw(_MODES)
    index = _index(draw, shape, dim, mode)

    def function(x: Any) -> Any:
        new = x.at[index].get(mode="clip") + np.array(1, x.dtype)
        return getattr(x.at[index], name)(new, mode=mode)

    return f", {name}, {_text(index)}, {mode}", function


def _segments(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    """The value is the updates, as a cotangent is a table's."""
    name, mode, size = draw(_UPDATES), draw(_MODES), draw(st.sampled_from([4, 8, 3]))
    index = _numbers(draw, size, mode, (shape[dim],))

    def function(x: Any) -> Any:
        x = jnp.moveaxis(x, dim, 0)
        table = jnp.ones((size, *x.shape[1:]), x.dtype)
        return getattr(table.at[index], name)(x, mode=mode)

    return f", {name}, {dim}, {_text((index,))} of {size}, {mode}", function


LOOKUPS: Mapping[str, Callable[[Any, tuple[int, ...], int], Any]] = {
    "gather": _gather,
    "take_along_axis": _take_along_axis,
}
UPDATES: Mapping[str, Callable[[Any, tuple[int, ...], int], Any]] = {
    "scatter": _scatter,
    "segments": _segments,
}
