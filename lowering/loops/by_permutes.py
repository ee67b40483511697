"""The permutes that replace a collective outside of loops, and aliases of its parts.

At step k a device sends to the device k ranks further on.  The parts of a whole are
counted from the device itself on.  Loops do the same: see `moves.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.index import Constant, Index, linear_rank
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program


class ByPermutes:
    """Writes permutes and aliases, under names that are fresh in a program."""

    def __init__(self, program: Program) -> None:
        self.mesh: Mapping[str, int] = dict(program.mesh.shape)
        self.names = FreshNames.of(program)

    def devices(self, stmt: ir.Communicate) -> int:
        """How many take part in a collective."""
        return axes_size(stmt.axes, self.mesh)

    def rank(self, stmt: ir.Communicate) -> Index:
        """Which of them this one is."""
        return linear_rank(stmt.axes, self.mesh)

    def permute(
        self, stmt: ir.Communicate, source: ir.Buffer, shift: Index
    ) -> ir.Communicate:
        """A permute of `source`, for a collective, to the device `shift` further on."""
        came = self.names.fresh(f"{stmt.out.name}_came")
        return ir.Communicate(
            name=self.names.fresh("c"),
            kind="CollectivePermute",
            out=dataclasses.replace(source, name=came),
            source=source,
            axes=stmt.axes,
            shift=shift,
        )

    def part(self, stmt: ir.Communicate, step: int) -> ir.Select:
        """An alias of what the device `step` further on has or gets of the whole.

        The whole is an all-gather's result, or a reduce-scatter's operand.
        """
        assert stmt.dim is not None
        whole, of = stmt.out, stmt.source
        if stmt.kind == "ReduceScatter":
            whole, of = of, whole
        size, rank = of.shape[stmt.dim], self.rank(stmt)
        place = (rank + step) % self.devices(stmt) if step else rank
        name = self.names.fresh(f"{whole.name}_part")
        return ir.Select(
            out=dataclasses.replace(stmt.source, name=name, shape=of.shape),
            source=whole,
            dim=stmt.dim,
            index=place * size,
            size=Constant(size),
        )
