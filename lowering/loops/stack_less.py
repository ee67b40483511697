"""A scan stacks only what another scan cannot cheaply compute from the rest.

In JAX the scan of a forward stacks everything that the backward's scan reads, such as
the six inner values of a SwiGLU.  This pass removes cheap values from the stacks.  The
scan that reads them computes them again, slice by slice.

Six layers of Llama 8B without `jax.checkpoint` then take 4.1 GB of temporary memory on
two H200s instead of 7.9 GB, and 5 % less time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import ClassVar

from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.border import Crossing, scan_border, with_scan_border
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.least_cut import least_cut, needed
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.statements import Buffer, Dim, Scan, Stmt
from jhost.lowering.schedule.compute_again import (
    Cheap,
    is_cheap,
    made_by,
    operands,
    renamed,
)
from jhost.lowering.streams.plan import with_plan_of


@dataclasses.dataclass(frozen=True, slots=True)
class StackLess(EachProgram):
    """A scan that stacks, and one that slices -> the same, with fewer bytes stacked."""

    name: ClassVar[str] = "stack_less"

    def sees(self, program: Program) -> object:
        return None

    def change(self, program: Program) -> Program:
        if not any(isinstance(stmt, Scan) for stmt in program.body):
            return program
        names, sliced = FreshNames.of(program), _only_sliced(program)
        found: list[_Recipe] = []
        body: list[Stmt] = []
        for stmt in program.body:
            if isinstance(stmt, Scan):
                # This scan may slice the stacks of several scans.
                for recipe in found:
                    stmt = _Reading(stmt, recipe).computing_again()
                if recipe := _Stacking(stmt).recipe(sliced, names):
                    found.append(recipe)
                    stmt = recipe.scan
            body.append(stmt)
        if not found:
            return program
        return with_plan_of(program, dataclasses.replace(program, body=tuple(body)))


def _only_sliced(program: Program) -> set[str]:
    """The stacks that nothing but scans read, slice by slice."""
    stacked: set[str] = set()
    others = {b.name for b in program.results} | {mark.buffer for mark in program.marks}
    for stmt in program.body:
        whole: Iterable[Buffer] = reads_writes(stmt)[0]
        if isinstance(stmt, Scan):
            stacked |= {y.name for y in stmt.ys}
            whole = (*stmt.consts, *stmt.carry)
        others |= {buffer.name for buffer in whole}
    return stacked - others


# --- The scan that stacks ----------------------------------------------------------- #


@dataclasses.dataclass(frozen=True, slots=True)
class _Recipe:
    """How other scans compute what `scan` no longer stacks for them.

    Attributes:
        scan: the scan with fewer stacks.
        left_out: for each removed stack, the value of the body that it had.
        again: the statements that compute those values.
        slices: the stacks that they can read slices of, by the body's names.
        constants: the values that they can read whole, by the body's names.
    """

    scan: Scan
    left_out: Mapping[str, str]
    again: Sequence[Cheap]
    slices: Mapping[str, Buffer]
    constants: Mapping[str, Buffer]


class _Stacking:
    """The values that a scan stacks, and all others of its body."""

    def __init__(self, scan: Scan) -> None:
        body, border = scan.body, scan_border(scan)
        self.scan, self.border = scan, border
        self.constants = _outside(border.consts)
        self.slices = _outside(border.xs)
        self.buffers = {b.name: b for b in body.params}
        self.buffers |= {b.name: b for s in body.body for b in reads_writes(s)[1]}
        self.cheap = [stmt for stmt in body.body if is_cheap(stmt)]

    def recipe(self, sliced: Container[str], names: FreshNames) -> _Recipe | None:
        """The scan with the fewest bytes stacked, or None if it has them already."""
        kept, again = self.cut(sliced)
        ys = self.border.ys
        left_out = {y.name: part.name for y, part in ys if part.name in again}
        if not left_out:
            return None
        known = {*self.constants, *self.slices, *_outside(ys)}
        # Values that the scan did not stack, but that take fewer bytes than the values
        # made of them.
        more = [name for name in self.buffers if name in kept and name not in known]
        stacked = [each for each in ys if each.outside.name not in left_out]
        stacked += [self.stack(name, names) for name in more]
        return _Recipe(
            scan=self.stacking(stacked),
            left_out=left_out,
            again=[stmt for stmt in self.cheap if made_by(stmt).name in again],
            slices={**self.slices, **_outside(stacked)},
            constants=self.constants,
        )

    def cut(self, sliced: Container[str]) -> tuple[set[str], set[str]]:
        """The values to stack or to take from outside, and those to compute again."""
        wanted = {part.name for y, part in self.border.ys if y.name in sliced}
        free = {part.name for y, part in self.border.ys if y.name not in sliced}
        # The other scan can read these from outside, as this scan does.
        free |= {*self.constants, *self.slices}
        made_of = {
            made_by(s).name: operands(s)
            for s in self.cheap
            if made_by(s).name not in free
        }
        kept = least_cut(
            wanted, made_of, lambda name: 0 if name in free else self.size(name)
        )
        return kept, set(needed(wanted, made_of, kept)) - kept

    def size(self, name: str) -> int:
        return bytes_of(self.buffers[name])

    def stack(self, name: str, names: FreshNames) -> Crossing:
        buffer = self.buffers[name]
        stacked = dataclasses.replace(
            buffer,
            name=names.fresh(f"{name}_stacked"),
            shape=(self.scan.length, *buffer.shape),
            dims=(Dim(), *buffer.dims),
        )
        return Crossing(outside=stacked, inside=buffer)

    def stacking(self, ys: Sequence[Crossing]) -> Scan:
        """The scan with exactly these stacks."""
        border = dataclasses.replace(self.border, ys=tuple(ys))
        scan = with_scan_border(self.scan, self.scan.body, border)
        body = dataclasses.replace(scan.body, body=_without_unread(scan.body))
        return dataclasses.replace(scan, body=body)


def _outside(crossings: Sequence[Crossing]) -> dict[str, Buffer]:
    """The values outside of a body, by the names that they have in it."""
    return {inside.name: outside for outside, inside in crossings}


def _without_unread(program: Program) -> tuple[Stmt, ...]:
    """The statements of a program without cheap ones that nothing reads."""
    read = {b.name for b in program.results} | {mark.buffer for mark in program.marks}
    kept: list[Stmt] = []
    for stmt in reversed(program.body):
        reads, writes = reads_writes(stmt)
        # Only cheap ones go: other statements may be there for their effects.
        if not is_cheap(stmt) or any(buffer.name in read for buffer in writes):
            read |= {buffer.name for buffer in reads}
            kept.append(stmt)
    return tuple(reversed(kept))


# --- The scans that read slices ----------------------------------------------------- #


class _Reading:
    """A scan that slices what another scan, by its `recipe`, may no longer stack.

    `made` has this body's buffers for values of the other body, by their names there.
    `same` has the buffers that replace params of slices that are gone.
    """

    def __init__(self, scan: Scan, recipe: _Recipe) -> None:
        self.scan, self.recipe = scan, recipe
        self.names = FreshNames.of(scan.body)
        self.border = scan_border(scan)
        self.consts = [*self.border.consts]
        self.xs: list[Crossing] = []
        self.made: dict[str, Buffer] = {}
        self.same: dict[str, Buffer] = {}
        for each in self.border.xs:
            if (name := recipe.left_out.get(each.outside.name)) is None:
                self.xs.append(each)
            else:
                # Two params may be slices of one stack; both become one buffer.
                param = each.inside
                self.same[param.name] = self.made.setdefault(name, param)

    def computing_again(self) -> Scan:
        """The scan with statements that compute what is no longer stacked for it."""
        if not self.made:
            return self.scan
        body, needed = self.scan.body, _needed_for(self.made, self.recipe.again)
        copies = [self.copy(stmt) for stmt in needed]
        old = (replace_buffers(stmt, self.same) for stmt in body.body)
        border = dataclasses.replace(
            self.border,
            consts=tuple(self.consts),
            xs=tuple(self.xs),
            carried=self.leaving(self.border.carried),
            ys=self.leaving(self.border.ys),
        )
        body = dataclasses.replace(body, body=(*copies, *old))
        return with_scan_border(self.scan, body, border)

    def leaving(self, crossings: Iterable[Crossing]) -> tuple[Crossing, ...]:
        """Crossings out of the body, without params that are gone."""
        return tuple(
            Crossing(outside, self.same.get(inside.name, inside))
            for outside, inside in crossings
        )

    def copy(self, stmt: Cheap) -> Stmt:
        """A statement of the other body, on this body's buffers for its operands."""
        for buffer in reads_writes(stmt)[0]:
            if buffer.name not in self.made:
                self.made[buffer.name] = self.param(buffer)
        out = made_by(stmt)
        fresh = dataclasses.replace(out, name=self.names.fresh(f"{out.name}_again"))
        return renamed(stmt, self.made, self.made.setdefault(out.name, fresh))

    def param(self, buffer: Buffer) -> Buffer:
        """This body's param for a param of the other body; a new one if it has none."""
        constant = self.recipe.constants.get(buffer.name)
        whole = constant or self.recipe.slices[buffer.name]
        crossings = self.consts if constant else self.xs
        for outside, param in crossings:
            if outside.name == whole.name:
                return param
        param = dataclasses.replace(buffer, name=self.names.fresh(buffer.name))
        crossings.append(Crossing(whole, param))
        return param


def _needed_for(names: Iterable[str], stmts: Sequence[Cheap]) -> list[Cheap]:
    """The `stmts` that make `names`, and those that make their operands."""
    read, found = set(names), list[Cheap]()
    for stmt in reversed(stmts):
        if made_by(stmt).name in read:
            read |= set(operands(stmt))
            found.append(stmt)
    return found[::-1]
