"""Pad the dims that a sharding inside the function does not divide.

`jax.lax.with_sharding_constraint` takes such a sharding inside a jitted function, and
so does `jhost.shard`.  Every device runs one program, so the parts need one size.  The
dim is padded to the next multiple, and later passes see ordinary buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from jhost.lowering.ir.bodies import rebuilt
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.program import Program
from jhost.lowering.padding.flat import with_paths
from jhost.lowering.padding.marks import possible_marks, shapes_of
from jhost.lowering.padding.region import PadRequest
from jhost.lowering.padding.values import pad_program
from jhost.lowering.padding.windowed import windowed_requests


@dataclasses.dataclass(frozen=True, slots=True)
class PadUneven:
    """Global shapes that shardings need not divide -> shapes that they do."""

    name: ClassVar[str] = "pad_uneven"

    def apply(self, program: Program) -> Program:
        """`program` with its padding, also in its bodies."""
        requests = [*_marked(program), *windowed_requests(program)]
        # A sharding that could not be met by padding is left to jhost.
        return rebuilt(pad_program(program, requests), possible_marks)


def _marked(program: Program) -> Iterator[PadRequest]:
    """The dims that shardings inside of a program want to be padded."""
    mesh = dict(program.mesh.shape)
    for path, each in with_paths(program):
        marks = [mark for mark in each.marks if isinstance(mark, ShardMark)]
        shapes = shapes_of(each) if marks else {}
        for mark in marks:
            for dim, axes in enumerate(mark.spec):
                if axes:
                    yield PadRequest(
                        buffer=path + mark.buffer,
                        dim=dim,
                        size=shapes[mark.buffer][dim],
                        axes=axes,
                        devices=axes_size(axes, mesh),
                        where=mark.where,
                    )
