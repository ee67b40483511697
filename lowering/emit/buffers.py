"""Buffers and aliases while a program is emitted: functional values, few copies.

A buffer that is written chunk by chunk is a list of pieces, put together when it is
first read whole.  A read of exactly the written part gives the written value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from jhost.lowering.emit.windows import Window, joined, merged, put, take
from jhost.lowering.ir.regions import Region, overlap, same, whole_region
from jhost.lowering.ir.statements import Buffer


@dataclasses.dataclass(slots=True)
class Piece:
    """A part of a memory; `current` unless a later write reached into it.

    `merged` pieces are in the memory's base already.
    """

    region: Region
    windows: tuple[Window, ...]
    value: Any
    merged: bool
    current: bool = True


class Memory:
    """The contents of one buffer with memory of its own.

    `read_whole`: whether something will read it other than in parts.  `received`:
    whether a communication outside of loops has written to it.  Its `base` may be of a
    narrower dtype, as what comes first in an accumulator is: it is read in its own.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, read_whole: bool
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.read_whole = read_whole
        self.received = False
        # Filled when something reads the whole, and not before: pieces cost no copy.
        self.base: Any = None
        self.pieces: list[Piece] = []

    def fresh(self, region: Region) -> bool:
        """Whether nothing has been written to `region`."""
        touched = any(overlap(region, piece.region) for piece in self.pieces)
        return self.base is None and not touched

    def find(self, region: Region) -> Any | None:
        """The value of `region`, if it is at hand as one piece."""
        for piece in self.pieces:
            if piece.current and same(piece.region, region):
                return piece.value
        return None

    def remember(self, region: Region, windows: tuple[Window, ...], value: Any) -> None:
        """Keep what was read, for the next read."""
        self.pieces.append(Piece(region, windows, value, merged=True))

    def write(self, region: Region, windows: tuple[Window, ...], value: Any) -> None:
        """Make `value` the contents of `region`."""
        if all(window.covers for window in windows):
            self.replace(value.reshape(self.shape))
            return
        kept: list[Piece] = []
        for piece in self.pieces:
            if overlap(piece.region, region):
                # Its value is in the base already, or nothing of it is left.
                if piece.merged or same(piece.region, region):
                    continue
                # Something was written into it.  It has to be merged before that.
                piece.current = False
            kept.append(piece)
        self.pieces = [*kept, Piece(region, windows, value, merged=False)]

    def replace(self, value: Any) -> None:
        """Make `value` the whole contents."""
        self.base, self.pieces = value, []

    def read_behind(self, behind: Callable[[Any], Any]) -> None:
        """Have the pieces that are still to be put in place read as `behind` says."""
        for piece in self.pieces:
            if not piece.merged:
                piece.value = behind(piece.value)

    def assemble(self) -> Any:
        """The whole contents as one array, of its dtype."""
        waiting = [piece for piece in self.pieces if not piece.merged]
        if self.base is None or waiting:
            self.base = self._assembled(waiting)
        for piece in waiting:
            piece.merged = True
        self.pieces = [piece for piece in self.pieces if piece.current]
        return _converted(self.base, self.dtype)

    def _assembled(self, pieces: list[Piece]) -> Any:
        # Pieces that tile the whole are one `concatenate`: a fusion reads it piece by
        # piece.  Only a kernel that wants one array has it made.
        whole_pieces = all(piece.current for piece in pieces)
        parts = [(piece.windows, piece.value) for piece in pieces]
        if whole_pieces and (value := joined(self.shape, parts)) is not None:
            return value
        # Not zeros: XLA would fill them, 70 us for 117 MB on an H200.
        empty = self.base is None
        value = lax.empty(self.shape, self.dtype) if empty else self.base
        value = _converted(value, self.dtype)
        for windows, part in parts:
            value = put(value, windows, part)
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A buffer, or an alias: a `window` of its source."""

    memory: Memory
    region: Region
    shape: tuple[int, ...]
    source: View | None = None
    window: Window | None = None

    def select(self, window: Window, region: Region) -> View:
        """An alias of a part of this one."""
        return View(self.memory, region, window.out_shape, self, window)

    def read(self) -> Any:
        """The value here and now."""
        if self.source is None:
            return self.memory.assemble()
        view, windows = self, ()
        while view.source is not None and view.window is not None:
            if (value := view.memory.find(view.region)) is not None:
                break
            windows, view = (view.window, *windows), view.source
        else:
            value = self.memory.assemble()
        if windows:
            value = take(value, merged(windows)).reshape(self.shape)
            # A second read of this part finds the value: one slice in the program.
            self.memory.remember(self.region, self.windows(), value)
        return value.reshape(self.shape)

    def held(self) -> Any:
        """The value, in the dtype in which it came: see `Memory`."""
        memory = self.memory
        whole = self.source is None and memory.base is not None and not memory.pieces
        return memory.base if whole else self.read()

    def write(self, value: Any) -> None:
        """Change the elements of the memory that this view covers."""
        if self.source is not None:
            value = _converted(value, self.memory.dtype)
        self.memory.write(self.region, self.windows(), value)

    def is_static(self) -> bool:
        """Whether every device knows beforehand which part this is."""
        starts = (start for w in self.windows() for start in w.starts)
        return all(isinstance(start, int) for start in starts)

    def windows(self) -> tuple[Window, ...]:
        """The steps from the memory to this view."""
        if self.source is None or self.window is None:
            return ()
        return merged((*self.source.windows(), self.window))


def _converted(value: Any, dtype: np.dtype) -> Any:
    return value if value.dtype == dtype else lax.convert_element_type(value, dtype)


def new_view(
    buffer: Buffer,
    shape: tuple[int, ...],
    mesh_dims: int,
    read_whole: bool = True,
) -> View:
    """A buffer with memory of its own, which a ragged last chunk makes smaller."""
    memory = Memory(shape, buffer.dtype, read_whole)
    return View(memory, whole_region(shape, mesh_dims), shape)
