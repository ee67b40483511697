"""Index expressions and transfer partners at every rank of the mesh at once.

The mesh is known while a program is lowered, so an index is a number at each rank.
Verification, emission and interpretation all ask here whether those numbers are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from jhost.lowering.ir.index import Constant, Index, LoopIndex, Rank, evaluate

AtRanks: TypeAlias = "int | np.ndarray"


class Ranks:
    """The ranks of a mesh whose axes have these `sizes`."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.shape = tuple(self.sizes.values())
        self.positions = {axis: self._position(axis) for axis in self.sizes}
        self.leaves = {Rank(axis): at for axis, at in self.positions.items()}

    @property
    def count(self) -> int:
        """The number of devices."""
        # Of ints even for a mesh without axes, where NumPy would give the float 1.0.
        return int(np.prod(self.shape, dtype=int))

    def extent(self, axes: Sequence[str]) -> int:
        """The number of devices along `axes` together."""
        return int(np.prod([self.sizes[axis] for axis in axes], dtype=int))

    def value(self, index: Index, loops: Mapping[str, int]) -> AtRanks:
        """The value of `index`: an int where all ranks agree.

        Otherwise an array with a dim for each mesh axis, of size 1 where the value does
        not depend on that axis.
        """
        if isinstance(index, Constant):
            return index.value
        indices = {LoopIndex(name): value for name, value in loops.items()}
        values = np.asarray(evaluate(index, {**self.leaves, **indices}))
        # An int wherever it can be: XLA reads and writes a static slice in place.
        first = values.flat[0]
        return int(first) if (values == first).all() else values

    def everywhere(self, value: AtRanks) -> np.ndarray:
        """`value` with an entry for each device, in the shape of the mesh."""
        if isinstance(value, int):
            return np.full(self.shape, value)
        return np.broadcast_to(value, self.shape)

    def linear(self, axes: Sequence[str]) -> AtRanks:
        """The position along `axes` together, the first the major one."""
        result: AtRanks = 0
        for axis in axes:
            result = result * self.sizes[axis] + self.positions[axis]
        return result

    def targets(self, axes: Sequence[str], shift: AtRanks) -> np.ndarray:
        """The device along `axes` that is `shift` further on, modulo their number.

        There is a row for each position along `axes`, and in it an entry for each of
        the devices there, which differ by the other axes.
        """
        shifted = (self.linear(axes) + shift) % self.extent(axes)
        return self.in_rows(axes, self.everywhere(shifted))

    def in_rows(self, axes: Sequence[str], every: np.ndarray) -> np.ndarray:
        """What each device has, with a row for each position along `axes`.

        A column has the devices of one group along `axes`.
        """
        order = [list(self.sizes).index(axis) for axis in axes]
        first = np.moveaxis(every, order, range(len(axes)))
        return first.reshape(self.extent(axes), -1)

    def _position(self, axis: str) -> np.ndarray:
        # Of size 1 along the other axes: on a large mesh most indices are about one
        # axis.
        shape = [size if name == axis else 1 for name, size in self.sizes.items()]
        return np.arange(self.sizes[axis]).reshape(shape)
