"""Pad the dims that a sharding inside the function does not divide.

`jax.lax.with_sharding_constraint` takes such a sharding inside a jitted function, and
so does `jhost.shard`.  Every device runs one program, so the parts need one size.  The
dim is padded to the next multiple, and later passes see ordinary buffers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jhost.lowering.ir.bodies import with_each_body
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.program import Program
from jhost.lowering.padding.marks import possible_marks
from jhost.lowering.padding.region import PadRequest
from jhost.lowering.padding.values import pad_program
from jhost.lowering.padding.windowed import windowed_requests


@dataclasses.dataclass(frozen=True, slots=True)
class PadUneven:
    """Global shapes that shardings need not divide -> shapes that they do."""

    name: ClassVar[str] = "pad_uneven"

    def apply(self, program: Program) -> Program:
        """`program` with its padding, and its bodies with theirs."""
        return _padded(program, windowed_requests(program))


def _padded(program: Program, windowed: Mapping[int, Sequence[PadRequest]]) -> Program:
    asked = windowed.get(id(program), ())
    program = with_each_body(program, functools.partial(_padded, windowed=windowed))
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
    return possible_marks(pad_program(program, [*requests, *asked]))
