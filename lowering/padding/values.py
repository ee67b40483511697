"""Write a region's padding into a program: pads, cuts, and masks where it counts.

A value that enters the region is padded, once for all its readers, and a value that
leaves it is cut.  Inside, the padding may hold anything, such as the logarithm of 0.
So where an operation reduces the dim, the reducer's identity replaces the padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jhost._jax import resized_var
from jhost.lowering.ir.bodies import CONTROL_FLOW, with_bodies
from jhost.lowering.ir.border import with_values
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.names import FreshNames, local_name
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.statements import Buffer, Compute, ControlFlow, Stmt
from jhost.lowering.padding.flat import CrossingValue, OperandsOfBody, OperandsOfBorder
from jhost.lowering.padding.marks import move_marks
from jhost.lowering.padding.operands import Operands
from jhost.lowering.padding.region import PaddedRegion, PadRequest, plan_region
from jhost.lowering.rules.dim_rule import Dims, shape_of
from jhost.lowering.rules.reducers import Reducer, identity
from jhost.lowering.units.make import computes_of

_Version: TypeAlias = tuple[str, tuple[int, ...], Any, tuple[int, ...]]


def pad_program(program: Program, requests: Sequence[PadRequest]) -> Program:
    """`program` with padding where the requested dims do not come in equal parts."""
    region = plan_region(program, requests)
    if region is None or not region.ratios:
        return program
    return _Padder(region, region.body).program_with_padding()


class _Padder:
    """Pads one program of a region; its params may come padded."""

    def __init__(self, region: PaddedRegion, flat: OperandsOfBody) -> None:
        self.region = region
        self.flat = flat
        self.program = flat.program
        self.mesh = dict(self.program.mesh.shape)
        self.names = FreshNames.of(self.program)
        self.results = {
            each.buffer.name
            for each in flat.results
            if self.shape(each) == each.buffer.shape
        }
        self.body: list[Stmt] = []
        # Whatever makes a value keeps it in the size of the region; readers adapt it.
        self.kept = {each.buffer.name: self.crossed(each) for each in flat.params}
        self.versions: dict[_Version, Buffer] = {}
        self.padded: dict[str, list[Buffer]] = {}
        self.read_unpadded: set[str] = set()

    def program_with_padding(self) -> Program:
        for stmt, step in zip(self.program.body, self.flat.steps, strict=True):
            if isinstance(step, OperandsOfBorder):
                assert isinstance(stmt, CONTROL_FLOW)
                self.control_flow(stmt, step)
            elif (op := self.region.operands[step]) is None:
                self.body.append(stmt)
            else:
                self.statement(step, stmt, op)
        results = tuple(map(self.crossing, self.flat.results))
        notes = [
            self.note(request, size)
            for request, size in self.region.requests.items()
            if request.buffer == self.flat.prefix + local_name(request.buffer)
        ]
        program = dataclasses.replace(
            self.program,
            params=tuple(map(self.crossed, self.flat.params)),
            results=results,
            body=tuple(self.body),
            remarks=(*self.program.remarks, *notes),
        )
        return move_marks(program, self.padded, self.read_unpadded)

    # --- Bodies ------------------------------------------------------------------- #

    def shape(self, value: CrossingValue) -> tuple[int, ...]:
        """The shape in which a value crosses a border."""
        return self.region.shape(value.number, value.dims, value.buffer.shape)

    def crossed(self, value: CrossingValue) -> Buffer:
        """A value behind a border."""
        return dataclasses.replace(value.buffer, shape=self.shape(value))

    def crossing(self, value: CrossingValue) -> Buffer:
        """A value before a border, in the size in which it crosses."""
        return self.version(value.buffer, self.shape(value))

    def control_flow(self, stmt: ControlFlow, border: OperandsOfBorder) -> None:
        ins = [tuple(map(self.crossing, each.enters)) for each in border.bodies]
        bodies = [
            _Padder(self.region, each).program_with_padding() for each in border.bodies
        ]
        outs = tuple(self.made(each.buffer, self.shape(each)) for each in border.outs)
        self.body.append(with_values(with_bodies(stmt, bodies), ins, outs))
        self.cut_results([each.buffer for each in border.outs])

    # --- Statements in a row ------------------------------------------------------ #

    def statement(self, number: int, stmt: Stmt, op: Operands) -> None:
        """`stmt` on values of the sizes that it has in the region."""
        before, writes = reads_writes(stmt)
        reads = [
            self.operand(number, op, position, buffer)
            for position, buffer in enumerate(before)
        ]
        made = [
            self.made(buffer, self.region.shape(number, dims, buffer.shape))
            for buffer, dims in zip(writes, op.results, strict=True)
        ]
        if isinstance(stmt, Compute):
            stmt = self.resized(number, stmt, reads)
            stmt = dataclasses.replace(stmt, ins=tuple(reads), outs=tuple(made))
        else:
            pairs = zip((*before, *writes), (*reads, *made), strict=True)
            stmt = replace_buffers(stmt, {old.name: new for old, new in pairs})
        self.body.append(stmt)
        self.cut_results(writes)

    def cut_results(self, made: Sequence[Buffer]) -> None:
        """Cut the values `made` that leave in the user's sizes."""
        for buffer in made:
            kept = self.kept[buffer.name]
            if kept.name != buffer.name:
                version = buffer.name, buffer.shape, _any_fill(buffer), ()
                self.versions[version] = self.cut(kept, buffer.shape, buffer)

    def resized(self, number: int, stmt: Compute, reads: Sequence[Buffer]) -> Compute:
        """`stmt` with as many steps in its rule as it has in the region.

        Its equation keeps the parameters: `rebind` goes by the rule.
        """
        (unit_eqn,) = stmt.unit.eqns
        eqn, rule = unit_eqn.eqn, unit_eqn.rule
        sizes = tuple(
            int(size * self.region.ratio(number, factor))
            for factor, size in enumerate(rule.sizes)
        )
        shapes = {
            id(var): buffer.shape
            for var, buffer in zip(stmt.unit.invars, reads, strict=True)
        }
        if sizes == rule.sizes and all(
            buffer.shape == read.shape
            for buffer, read in zip(stmt.ins, reads, strict=True)
        ):
            return stmt
        invars = [
            atom if isinstance(atom, Literal) else resized_var(atom, shapes[id(atom)])
            for atom in eqn.invars
        ]
        outvars = self.variables(number, eqn.outvars, rule.results)
        renamed = dict(zip(map(id, eqn.invars), invars, strict=True))
        unit_eqn = dataclasses.replace(
            unit_eqn,
            eqn=eqn.replace(invars=invars, outvars=outvars),
            rule=dataclasses.replace(rule, sizes=sizes),
        )
        unit = dataclasses.replace(
            stmt.unit,
            eqns=(unit_eqn,),
            invars=tuple(renamed[id(var)] for var in stmt.unit.invars),
            outvars=tuple(outvars),
        )
        return dataclasses.replace(stmt, unit=unit)

    def variables(
        self, number: int, atoms: Sequence[Any], maps: Sequence[Dims]
    ) -> list[Any]:
        """Variables of the types that values have in the region."""
        return [
            atom
            if isinstance(atom, Literal)
            else resized_var(atom, self.region.shape(number, dims, shape_of(atom)))
            for atom, dims in zip(atoms, maps, strict=True)
        ]

    # --- Values ------------------------------------------------------------------- #

    def made(self, buffer: Buffer, shape: tuple[int, ...]) -> Buffer:
        """What a statement makes in the place of `buffer`, with its `shape`."""
        made = dataclasses.replace(buffer, shape=shape)
        # What leaves in the user's size has that under its name.
        if made != buffer and buffer.name in self.results:
            made = self.named(made, "padded")
            self.padded[buffer.name] = [made]
        self.kept[buffer.name] = made
        return made

    def operand(
        self, number: int, op: Operands, position: int, buffer: Buffer
    ) -> Buffer:
        """A value in the sizes that a statement wants; reduced dims end neutrally."""
        dims = op.operands[position]
        shape = self.region.shape(number, dims, buffer.shape)
        # Windows count from the start of a dim, so they take it as long as it is,
        # uncopied.
        if op.windows and op.windows[position]:
            kept = self.kept[buffer.name].shape
            shape = tuple(
                kept[dim] if dim in op.windows[position] else size
                for dim, size in enumerate(shape)
            )
        reduced: dict[int, Reducer] = {
            dim: reducer
            for dim, mapped in enumerate(dims)
            if mapped is not None and shape[dim] > buffer.shape[dim]
            if (reducer := op.reducers[mapped.factor]) is not None
        }
        # An equation has one reducer, so all that is reduced here ends alike.
        (reducer,) = set(reduced.values()) or {None}
        return self.version(buffer, shape, reducer, tuple(reduced))

    def version(
        self,
        buffer: Buffer,
        shape: tuple[int, ...],
        reducer: Reducer | None = None,
        reduced: tuple[int, ...] = (),
    ) -> Buffer:
        """`buffer` with `shape`, made once for all who want the same."""
        kept = self.kept[buffer.name]
        masked = tuple(d for d in reduced if kept.shape[d] > buffer.shape[d])
        # It has that size already, with padding that no reduction reads.
        if kept.shape == shape and not masked:
            if shape == buffer.shape:
                self.read_unpadded.add(buffer.name)
            return kept
        # Anything would do where nothing reduces the dim.
        fill = _any_fill(buffer) if reducer is None else identity(reducer, buffer.dtype)
        wanted = buffer.name, shape, fill, masked
        if wanted not in self.versions:
            self.versions[wanted] = self.fitted(buffer, shape, fill, masked)
        return self.versions[wanted]

    def fitted(
        self,
        buffer: Buffer,
        shape: tuple[int, ...],
        fill: Any,
        masked: Sequence[int],
    ) -> Buffer:
        """A value cut, then padded, then with its padding made `fill`."""
        value = self.kept[buffer.name]
        smaller = tuple(map(min, value.shape, shape))
        if smaller != value.shape:
            value = self.cut(value, smaller)
        if shape != value.shape:
            value = self.pad(value, shape, fill)
            self.padded.setdefault(buffer.name, []).append(value)
        for dim in masked:
            value = self.mask(value, dim, buffer.shape[dim], fill)
        return value

    # --- Statements of padding ---------------------------------------------------- #

    def pad(self, value: Buffer, shape: tuple[int, ...], fill: Any) -> Buffer:
        more = [(0, n - old, 0) for n, old in zip(shape, value.shape, strict=True)]
        out = self.named(dataclasses.replace(value, shape=shape), "padded")
        self.body += computes_of(
            "padding",
            lambda x: lax.pad(x, fill, more),
            [value],
            [out],
            self.names,
            pads=True,
        )
        return out

    def cut(
        self, value: Buffer, shape: tuple[int, ...], out: Buffer | None = None
    ) -> Buffer:
        if out is None:
            out = self.named(dataclasses.replace(value, shape=shape), "cut")
        # Padding is at the end of each dim.
        first = (0,) * len(shape)
        return self.computed("cut", lambda x: lax.slice(x, first, shape), value, out)

    def mask(self, value: Buffer, dim: int, size: int, fill: Any) -> Buffer:
        def masked(x: jax.Array) -> jax.Array:
            # A select, not a product: NaN and infinity in the padding times 0 are NaN.
            count = lax.broadcasted_iota(np.int32, x.shape, dim)
            filled = lax.full(x.shape, fill, x.dtype)
            return lax.select(lax.lt(count, np.int32(size)), x, filled)

        return self.computed("mask", masked, value, self.named(value, "masked"))

    def computed(
        self, name: str, fun: Callable[[Any], Any], source: Buffer, out: Buffer
    ) -> Buffer:
        self.body += computes_of(name, fun, [source], [out], self.names)
        return out

    def named(self, buffer: Buffer, suffix: str) -> Buffer:
        name = self.names.fresh(f"{buffer.name}_{suffix}")
        return dataclasses.replace(buffer, name=name)

    def note(self, request: PadRequest, new: int) -> Note:
        axes = " and ".join(f"{axis} ({self.mesh[axis]})" for axis in request.axes)
        do = "does" if len(request.axes) == 1 else "do"
        text = f"dim {request.dim} of {{}} padded from {request.size} to {new}"
        text = f"{text}: {axes} {do} not divide {request.size}"
        value = local_name(request.buffer)
        return Note(form=text, where=request.where, values=(value,))


def _any_fill(buffer: Buffer) -> Any:
    """What fills padding that nothing reads, or that is not there."""
    return np.zeros((), buffer.dtype)[()]
