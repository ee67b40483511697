"""Write decided layouts into a program: local shapes, and reshards.

A value changes its layout by a `Reshard`, which `convert_to_communications` turns into
communications.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence

from jhost.lowering.ir.bodies import with_bodies
from jhost.lowering.ir.border import with_values
from jhost.lowering.ir.layout import (
    Layout,
    Partial,
    axes_size,
    dims_of,
    layout_of,
    local_shape,
)
from jhost.lowering.ir.marks import BarrierMark, Mark
from jhost.lowering.ir.names import FreshNames, local_name
from jhost.lowering.ir.operation import OperandWindow, Operation
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Remark
from jhost.lowering.ir.statements import (
    Buffer,
    Compute,
    Cond,
    ControlFlow,
    Neighbours,
    Reshard,
    Scan,
    Set,
    Stmt,
    While,
)
from jhost.lowering.layouts.flat_bodies import FlatBody, FlatBorder
from jhost.lowering.layouts.halo import plan_halo
from jhost.lowering.layouts.hidden_dims import streamed_dims
from jhost.lowering.layouts.interned import Interned
from jhost.lowering.layouts.remarks import LayoutRemarks
from jhost.lowering.layouts.reshard import ReshardKind, plan_reshard
from jhost.lowering.layouts.solve import Solution

_RESHARDED: Mapping[ReshardKind, str] = {
    "AllGather": "gathered",
    "AllReduce": "reduced",
    "ReduceScatter": "scattered",
    "AllToAll": "exchanged",
    "Select": "part",
    "SwapAxes": "swapped",
}


class Rewriter:
    """Writes the layouts of one program and of the bodies in it."""

    def __init__(
        self,
        flat: FlatBody,
        solution: Solution,
        explain: LayoutRemarks,
        written: Interned,
    ) -> None:
        self.written = written
        self.program, self.prefix = flat.program, flat.prefix
        self.flat = flat
        self.solution = solution
        self.explain = explain
        self.remarks: list[Remark | None] = []
        self.mesh = dict(self.program.mesh.shape)
        self.names = FreshNames.of(self.program)
        self.body: list[Stmt] = []
        self.buffers: dict[str, Buffer] = {}
        self.resharded: dict[tuple[str, Layout], Buffer] = {}
        self.windows: dict[Hashable, Buffer] = {}
        self.produced: dict[str, str] = {}
        kept = {self.prefix + result.name for result in self.program.results}
        # A fill that is copied, or is a result, has to exist by itself.
        kept |= {
            self.prefix + s.source.name for s in self.program.body if isinstance(s, Set)
        }
        numbers = (step for step in flat.steps if isinstance(step, int))
        makers = (op for op in map(solution.operations.__getitem__, numbers))
        # Other fills are made again for each layout in which they are read.  So no
        # bytes move, and no device makes more than its part.
        self.fills = {
            op.outs[0]: op
            for op in makers
            if op.makes_any_part and op.outs[0] not in kept
        }

    def rewrite(self, leaves: Sequence[int] | None = None) -> Program:
        """The program with local shapes, and a `Reshard` wherever a layout changes.

        The operations `leaves` say in which layouts results leave a body.
        """
        params = tuple(self.at_rest(param) for param in self.program.params)
        for stmt, step in zip(self.program.body, self.flat.steps, strict=True):
            if isinstance(step, FlatBorder):
                assert isinstance(stmt, Scan | While | Cond)
                self.control_flow(stmt, step)
            elif isinstance(stmt, Set):
                assert step is not None
                self.copy(step, stmt)
            elif isinstance(stmt, Compute):
                assert step is not None
                if self.fills.keys().isdisjoint(self.solution.operations[step].outs):
                    self.compute(step, stmt)
        if leaves is None:
            names = (self.prefix + result.name for result in self.program.results)
            results = tuple(self.buffers[name] for name in names)
        else:
            results = tuple(self.leaving(number) for number in leaves)
        return dataclasses.replace(
            self.program,
            params=params,
            results=results,
            body=tuple(self.body),
            marks=tuple(self.marks(self.program.marks)),
            remarks=(*self.program.remarks, *filter(None, self.remarks)),
            streamed=streamed_dims(self.program),
        )

    # --- Control flow --------------------------------------------------------- #

    def control_flow(self, stmt: ControlFlow, border: FlatBorder) -> None:
        """Append `stmt` with rewritten bodies, on operands in the layouts they want."""
        ins = [
            tuple(self.required(number) for number in enters)
            for enters in border.enters
        ]
        bodies = [
            self.rewritten(flat, leaves)
            for flat, leaves in zip(border.bodies, border.leaves, strict=True)
        ]
        outs, moved = self.results(border.outs, stmt.outs)
        self.body.append(with_values(with_bodies(stmt, bodies), ins, outs))
        self.body.extend(moved)

    def rewritten(self, flat: FlatBody, leaves: Sequence[int]) -> Program:
        """A body with its layouts."""
        inner = Rewriter(flat, self.solution, self.explain, self.written)
        return self.written.body(flat, inner.rewrite(leaves))

    def leaving(self, number: int) -> Buffer:
        """A result of a body, in the layout that it has outside."""
        return self.required(number)

    def required(self, number: int) -> Buffer:
        """The only operand of an operation, in the layout that it wants."""
        return self.operand(number, 0, self.solution.wanted(number))

    def marks(self, given: Sequence[Mark]) -> Iterator[Mark]:
        """The marks: a barrier's on its own result, a fill's on all its copies."""
        for mark in given:
            names, value = [mark.buffer], self.prefix + mark.buffer
            if isinstance(mark, BarrierMark):
                names = [self.produced.get(mark.buffer, mark.buffer)]
            if value in self.fills:
                made = self.resharded.items()
                names = [copy.name for (name, _), copy in made if name == value]
            yield from (dataclasses.replace(mark, buffer=name) for name in names)

    def at_rest(self, buffer: Buffer) -> Buffer:
        """`buffer` in the layout that the solution gives it."""
        name = self.prefix + buffer.name
        placed = self.laid_out(buffer, self.solution.layouts[name])
        self.buffers[name] = placed
        return placed

    def laid_out(
        self, buffer: Buffer, layout: Layout, partial: Partial = (), name: str = ""
    ) -> Buffer:
        return Buffer(
            name=name or buffer.name,
            shape=local_shape(buffer.shape, layout, self.mesh),
            dtype=buffer.dtype,
            dims=dims_of(layout),
            partial=partial,
            memory_space=buffer.memory_space,
        )

    def copy(self, number: int, stmt: Set) -> None:
        """Append a copy of a value, or of its copy in that layout if there is one."""
        name, out = self.prefix + stmt.source.name, self.at_rest(stmt.out)
        source = self.resharded.get((name, layout_of(out)), self.buffers[name])
        self.remarks.append(self.explain.copy(number, layout_of(source)))
        alike = layout_of(source) == layout_of(out) and not source.partial
        kind = Set if alike else Reshard
        self.body.append(kind(out=out, source=source))

    def compute(self, number: int, stmt: Compute) -> None:
        op, assignment = (
            self.solution.operations[number],
            self.solution.assignments[number],
        )
        said = len(self.remarks)
        ins = [
            self.operand(number, position, op.required(position, assignment))
            for position in range(len(stmt.ins))
        ]
        joined = op.exchanges(assignment, self.mesh)
        for window in () if joined else op.windows:
            ins[window.operand] = self.window(ins[window.operand], window, number)
        outs, moved = self.results([number] * len(stmt.outs), stmt.outs)
        # One remark for a statement is enough; a move matters more than a whole dim.
        if not any(self.remarks[said:]):
            self.remarks.append(self.explain.left_whole(number))
        self.remarks.append(self.explain.replication(number))
        if joined:
            self.body += [self.joined(number, ins, *outs), *moved]
            return
        (unit_eqn,) = stmt.unit.eqns
        unit_eqn = dataclasses.replace(unit_eqn, axes=assignment)
        unit = dataclasses.replace(stmt.unit, eqns=(unit_eqn,))
        self.body.append(
            dataclasses.replace(stmt, unit=unit, ins=tuple(ins), outs=outs)
        )
        self.body.extend(moved)

    def joined(self, number: int, ins: Sequence[Buffer], out: Buffer) -> Neighbours:
        """The result of an operation that joins elements of its operands."""
        joined = self.solution.operations[number].joined
        assert joined is not None
        return Neighbours(
            out=out,
            sources=tuple(ins[n] for n, _ in joined.reads),
            dim=joined.dim,
            axes=self.solution.assignments[number][joined.factor],
            reads=tuple(reads for _, reads in joined.reads),
            count=out.shape[joined.dim],
        )

    def window(self, source: Buffer, window: OperandWindow, number: int) -> Buffer:
        """The window of an operand that a device's steps of an operation read."""
        axes = self.solution.assignments[number][window.factor]
        devices = axes_size(axes, self.mesh)
        if devices == 1:
            return source
        sizes, dim, reads = (
            self.solution.operations[number].sizes,
            window.dim,
            window.reads,
        )
        count, part = sizes[window.factor] // devices, source.shape[dim]
        if plan_halo(reads, count, part, devices).is_own(part):
            return source
        key = source.name, dim, axes, reads, count
        if key not in self.windows:
            shape = [*source.shape[:dim], reads.window(count), *source.shape[dim + 1 :]]
            name = self.names.fresh(f"{source.name}_window")
            out = dataclasses.replace(source, name=name, shape=tuple(shape))
            self.windows[key] = out
            self.body.append(
                Neighbours(
                    out=out,
                    sources=(source,),
                    dim=dim,
                    axes=axes,
                    reads=(reads,),
                    count=count,
                )
            )
        return self.windows[key]

    def results(
        self, numbers: Sequence[int], buffers: Sequence[Buffer]
    ) -> tuple[tuple[Buffer, ...], list[Reshard]]:
        """Results as the operations make them, and reshards to where they rest."""
        outs: list[Buffer] = []
        moved: list[Reshard] = []
        for number, buffer in zip(numbers, buffers, strict=True):
            op = self.solution.operations[number]
            position = op.outs.index(self.prefix + buffer.name)
            rest = self.at_rest(buffer)
            assignment = self.solution.assignments[number]
            produced = self.laid_out(buffer, *op.produced(position, assignment))
            if op.forwards:
                produced = rest
            if produced != rest:
                suffix = "partial" if produced.partial else "produced"
                name = self.names.fresh(f"{buffer.name}_{suffix}")
                produced = dataclasses.replace(produced, name=name)
                self.produced[buffer.name] = name
                moved.append(Reshard(out=rest, source=produced))
                self.remarks.append(self.explain.result(number, position, produced))
            outs.append(produced)
        return tuple(outs), moved

    def operand(self, number: int, position: int, layout: Layout) -> Buffer:
        """An operand in `layout`, made or moved once for all that read it there."""
        value = self.solution.operations[number].ins[position]
        if (value, layout) in self.resharded:
            return self.resharded[value, layout]
        if value in self.fills:
            target = self.made(self.fills[value], layout)
        elif layout_of(source := self.buffers[value]) == layout:
            return source
        else:
            source = self.nearest(value, layout)
            have = layout_of(source)
            # Named after the last step, as `x_gathered`.
            (*_, last) = plan_reshard(have, layout, (), self.mesh)
            name = local_name(value)
            name = self.names.fresh(f"{name}_{_RESHARDED[last.kind]}")
            whole = self.solution.costs.buffers[value]
            target = self.laid_out(whole, layout, name=name)
            self.body.append(Reshard(out=target, source=source))
            self.remarks.append(self.explain.operand(number, position, have))
        self.resharded[value, layout] = target
        return target

    def nearest(self, value: str, layout: Layout) -> Buffer:
        """The value where it rests, or one of its copies, whichever is nearest."""
        copies = [copy for (name, _), copy in self.resharded.items() if name == value]
        # Its resting place comes first, because `nearest` takes the first of equals.
        there = {layout_of(copy): copy for copy in (self.buffers[value], *copies)}
        return there[self.solution.costs.nearest(value, [*there], layout)]

    def made(self, op: Operation, layout: Layout) -> Buffer:
        """The result of a fill, made in `layout`."""
        fill = self.written.fill(op, layout)
        (out,) = fill.outs
        target = self.laid_out(out, layout, name=self.names.fresh(out.name))
        self.body.append(dataclasses.replace(fill, outs=(target,)))
        return target
