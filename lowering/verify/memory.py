"""Verification of buffers and aliases: all but computation and communication."""

from __future__ import annotations

import numpy as np

from jhost import errors
from jhost.lowering.ir.statements import (
    Allocate,
    Buffer,
    Deallocate,
    Dim,
    Neighbours,
    Reshard,
    Select,
    Set,
)
from jhost.lowering.ir.unit_printer import type_text
from jhost.lowering.verify.known import KnownBuffer, Root
from jhost.lowering.verify.state import State


def check_allocate(state: State, stmt: Allocate) -> None:
    root = Root(name=stmt.buffer.name, allocated_in_loop=bool(state.loops))
    state.define(stmt.buffer, stmt.buffer.shape, root)


def check_deallocate(state: State, stmt: Deallocate) -> None:
    name = stmt.buffer.name
    known = state.known.get(name)
    if known is not None and known.root.freed:
        state.fail("a live buffer", f"{name}, freed before", "no buffer is freed twice")
    known = state.look_up(stmt.buffer)
    if known.is_alias or known.root.is_param:
        state.fail(
            "a buffer with memory of its own",
            f"{name}, a part of {known.root.name}" if known.is_alias else f"{name}",
            "aliases and parameters are not deallocated",
        )
    if known.root.has_result:
        state.fail("another buffer", name, "a result is never deallocated")
    for flight in state.in_flight.values():
        if any(k.root is known.root for k in (*flight.reads, *flight.writes)):
            state.fail("a Wait first", name, "a buffer in flight is not deallocated")
    known.root.freed = True


def check_select(state: State, stmt: Select) -> None:
    # Not a read: a part of memory may get a name before anything is written to it.
    source = state.look_up(stmt.source)
    size = state.static(stmt.size, "size")
    _check_select_dim(state, stmt, source, size)
    _check_range(state, stmt, source.shape[stmt.dim] // stmt.groups, size)
    shape = list(source.shape)
    shape[stmt.dim : stmt.dim + 1] = [] if stmt.drop else [stmt.groups * size]
    state.check_shape(stmt.out, tuple(shape))
    _check_select_types(state, stmt)
    region = source.region.select(
        stmt.dim, state.value(stmt.index), size, stmt.groups, stmt.drop
    )
    state.define_alias(stmt.out, source, region, tuple(shape))


def _check_select_dim(
    state: State, stmt: Select, source: KnownBuffer, size: int
) -> None:
    rank = len(source.shape)
    if not 0 <= stmt.dim < rank:
        state.fail(f"a dim below {rank}", f"{stmt.dim}", "an alias is along a dim")
    if source.shape[stmt.dim] % stmt.groups:
        state.fail(
            f"a dim of a multiple of {stmt.groups} elements",
            f"{source.shape[stmt.dim]}",
            "groups are equal parts of the dim",
        )
    if stmt.drop and (size, stmt.groups) != (1, 1):
        state.fail(
            "size 1 of one group",
            f"size {size} of {stmt.groups}",
            "only a dim of one element can be dropped",
        )


def _check_range(state: State, stmt: Select, extent: int, size: int) -> None:
    index = np.asarray(state.value(stmt.index))
    outside = (index < 0) | (index + size > extent)
    # An empty dim has only an empty part.
    if size < min(extent, 1) or outside.any():
        first = int(index[outside].flat[0]) if outside.any() else int(index.flat[0])
        raise errors.IndexRangeError(
            f"{state.where()}expected a part of [0 : {extent}] of {stmt.source.name}, "
            f"got [{first} : {first + size}]: an alias lies inside its source"
        )


def _check_select_types(state: State, stmt: Select) -> None:
    out, source = stmt.out, stmt.source
    dims = [dim.axes for dim in source.dims]
    kept = [dim.axes for dim in out.dims]
    if not stmt.drop:
        kept.pop(stmt.dim)
    dims.pop(stmt.dim)
    if (out.dtype, out.partial, kept) != (source.dtype, source.partial, dims):
        state.fail(
            f"the type of {source.name}: {type_text(source)}",
            f"{out.name}: {type_text(out)}",
            "an alias differs from its source only in the selected dim",
        )


def check_set(state: State, stmt: Set) -> None:
    source = state.read(stmt.source)
    _check_converts_nothing(state, stmt, stmt.source)
    out = stmt.out
    spread = any(map(_is_spread, out.dims, stmt.source.dims))
    if spread or out.partial != stmt.source.partial:
        state.fail(
            f"the layout of {stmt.source.name}: {type_text(stmt.source)}",
            type_text(out),
            "a Set copies; only a Reshard changes the layout",
        )
    state.write(out, source.shape)


def _is_spread(dim: Dim, old: Dim) -> bool:
    """Whether a copy cannot turn `old` into `dim`.

    A copy may drop or add axes in a p2p pipeline: a device's own part becomes one chunk
    among all chunks, or the other way round.
    """
    if old.stream is not None and old.axes == dim.axes[: len(old.axes)]:
        return False
    return dim.axes != old.axes[: len(dim.axes)]


def check_reshard(state: State, stmt: Reshard) -> None:
    state.read(stmt.source)
    _check_converts_nothing(state, stmt, stmt.source)

    def spread(buffer: Buffer) -> list[int]:
        dims = zip(buffer.shape, buffer.dims, strict=True)
        return [size * state.ranks.extent(dim.axes) for size, dim in dims]

    if spread(stmt.out) != spread(stmt.source):
        state.fail(
            f"the global shape {spread(stmt.source)}",
            f"{spread(stmt.out)}",
            "a Reshard moves elements and makes none",
        )
    state.write(stmt.out, stmt.out.shape)


def check_neighbours(state: State, stmt: Neighbours) -> None:
    for source, reads in zip(stmt.sources, stmt.reads, strict=True):
        expected = list(state.read(source).shape)
        _check_converts_nothing(state, stmt, source)
        expected[stmt.dim] = reads.window(stmt.count)
        axes = source.dims[stmt.dim].axes
        whole = len(stmt.sources) > 1 and not axes
        placed = whole or axes == stmt.axes
        if not placed or expected != [*stmt.out.shape]:
            state.fail(
                f"a window of {expected} over {list(stmt.axes)}",
                f"{type_text(stmt.out)} of {type_text(source)}",
                "a window has the elements that a device's steps read of a sharded dim",
            )
    state.write(stmt.out, stmt.out.shape)


def _check_converts_nothing(
    state: State, stmt: Set | Reshard | Neighbours, source: Buffer
) -> None:
    out = stmt.out
    if out.dtype != source.dtype or len(out.shape) != len(source.shape):
        state.fail(
            f"the type of {source.name}: {type_text(source)}",
            type_text(out),
            f"a {type(stmt).__name__} converts nothing",
        )
