"""Pad the dims that a sharding inside the function does not divide.

`jax.lax.with_sharding_constraint` takes such a sharding inside a jitted function, and
so does `jhost.shard`.  Every device runs one program, so the parts need one size.  The
dim is padded to the next multiple, and later passes see ordinary buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jhost.lowering.ir.bodies import EachProgram, with_each_body
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.program import Program
from jhost.lowering.padding.marks import possible_marks
from jhost.lowering.padding.region import PadRequest
from jhost.lowering.padding.values import pad_program
from jhost.lowering.padding.windowed import windowed_requests


@dataclasses.dataclass(frozen=True, slots=True)
class PadUneven(EachProgram):
    """Global shapes that shardings need not divide -> shapes that they do."""

    name: ClassVar[str] = "pad_uneven"

    def apply(self, program: Program) -> Program:
        """`program` with its padding, and its bodies with theirs."""
        windowed = windowed_requests(program)

        def padded(each: Program) -> Program:
            inside = with_each_body(each, padded)
            return self.padded(inside, windowed.get(id(each), ()))

        return padded(program)

    def change(self, program: Program) -> Program:
        return self.padded(program, ())

    def padded(self, program: Program, windowed: Sequence[PadRequest]) -> Program:
        mesh = dict(program.mesh.shape)
        requests = [
            PadRequest(
                buffer=mark.buffer,
                dim=dim,
                axes=axes,
                devices=axes_size(axes, mesh),
                where=mark.where,
            )
            for mark in program.marks
            if isinstance(mark, ShardMark)
            for dim, axes in enumerate(mark.spec)
            if axes
        ]
        # A sharding that could not be met by padding is left to jhost.
        return possible_marks(pad_program(program, [*requests, *windowed]))
