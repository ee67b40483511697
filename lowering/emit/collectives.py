"""Communications as `lax` collectives inside `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jhost._dtypes import bits, summed_in
from jhost.lowering.emit.groups import over
from jhost.lowering.ir.axis_parts import beside, given_axes
from jhost.lowering.ir.ranks import AtRanks, Ranks
from jhost.lowering.ir.statements import Communicate
from jhost.lowering.rules.reducers import COMBINE, Reducer

_EXTREMA: Mapping[Reducer, Callable[..., Any]] = {"max": lax.pmax, "min": lax.pmin}


def dim_of(stmt: Communicate) -> int:
    """The dim of a kind that has one."""
    assert stmt.dim is not None
    return stmt.dim


def reducer_of(stmt: Communicate) -> Reducer:
    """The reducer of a kind that has one."""
    assert stmt.reducer is not None
    return stmt.reducer


def communicate(stmt: Communicate, x: Any, ranks: Ranks, shift: AtRanks) -> Any:
    """What the current device has in `stmt.out` when each has `x` in `stmt.source`."""
    devices, among = ranks.extent(stmt.axes), over(stmt.axes, ranks)
    if x.size == 0:  # StableHLO gathers and scatters no dims of size 0
        # Not new zeros: an offloaded value stays in the host's memory.
        return x.reshape(_shape_after(stmt, x.shape, devices))
    if stmt.reducer is None and (carrier := _carrier(x.dtype)) != x.dtype:
        return communicate(stmt, x.astype(carrier), ranks, shift).astype(x.dtype)
    match stmt.kind:
        case "AllGather":
            return lax.all_gather(x, **among, axis=dim_of(stmt), tiled=True)
        case "AllReduce":
            return _all_reduce(x, among, reducer_of(stmt))
        case "ReduceScatter":
            return _reduce_scatter(x, among, devices, dim_of(stmt), reducer_of(stmt))
        case "AllToAll":
            # XLA:CPU (of JAX 0.10 to 0.12) refuses pieces with a dim of one element, if
            # it has made them one with equal pieces of others that lie otherwise.
            if 1 in x.shape or x.shape[dim_of(stmt)] == devices:
                x = lax.optimization_barrier(x)
            dims = {"split_axis": stmt.dim, "concat_axis": stmt.source_dim}
            return lax.all_to_all(x, **among, **dims, tiled=True)
        case "CollectivePermute":
            return _permute(x, stmt.axes, ranks, shift)
        case "SwapAxes":
            return _permute(x, stmt.axes, ranks, _to_mirrored(stmt.axes, ranks))


def _carrier(dtype: Any) -> Any:
    """What a dtype is moved as: XLA:CPU (of JAX 0.12) loses elements of 2 bits."""
    narrow = jnp.issubdtype(dtype, jnp.integer) and bits(dtype) < 4
    return summed_in(dtype) if narrow else dtype


def _to_mirrored(axes: tuple[str, ...], ranks: Ranks) -> AtRanks:
    """How far on from device (i, j), along two axes of one size, is device (j, i)."""
    i, j = (ranks.positions[axis] for axis in axes)
    return (j - i) * (ranks.sizes[axes[0]] - 1)


def _shape_after(
    stmt: Communicate, shape: tuple[int, ...], devices: int
) -> tuple[int, ...]:
    """The shape of what a communication makes of a value of `shape`."""
    sizes = list(shape)
    if stmt.kind == "AllGather":
        sizes[dim_of(stmt)] *= devices
    elif stmt.dim is not None:
        sizes[stmt.dim] //= devices
    if stmt.source_dim is not None:
        sizes[stmt.source_dim] *= devices
    return tuple(sizes)


def _all_reduce(x: Any, among: Mapping[str, Any], reducer: Reducer) -> Any:
    if reducer == "sum":
        return _widened(x, lambda x: lax.psum(x, **among))
    extremum = _EXTREMA.get(reducer)
    if extremum and not jnp.issubdtype(x.dtype, jnp.complexfloating):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return _widened(x, lambda x: extremum(x, **among))
        # XLA:CPU and NCCL ignore NaN in a maximum of floats; `jnp.max` does not.
        return _from_ordered(extremum(_ordered(x, reducer), **among), x.dtype)
    # `lax` has no collective for the others, and XLA none for the order of complex
    # numbers: XLA:CPU refuses it, and XLA:GPU (of JAX 0.11) ends the process.  Ranks in
    # their order, so that all devices have the same bits.
    return _reduced(lax.all_gather(x, **among, axis=0), reducer)


def _widened(x: Any, reduce: Callable[[Any], Any]) -> Any:
    """`x` reduced, narrow integers as wider ones; the backend itself widens floats."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return reduce(x)
    return reduce(x.astype(summed_in(x.dtype))).astype(x.dtype)


def _ordered(x: Any, reducer: Reducer) -> Any:
    """Integers in the order of floats, with NaN at the end that `reducer` takes."""
    # float32 holds every narrower float exactly.
    wide = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(wide, f"int{8 * wide.dtype.itemsize}")
    ends = jnp.iinfo(bits.dtype)
    end = jnp.array(ends.max if reducer == "max" else ends.min, bits.dtype)
    return jnp.where(jnp.isnan(wide), end, _flipped(bits))


def _from_ordered(numbers: Any, dtype: np.dtype) -> Any:
    """The floats again: NaN is what the integers at both ends stand for."""
    wide = lax.bitcast_convert_type(
        _flipped(numbers), f"float{8 * numbers.dtype.itemsize}"
    )
    return wide.astype(dtype)


def _flipped(bits: Any) -> Any:
    """A float's bits in the order of its value, or back: negative ones are reversed."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _reduce_scatter(
    x: Any,
    among: Mapping[str, Any],
    devices: int,
    dim: int,
    reducer: Reducer,
) -> Any:
    if reducer == "sum":
        return _widened(
            x, lambda x: lax.psum_scatter(x, **among, scatter_dimension=dim, tiled=True)
        )
    # `lax` scatters sums alone: each device gets all terms of its part.
    return _reduced(_exchange(x, among, devices, dim), reducer)


def _reduced(parts: Any, reducer: Reducer) -> Any:
    """The reduction over dim 0, in the order of the ranks."""
    return functools.reduce(COMBINE[reducer], list(parts))


def _exchange(x: Any, among: Mapping[str, Any], devices: int, dim: int) -> Any:
    """This device's part of `dim` from every device, along a new dim 0."""
    shape = (*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    return lax.all_to_all(x.reshape(shape), **among, split_axis=dim, concat_axis=0)


def _permute(x: Any, axes: tuple[str, ...], ranks: Ranks, shift: AtRanks) -> Any:
    """`lax.ppermute` along `axes`, and along those by which the shift differs.

    It wants the axes in the order of the mesh.
    """
    every = np.reshape(shift, np.shape(shift) or (1,) * len(ranks.shape))
    differs = dict(zip(ranks.sizes, every.shape, strict=True))
    named = beside([a for a, n in differs.items() if a in axes or n > 1], ranks.sizes)
    among = Ranks({axis: ranks.sizes[axis] for axis in named})
    places = enumerate(ranks.sizes)
    at = np.squeeze(every, tuple(i for i, a in places if a not in named))
    numbers = among.in_rows(axes, np.arange(among.count).reshape(among.shape))
    targets = np.take_along_axis(numbers, among.targets(axes, at), 0)
    pairs = zip(numbers.ravel().tolist(), targets.ravel().tolist(), strict=True)
    return lax.ppermute(x, given_axes(named, named), sorted(pairs))
