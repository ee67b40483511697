"""The products on NVIDIA GPUs, where XLA multiplies all rows by all groups' matrices.

A tile has rows of one group; those behind all groups are filled with 0, and not
multiplied.  Three stages of tiles take 96 KiB, and GPUs from Ampere on have 99 KiB of
shared memory at least.  Triton is the backend of Pallas that compiles for all of these.
JAX 0.12 says that it will go; XLA is about to have kernels of its own, which will then
do in place of these: https://github.com/openxla/xla/issues/46127.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jhost._ragged.forms import Form
from jhost._ragged.operands import PRECISIONS

_ROWS = _COLUMNS = 128
_PARAMS = triton.CompilerParams(num_warps=4, num_stages=3)


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    form: Form,
    precision: Any,
    preferred_element_type: DTypeLike | None,
    interpret: bool = False,
) -> list[jax.Array]:
    """The one result, of what `can_multiply`."""
    how = _How(
        precision=PRECISIONS.get(precision, lax.Precision.DEFAULT),
        dtype=preferred_element_type or lhs.dtype,
        interpret=interpret,
    )

    def one(operands: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        if form == "groups":
            return _sums(*operands, how)
        return _rows(*operands, how, transposed=form == "rows_transposed")

    front = lhs.shape[:-2]
    if not front:
        return [one((lhs, rhs, sizes))]
    lhs, rhs, sizes = (x.reshape(-1, *x.shape[len(front) :]) for x in (lhs, rhs, sizes))
    made = lax.map(one, (lhs, rhs, sizes))
    return [made.reshape(*front, *made.shape[1:])]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """What all kernels are told."""

    precision: lax.Precision
    dtype: DTypeLike
    interpret: bool

    def launch(
        self,
        kernel: Callable[..., None],
        name: str,
        grid: tuple[int, ...],
        shape: tuple[int, ...],
        *operands: jax.Array,
    ) -> jax.Array:
        """What the programs of a grid write; the first number varies fastest."""
        call = pl.pallas_call(
            functools.partial(kernel, precision=self.precision),
            grid=grid,
            out_shape=jax.ShapeDtypeStruct(shape, self.dtype),
            compiler_params=_PARAMS,
            interpret=self.interpret,
            name=name,
        )
        return call(*operands)


def _spans(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Where each group begins and ends among so many rows, int32."""
    ends = jnp.minimum(jnp.cumsum(sizes, dtype=np.int32), rows)
    return jnp.append(0, ends[:-1]), ends


# --- Rows -------------------------------------------------------------------------- #


def _rows(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    how: _How,
    *,
    transposed: bool,
) -> jax.Array:
    tiles = _tiles(sizes, len(lhs))
    columns = rhs.shape[1 if transposed else 2]
    kernel = functools.partial(_rows_kernel, transposed=transposed)
    grid = pl.cdiv(columns, _COLUMNS), tiles.shape[1]
    shape = len(lhs), columns
    return how.launch(kernel, "jhost_ragged_dot", grid, shape, tiles, lhs, rhs)


def _tiles(sizes: jax.Array, rows: int) -> jax.Array:
    """The group of each tile, the start of its rows, and the end of the group's rows.

    The shape is `[3, tiles]`.  Rows behind all groups are one more group, which has the
    tiles that are left over as well.
    """
    starts, ends = _spans(jnp.append(sizes.astype(np.int32), rows), rows)
    last = jnp.cumsum(-(-(ends - starts) // _ROWS))
    # Grids are static: each group may end with a tile that is not full.
    count = rows // _ROWS + len(ends)
    tile = jnp.arange(count, dtype=np.int32)
    group = jnp.sum(tile[:, None] >= last, 1, dtype=np.int32)
    before = jnp.append(0, last)[group]
    group = jnp.minimum(group, len(sizes))
    return jnp.stack([group, starts[group] + (tile - before) * _ROWS, ends[group]])


def _rows_kernel(
    tiles: Any, lhs: Any, rhs: Any, out: Any, *, transposed: bool, precision: Any
) -> None:
    group, start, end = (tiles[each, pl.program_id(1)] for each in range(3))
    columns, in_columns = _part(pl.program_id(0), _COLUMNS, out.shape[1])
    groups, depth = rhs.shape[0], _depth(lhs)

    @pl.when(start < end)
    def _() -> None:
        rows, in_rows = pl.ds(start, _ROWS), _inside(start, _ROWS, end)
        # Rows behind all groups have no matrix, and take no step of the loop below.
        matrix = jnp.minimum(group, groups - 1)

        def add(step: Any, total: Any) -> Any:
            inner, in_inner = _part(step, depth, lhs.shape[1])
            x = _load(lhs.at[rows, inner], in_rows, in_inner)
            if transposed:
                y = _load(rhs.at[matrix, columns, inner], in_columns, in_inner)
            else:
                y = _load(rhs.at[matrix, inner, columns], in_inner, in_columns)
            return total + _dot(x, y, 1, 1 if transposed else 0, precision)

        # Rows behind all groups are 0.
        steps = jnp.where(group < groups, np.int32(pl.cdiv(lhs.shape[1], depth)), 0)
        nothing = jnp.zeros((_ROWS, _COLUMNS), np.float32)
        total = lax.fori_loop(0, steps, add, nothing)
        _store(out.at[rows, columns], total, in_rows, in_columns)


# --- Sums over groups -------------------------------------------------------------- #


def _sums(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, how: _How) -> jax.Array:
    spans = jnp.stack(_spans(sizes, len(lhs)))
    shape = len(sizes), lhs.shape[1], rhs.shape[1]
    grid = pl.cdiv(shape[1], _ROWS), pl.cdiv(shape[2], _COLUMNS), len(sizes)
    return how.launch(_sums_kernel, "jhost_ragged_sum", grid, shape, spans, lhs, rhs)


def _sums_kernel(spans: Any, lhs: Any, rhs: Any, out: Any, *, precision: Any) -> None:
    group = pl.program_id(2)
    start, end = spans[0, group], spans[1, group]
    left, in_left = _part(pl.program_id(0), _ROWS, lhs.shape[1])
    right, in_right = _part(pl.program_id(1), _COLUMNS, rhs.shape[1])
    depth = _depth(lhs) // 2

    def add(step: Any, total: Any) -> Any:
        first = start + step * depth
        rows, in_rows = pl.ds(first, depth), _inside(first, depth, end)
        x = _load(lhs.at[rows, left], in_rows, in_left)
        y = _load(rhs.at[rows, right], in_rows, in_right)
        return total + _dot(x, y, 0, 0, precision)

    nothing = jnp.zeros((_ROWS, _COLUMNS), np.float32)
    steps = lax.div(end - start + np.int32(depth - 1), np.int32(depth))
    total = lax.fori_loop(0, steps, add, nothing)
    _store(out.at[group, left, right], total, in_left, in_right)


# --- Parts of arrays --------------------------------------------------------------- #


def _depth(x: Any) -> int:
    """How many elements are contracted at a time."""
    # So a tile of either operand has 16 KiB, and three stages of both have 96.
    return 128 // x.dtype.itemsize


def _part(number: Any, size: int, whole: int) -> tuple[Any, Any | None]:
    """That part of a dim, and which of its elements there are: None for all."""
    start = number * size
    inside = _inside(start, size, whole) if whole % size else None
    return pl.ds(start, size), inside


def _inside(start: Any, size: int, end: Any) -> Any:
    return start + jnp.arange(size, dtype=np.int32) < end


def _mask(rows: Any | None, columns: Any | None) -> Any | None:
    sides = [
        None if rows is None else rows[:, None],
        None if columns is None else columns[None, :],
    ]
    given = [side for side in sides if side is not None]
    return functools.reduce(jnp.logical_and, given) if given else None


def _load(ref: Any, rows: Any | None, columns: Any | None) -> Any:
    mask = _mask(rows, columns)
    if mask is None:
        return triton.load(ref)
    return triton.load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=0)


def _store(ref: Any, x: Any, rows: Any | None, columns: Any | None) -> None:
    mask = _mask(rows, columns)
    if mask is not None:
        mask = jnp.broadcast_to(mask, x.shape)
    triton.store(ref, x.astype(ref.dtype), mask=mask)


def _dot(x: Any, y: Any, of_x: int, of_y: int, precision: Any) -> Any:
    return lax.dot_general(
        x,
        y,
        (((of_x,), (of_y,)), ((), ())),
        precision=precision,
        # Sums are float32, as those of XLA are.
        preferred_element_type=np.float32,
    )
