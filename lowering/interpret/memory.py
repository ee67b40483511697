"""Buffers as NumPy arrays, and aliases as indices into them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from jhost.lowering.interpret.arrays import OnDevices
from jhost.lowering.ir.statements import Select

Indices: TypeAlias = tuple[np.ndarray, ...]
"""For each dim of a buffer, the indices that an alias covers."""


@dataclasses.dataclass(slots=True)
class ArrayMemory:
    """A buffer on every device, and which of its elements were written."""

    values: OnDevices
    written: OnDevices

    @classmethod
    def of(cls, values: OnDevices, dims: int, written: bool = True) -> ArrayMemory:
        """`values` of buffers with so many dims; keys have more."""
        shapes = [value.shape[:dims] for value in values]
        return cls(values, [np.full(shape, written) for shape in shapes])


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayView:
    """The part of a buffer that an alias covers on each device.

    `kept` are the buffer's dims that the alias has, without those it drops.
    """

    owner: str
    indices: tuple[Indices, ...]
    kept: tuple[int, ...]

    def select(self, stmt: Select, starts: Sequence[int], size: int) -> ArrayView:
        """The part that `stmt` takes; `starts` has an entry for each device."""
        dim = self.kept[stmt.dim]
        indices = [
            (*at[:dim], _cut(at[dim], start, size, stmt.groups), *at[dim + 1 :])
            for at, start in zip(self.indices, starts, strict=True)
        ]
        # The buffer still has a dim that the alias drops; it gets a single index.
        kept = tuple(d for d in self.kept if not (stmt.drop and d == dim))
        return ArrayView(self.owner, tuple(indices), kept)

    def read(self, arrays: OnDevices) -> OnDevices:
        """The elements of this part, out of arrays as large as the buffer."""
        return [
            np.reshape(array[np.ix_(*at)], self.shape(at) + array.shape[len(at) :])
            for array, at in zip(arrays, self.indices, strict=True)
        ]

    def write(self, arrays: OnDevices, values: OnDevices) -> None:
        """Put `values` into this part of `arrays`."""
        for array, at, value in zip(arrays, self.indices, values, strict=True):
            assert value.shape[: len(self.kept)] == self.shape(at), self.owner
            shape = (*map(len, at), *array.shape[len(at) :])
            # By indices, because an alias with groups is not one slice of its buffer.
            array[np.ix_(*at)] = np.reshape(value, shape)

    def mark(self, written: OnDevices) -> None:
        """Note that this part was written."""
        for array, at in zip(written, self.indices, strict=True):
            array[np.ix_(*at)] = True

    def shape(self, indices: Indices) -> tuple[int, ...]:
        """The alias's own shape on a device."""
        return tuple(len(indices[dim]) for dim in self.kept)


def whole(owner: str, memory: ArrayMemory) -> ArrayView:
    """All of a buffer."""
    indices = tuple(tuple(map(np.arange, each.shape)) for each in memory.written)
    return ArrayView(owner, indices, tuple(range(memory.written[0].ndim)))


def _cut(indices: np.ndarray, start: int, size: int, groups: int) -> np.ndarray:
    taken = indices.reshape(groups, len(indices) // groups)[:, start : start + size]
    assert taken.shape == (groups, size), "an alias is a part of its source"
    return taken.ravel()
