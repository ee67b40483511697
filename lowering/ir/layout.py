"""Layouts: which mesh axes shard each dim of a value, and what a device then holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jhost._jax import itemsize
from jhost._primitives import Spec
from jhost.lowering.ir.statements import Buffer, Dim
from jhost.lowering.rules.reducers import Reducer

Layout: TypeAlias = tuple[tuple[str, ...], ...]
"""Per dim, the mesh axes that shard it, major first."""

Partial: TypeAlias = tuple[tuple[str, Reducer], ...]
"""The mesh axes over which a value still has to be reduced, each with its reducer."""


def axes_size(axes: Sequence[str], mesh: Mapping[str, int]) -> int:
    """The number of devices along `axes` together."""
    size = 1
    for axis in axes:  # most often none or one
        size *= mesh[axis]
    return size


def replicated(rank: int) -> Layout:
    """The layout of a value that every device holds entirely."""
    return ((),) * rank


def layout_of(buffer: Buffer) -> Layout:
    """The layout of `buffer`, streams left aside."""
    return tuple(dim.axes for dim in buffer.dims)


def dims_of(layout: Layout) -> tuple[Dim, ...]:
    """Buffer dims of that layout, with no stream."""
    assert is_layout(layout), f"an axis shards two dims of {layout}"
    return tuple(Dim(axes=axes) for axes in layout)


def local_shape(
    shape: Sequence[int], layout: Layout, mesh: Mapping[str, int]
) -> tuple[int, ...]:
    """What one device holds of a value of global `shape`."""
    # It divides: `padding/` has seen to that before any value has a layout.
    pairs = zip(shape, layout, strict=True)
    return tuple([s // axes_size(axes, mesh) if axes else s for s, axes in pairs])


def divides(shape: Sequence[int], layout: Layout, mesh: Mapping[str, int]) -> bool:
    """Whether every dim divides evenly over its axes."""
    pairs = zip(shape, layout, strict=True)
    return not any([axes and size % axes_size(axes, mesh) for size, axes in pairs])


def used_axes(layout: Layout) -> frozenset[str]:
    """The mesh axes that shard some dim."""
    return frozenset(axis for axes in layout for axis in axes)


def is_layout(layout: Layout) -> bool:
    """Whether no mesh axis is there twice."""
    return not repeated_axes(axis for axes in layout for axis in axes)


def repeated_axes(axes: Iterable[str]) -> list[str]:
    """The names that occur more than once, in order."""
    seen: set[str] = set()
    # `add` gives None, so an axis that is new is noted and left out.
    return [axis for axis in axes if axis in seen or seen.add(axis)]


def size_in_bytes(shape: Sequence[int], dtype: Any) -> int:
    """The bytes of an array of that shape."""
    return math.prod(shape) * itemsize(dtype)


def bytes_of(buffer: Buffer) -> int:
    """The bytes that a buffer takes on one device."""
    return size_in_bytes(buffer.shape, buffer.dtype)


def bytes_in(buffers: Iterable[Buffer]) -> int:
    """The bytes that some buffers take on one device."""
    return sum(map(bytes_of, buffers))


def swapped(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """`layout` with two mesh axes in each other's place."""
    other = {axes[0]: axes[1], axes[1]: axes[0]}
    return tuple(tuple(other.get(axis, axis) for axis in dim) for dim in layout)


def spec_text(spec: Spec) -> str:
    """`spec` as a user would write it."""

    def entry(axes: tuple[str, ...] | None) -> str:
        # JAX means by `None` that a dim is whole; a `Spec` means that it is left open.
        if axes is None:
            return "P.UNCONSTRAINED"
        if not axes:
            return "None"
        return repr(axes[0]) if len(axes) == 1 else repr(axes)

    return f"P({', '.join(entry(axes) for axes in spec)})"
