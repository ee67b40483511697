"""Give every value a layout: which mesh axes shard its dims on every device.

`solve_layouts` decides; this pass writes the decisions into the program.  Buffers get
their local shapes, and where a value must change its layout stands a `Set` whose two
buffers differ, which `convert_to_communications` turns into communications.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from jhost.lowering.ir import Buffer, Compute, Program, Set, ShardMark, Stmt
from jhost.lowering.layout import Layout, dims_of, layout_of, local_shape
from jhost.lowering.marks import resolved_marks
from jhost.lowering.names import Names
from jhost.lowering.operations import Assignment, Operation
from jhost.lowering.reshard import Partial, StepKind, plan_reshard
from jhost.lowering.solve_layouts import Solution, solve_layouts
from jhost.lowering.streamed_dims import streamed_dims

_RESHARDED: Mapping[StepKind, str] = {
    "AllGather": "gathered",
    "AllReduce": "reduced",
    "ReduceScatter": "scattered",
    "AllToAll": "exchanged",
    "Select": "part",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PropagateLayouts:
    """A program with global shapes -> what one device of the mesh runs.

    `chunks` and `pipeline` hold for stream marks that do not say: what a pipeline that
    was asked for can hide counts after what it cannot.
    """

    name: ClassVar[str] = "propagate_layouts"

    chunks: int | Literal["auto"] = "auto"
    pipeline: str = "auto"

    def apply(self, program: Program) -> Program:
        shardings = {m.buffer: m for m in program.marks if isinstance(m, ShardMark)}
        asked = resolved_marks(program, self.chunks, self.pipeline)
        streamed = streamed_dims(program, asked)
        marks = tuple(m for m in program.marks if not isinstance(m, ShardMark))
        program = dataclasses.replace(program, marks=marks)
        if not program.mesh.shape:
            return program
        solution = solve_layouts(program, shardings, streamed)
        return _Rewriter(program, solution).rewrite()


class _Rewriter:
    def __init__(self, program: Program, solution: Solution) -> None:
        self.program = program
        self.solution = solution
        self.mesh = dict(program.mesh.shape)
        self.names = Names.of(program)
        self.body: list[Stmt] = []
        self.buffers: dict[str, Buffer] = {}
        self.resharded: dict[tuple[str, Layout], Buffer] = {}

    def rewrite(self) -> Program:
        """The program with local shapes and with `Set`s where layouts change."""
        params = tuple(self.at_rest(param) for param in self.program.params)
        pairs = zip(self.solution.operations, self.solution.assignments, strict=True)
        for op, assignment in pairs:
            if isinstance(op.stmt, Set):
                self.copy(op.stmt)
            else:
                self.compute(op, op.stmt, assignment)
        results = tuple(self.buffers[result.name] for result in self.program.results)
        body = tuple(self.body)
        return dataclasses.replace(
            self.program, params=params, results=results, body=body
        )

    def at_rest(self, buffer: Buffer) -> Buffer:
        """`buffer` in the layout that the solution gives it."""
        placed = self.place(buffer, self.solution.layouts[buffer.name])
        self.buffers[buffer.name] = placed
        return placed

    def place(
        self, buffer: Buffer, layout: Layout, partial: Partial = (), name: str = ""
    ) -> Buffer:
        return dataclasses.replace(
            buffer,
            name=name or buffer.name,
            shape=local_shape(buffer.shape, layout, self.mesh),
            dims=dims_of(layout),
            partial=partial,
        )

    def copy(self, stmt: Set) -> None:
        source = self.buffers[stmt.source.name]
        self.body.append(Set(out=self.at_rest(stmt.out), source=source))

    def compute(self, op: Operation, stmt: Compute, assignment: Assignment) -> None:
        ins = tuple(
            self.operand(buffer, op.required(position, assignment))
            for position, buffer in enumerate(stmt.ins)
        )
        outs: list[Buffer] = []
        copies: list[Set] = []
        for position, buffer in enumerate(stmt.outs):
            rest = self.at_rest(buffer)
            produced = self.place(buffer, *op.produced(position, assignment))
            if produced != rest:
                suffix = "partial" if produced.partial else "produced"
                name = self.names.fresh(f"{buffer.name}_{suffix}")
                produced = dataclasses.replace(produced, name=name)
                copies.append(Set(out=rest, source=produced))
            outs.append(produced)
        (unit_eqn,) = stmt.unit.eqns
        unit_eqn = dataclasses.replace(unit_eqn, axes=assignment)
        unit = dataclasses.replace(stmt.unit, eqns=(unit_eqn,))
        self.body.append(
            dataclasses.replace(stmt, unit=unit, ins=ins, outs=tuple(outs))
        )
        self.body.extend(copies)

    def operand(self, buffer: Buffer, layout: Layout) -> Buffer:
        """`buffer` in `layout`, copied into it once however many read it so."""
        source = self.buffers[buffer.name]
        target = self.place(buffer, layout)
        if source == target:
            return source
        if (buffer.name, layout) not in self.resharded:
            (*_, last) = plan_reshard(layout_of(source), layout, source.partial)
            name = self.names.fresh(f"{buffer.name}_{_RESHARDED[last.kind]}")
            target = dataclasses.replace(target, name=name)
            self.resharded[buffer.name, layout] = target
            self.body.append(Set(out=target, source=source))
        return self.resharded[buffer.name, layout]
