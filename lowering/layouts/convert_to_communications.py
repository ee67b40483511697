"""Turn every `Reshard` into communications.

The table is in `docs/design.md`, "Communications".  nvFuser also has a pass of its own
that lowers resharding expressions.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.index import Constant, linear_rank
from jhost.lowering.ir.layout import axes_size, dims_of, layout_of
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.layouts.exchange import HaloWriter
from jhost.lowering.layouts.reshard import ReshardStep, plan_reshard


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertToCommunications(EachProgram):
    """`Reshard`, `Neighbours` -> `Communicate` and `Wait`, or a `Select` by rank."""

    name: ClassVar[str] = "convert_to_communications"

    def sees(self, program: Program) -> object:
        return None

    def change(self, program: Program) -> Program:
        converter = _Converter(program)
        body = tuple(new for stmt in program.body for new in converter.convert(stmt))
        return dataclasses.replace(program, body=body)


class _Converter:
    def __init__(self, program: Program) -> None:
        self.mesh = dict(program.mesh.shape)
        self.names = FreshNames.of(program)
        self.exchange = HaloWriter(self.mesh, self.names)
        self.exchange.plan(program.body)
        self.results = {result.name for result in program.results}

    def convert(self, stmt: ir.Stmt) -> list[ir.Stmt]:
        if isinstance(stmt, ir.Neighbours):
            return self.exchange.statements(stmt)
        if not isinstance(stmt, ir.Reshard):
            return [stmt]
        source, out = stmt.source, stmt.out
        have, want = layout_of(source), layout_of(out)
        # The solver counted the bytes of the same plan.
        plan = plan_reshard(have, want, source.partial, self.mesh)
        statements: list[ir.Stmt] = [] if plan else [ir.Set(out=out, source=source)]
        for number, step in enumerate(plan):
            target = out if number == len(plan) - 1 else self.after(step, source, out)
            statements += self.statements(step, source, target)
            source = target
        return statements

    def after(self, step: ReshardStep, source: ir.Buffer, out: ir.Buffer) -> ir.Buffer:
        """A buffer for the result of `step` on `source`, on the way to `out`."""
        shape = list(source.shape)
        devices = axes_size(step.axes, self.mesh)
        if step.dim is not None:
            grows = step.kind == "AllGather"
            size = shape[step.dim]
            shape[step.dim] = size * devices if grows else size // devices
        if step.source_dim is not None:
            shape[step.source_dim] *= devices
        return dataclasses.replace(
            out,
            name=self.names.fresh(f"{out.name}_{step.kind.lower()}"),
            shape=tuple(shape),
            dims=dims_of(step.layout),
            partial=step.partial,
        )

    def statements(
        self, step: ReshardStep, source: ir.Buffer, out: ir.Buffer
    ) -> list[ir.Stmt]:
        if step.kind == "Select":
            assert step.dim is not None
            size = out.shape[step.dim]
            alias = out
            if out.name in self.results:
                # A result of the program needs memory of its own; an alias has none.
                alias = dataclasses.replace(
                    out, name=self.names.fresh(f"{out.name}_part")
                )
            select = ir.Select(
                out=alias,
                source=source,
                dim=step.dim,
                index=linear_rank(step.axes, self.mesh) * size,
                size=Constant(size),
            )
            return [select] if alias is out else [select, ir.Set(out=out, source=alias)]
        communicate = ir.Communicate(
            name=self.names.fresh("c"),
            kind=step.kind,
            out=out,
            source=source,
            axes=step.axes,
            dim=step.dim,
            source_dim=step.source_dim,
            reducer=step.reducer,
        )
        # Waited for at once: later passes put work between the two.
        return [communicate, ir.Wait(communication=communicate.name)]
