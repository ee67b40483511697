"""Give every value a layout: which mesh axes shard its dims on every device.

`solve_layouts` decides; this pass writes the decisions into the program.  Buffers get
their local shapes, and where a value must change its layout stands a `Reshard`, which
`convert_to_communications` turns into communications.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from jhost._jax import fresh_var
from jhost.lowering.ir.layout import Layout, Partial, dims_of, layout_of, local_shape
from jhost.lowering.ir.marks import BarrierMark, Mark, ShardMark
from jhost.lowering.ir.names import Names
from jhost.lowering.ir.operation import Operation
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport
from jhost.lowering.ir.statements import Buffer, Compute, Reshard, Set, Stmt
from jhost.lowering.layouts.hidden_dims import streamed_dims
from jhost.lowering.layouts.remarks import LayoutRemarks
from jhost.lowering.layouts.reshard import StepKind, plan_reshard
from jhost.lowering.layouts.solve import Solution, solve_layouts

_RESHARDED: Mapping[StepKind, str] = {
    "AllGather": "gathered",
    "AllReduce": "reduced",
    "ReduceScatter": "scattered",
    "AllToAll": "exchanged",
    "Select": "part",
    "SwapAxes": "swapped",
}


@dataclasses.dataclass(frozen=True, slots=True)
class PropagateLayouts:
    """A program with global shapes -> what one device of the mesh runs.

    What a pipeline that was chosen can hide counts after what it cannot.
    """

    name: ClassVar[str] = "propagate_layouts"

    def apply(self, program: Program) -> Program:
        shardings = {m.buffer: m for m in program.marks if isinstance(m, ShardMark)}
        streamed = streamed_dims(program)
        if not program.mesh.shape:
            return program
        solution = solve_layouts(program, shardings, streamed)
        remarks = LayoutRemarks(solution, shardings, dict(program.mesh.shape))
        return _Rewriter(program, solution, remarks).rewrite()


class _Rewriter:
    def __init__(
        self, program: Program, solution: Solution, explain: LayoutRemarks
    ) -> None:
        self.program = program
        self.solution = solution
        self.explain = explain
        self.remarks: list[LayoutReport | None] = []
        self.mesh = dict(program.mesh.shape)
        self.names = Names.of(program)
        self.body: list[Stmt] = []
        self.buffers: dict[str, Buffer] = {}
        self.resharded: dict[tuple[str, Layout], Buffer] = {}
        self.produced: dict[str, str] = {}
        kept = {result.name for result in program.results}
        kept |= {s.source.name for s in program.body if isinstance(s, Set)}
        makers = (op for op in solution.operations if op.makes_any_part)
        self.fills = {op.outs[0]: op for op in makers if op.outs[0] not in kept}

    def rewrite(self) -> Program:
        """The program with local shapes, and a `Reshard` wherever a layout changes."""
        params = tuple(self.at_rest(param) for param in self.program.params)
        for number, op in enumerate(self.solution.operations):
            if isinstance(op.stmt, Set):
                self.copy(op.stmt)
            elif self.fills.keys().isdisjoint(op.outs):
                self.compute(number, op, op.stmt)
        results = tuple(self.buffers[result.name] for result in self.program.results)
        return dataclasses.replace(
            self.program,
            params=params,
            results=results,
            body=tuple(self.body),
            marks=tuple(self.marks()),
            remarks=(*self.program.remarks, *filter(None, self.remarks)),
        )

    def marks(self) -> Iterator[Mark]:
        """The marks: a barrier's on what it makes, a fill's on all made of it."""
        for mark in self.program.marks:
            names = [mark.buffer]
            if isinstance(mark, BarrierMark):
                names = [self.produced.get(mark.buffer, mark.buffer)]
            if mark.buffer in self.fills:
                made = self.resharded.items()
                names = [copy.name for (value, _), copy in made if value == mark.buffer]
            yield from (dataclasses.replace(mark, buffer=name) for name in names)

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
        """A copy, of what an operation has had moved there if there is such a value."""
        name, out = stmt.source.name, self.at_rest(stmt.out)
        source = self.resharded.get((name, layout_of(out)), self.buffers[name])
        self.remarks.append(self.explain.copy(stmt, layout_of(source)))
        alike = layout_of(source) == layout_of(out) and not source.partial
        kind = Set if alike else Reshard
        self.body.append(kind(out=out, source=source))

    def compute(self, number: int, op: Operation, stmt: Compute) -> None:
        assignment = self.solution.assignments[number]
        said = len(self.remarks)
        ins = tuple(
            self.operand(number, position, op.required(position, assignment))
            for position in range(len(stmt.ins))
        )
        outs: list[Buffer] = []
        moved: list[Reshard] = []
        for position, buffer in enumerate(stmt.outs):
            rest = self.at_rest(buffer)
            produced = self.place(buffer, *op.produced(position, assignment))
            if produced != rest:
                suffix = "partial" if produced.partial else "produced"
                name = self.names.fresh(f"{buffer.name}_{suffix}")
                produced = dataclasses.replace(produced, name=name)
                self.produced[buffer.name] = name
                moved.append(Reshard(out=rest, source=produced))
                self.remarks.append(self.explain.result(number, position, produced))
            outs.append(produced)
        if not any(self.remarks[said:]):
            self.remarks.append(self.explain.left_whole(number))
        (unit_eqn,) = stmt.unit.eqns
        unit_eqn = dataclasses.replace(unit_eqn, axes=assignment)
        unit = dataclasses.replace(stmt.unit, eqns=(unit_eqn,))
        self.body.append(
            dataclasses.replace(stmt, unit=unit, ins=ins, outs=tuple(outs))
        )
        self.body.extend(moved)

    def operand(self, number: int, position: int, layout: Layout) -> Buffer:
        """An operand in `layout`, made or copied once however many read it so."""
        value = self.solution.operations[number].ins[position]
        if (value, layout) in self.resharded:
            return self.resharded[value, layout]
        if value in self.fills:
            target = self.made(self.fills[value], layout)
        elif (have := layout_of(source := self.buffers[value])) == layout:
            return source
        else:
            (*_, last) = plan_reshard(have, layout, (), self.mesh)
            name = self.names.fresh(f"{value}_{_RESHARDED[last.kind]}")
            whole = self.solution.costs.buffers[value]
            target = self.place(whole, layout, name=name)
            self.body.append(Reshard(out=target, source=source))
            self.remarks.append(self.explain.operand(number, position, have))
        self.resharded[value, layout] = target
        return target

    def made(self, op: Operation, layout: Layout) -> Buffer:
        """The result of an operation that reads nothing, made in `layout`."""
        assert isinstance(op.stmt, Compute)
        (eqn,), (out,) = op.stmt.unit.eqns, op.stmt.outs
        var = fresh_var(eqn.eqn.outvars[0].aval)
        unit_eqn = dataclasses.replace(
            eqn, eqn=eqn.eqn.replace(outvars=[var]), axes=op.making(layout)
        )
        unit = dataclasses.replace(op.stmt.unit, eqns=(unit_eqn,), outvars=(var,))
        target = self.place(out, layout, name=self.names.fresh(out.name))
        self.body.append(dataclasses.replace(op.stmt, unit=unit, outs=(target,)))
        return target
