"""Mesh axes that are split into parts, so that a dim can be sharded by some of them.

Where `[8, d]` rows over an axis `tp` of 4 become `[2, 4, d]`, the first dim takes half
of the axis, and the second one the rest.  A part has the name that Shardy gives it:
`tp:(2)4` has 4 devices, with 2 of the parts before it.  Parts stand in the mesh in the
place of their axis, so a device has the same number with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import AbstractMesh, AxisType

from jhost.lowering.ir.buffer import Buffer

_PART = re.compile(r"(.+):\(\d+\)\d+")


def part_names(axis: str, sizes: Sequence[int]) -> tuple[str, ...]:
    """The names of the parts of an axis that have such sizes, the major one first."""
    names: list[str] = []
    before = 1
    for size in sizes:
        names.append(f"{axis}:({before}){size}")
        before *= size
    return tuple(names)


def is_part(axis: str) -> bool:
    """Whether an axis is a part of a given one."""
    return _PART.fullmatch(axis) is not None


def given_axis(axis: str) -> str:
    """The axis of the user's mesh that an axis is, or is a part of."""
    found = _PART.fullmatch(axis)
    return found[1] if found else axis


def beside(axes: Iterable[str], mesh: Iterable[str]) -> tuple[str, ...]:
    """The axes of a mesh that are some axes, or parts of the same given ones."""
    given = {*map(given_axis, axes)}
    return tuple(axis for axis in mesh if given_axis(axis) in given)


def given_axes(axes: Sequence[str], mesh: Iterable[str]) -> tuple[str, ...] | None:
    """Axes as those of the user's mesh; None if only parts of one are there in a row.

    `mesh` has all axes.
    """
    names, found = [*mesh], list[str]()
    while axes:
        parts = beside(axes[:1], names)
        if tuple(axes[: len(parts)]) != parts:
            return None
        found.append(given_axis(axes[0]))
        axes = axes[len(parts) :]
    return tuple(found)


def given_entries(buffer: Buffer, mesh: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The axes of the user's mesh that shard each dim of a parameter or a result."""
    names = [*mesh]
    found = [given_axes(dim.axes, names) for dim in buffer.dims]
    # `layouts/split_axes.py` sees to that.
    assert None not in found, f"{buffer} has parts of the user's axes"
    return tuple(axes or () for axes in found)


def with_parts(
    mesh: AbstractMesh, sizes: Mapping[str, Sequence[int]]
) -> tuple[AbstractMesh, dict[str, tuple[str, ...]]]:
    """A mesh with some axes split into parts of such sizes, and the parts by axis."""
    parts = {axis: part_names(axis, sizes[axis]) for axis in sizes}
    every = [
        pair
        for axis, size in mesh.shape.items()
        for pair in (
            zip(parts[axis], sizes[axis], strict=True)
            if axis in parts
            else [(axis, size)]
        )
    ]
    names, counts = zip(*every, strict=True)
    types = (AxisType.Auto,) * len(names)
    return AbstractMesh(counts, names, axis_types=types), parts
