"""A scan whose carry stays partial: no iteration reduces the sum that it carries."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Sequence

from jhost.lowering.ir.border import scan_border, with_scan_border
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.layout import Partial
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.statements import Buffer, Compute, Reshard, Scan, Stmt
from jhost.lowering.layouts.commute import reduced_last
from jhost.lowering.layouts.draft import Draft, is_reduction


def carrying_partial(
    stmt: Scan, zeros: Container[str]
) -> tuple[Scan, dict[int, Partial]] | None:
    """The scan with every carry partial that can be, and the axes of each."""
    kept: dict[int, Partial] = {}
    partials = [
        tuple(sorted(each.source.partial))
        for each in stmt.body.body
        if is_reduction(each)
    ]
    # One set of axes after another: a carry is partial over a single set.
    for partial in dict.fromkeys(partials):
        carry = _PartialCarry(stmt, partial, zeros)
        numbers = [number for number in carry.begun if carry.stays_partial(number)]
        kept |= dict.fromkeys(numbers, partial)
        stmt = carry.scan(numbers)
    return (stmt, kept) if kept else None


class _PartialCarry:
    """A scan whose body begins with reductions of the partial sums that it carries.

    If such a reduction can be carried behind all additions to the sum, no iteration has
    to make it.  The first value of the sum is added behind the scan.  So the carry must
    only be added to, unless its first value is one of `zeros`.
    """

    def __init__(self, stmt: Scan, partial: Partial, zeros: Container[str]) -> None:
        self.stmt, self.partial, self.border = stmt, partial, scan_border(stmt)
        self.names = FreshNames.of(stmt.body)
        self.begun = {
            number: self.reduction(param)
            for number, (begin, param) in enumerate(self.border.carry)
            # The first value can be added behind the scan, or it is zeros.
            if not param.partial
            and (begin.name in zeros or _is_added_to(stmt.body, param, number))
        }
        # A user's constraint must hold in the iteration that it stands in.
        self.fixed = {m.buffer for m in stmt.body.marks if isinstance(m, ShardMark)}
        self.body = self.beginning_with_reductions()

    def reduction(self, param: Buffer) -> Reshard:
        """The reduction of a partial param, whose result replaces the param."""
        name = self.names.fresh(f"{param.name}_reduced")
        out = dataclasses.replace(param, name=name)
        return Reshard(out=out, source=dataclasses.replace(param, partial=self.partial))

    def beginning_with_reductions(self) -> Draft:
        """The body on the reduced params, which is right even if no reduction moves."""
        body = self.stmt.body
        reduced = {each.source.name: each.out for each in self.begun.values()}
        stmts = (replace_buffers(each, reduced) for each in body.body)
        needed = {result.name for result in body.results}
        marked = {mark.buffer for mark in body.marks}
        return Draft([*self.begun.values(), *stmts], needed, marked)

    def stays_partial(self, number: int) -> bool:
        """Whether a carry can be reduced after all; if so, its statements change."""
        count, begun = len(self.body.changed), self.begun[number]
        result = self.border.carried[number].inside.name
        mesh = dict(self.stmt.body.mesh.shape)
        # `reduced_last` may have changed some statements before it failed, so they are
        # counted to be undone.
        last = reduced_last(result, self.body, self.fixed, mesh, self.names)
        if (
            last is not None
            and set(last.source.partial) == set(self.partial)
            and result not in self.body.readers
            and begun.out.name not in self.body.readers
        ):
            return True
        self.body.take_back(count)
        return False

    def scan(self, kept: Sequence[int]) -> Scan:
        """The scan with the carries `kept` partial, and all others as they were."""
        carry, carried = list(self.border.carry), list(self.border.carried)
        whole = {each.out.name: carry[n].inside for n, each in self.begun.items()}
        # All reductions at the start go: a carry that is not kept is whole, as before.
        dropped = [each.out.name for each in self.begun.values()]
        for number in kept:
            last = self.body.makers[carried[number].inside.name]
            assert isinstance(last, Reshard)
            dropped.append(last.out.name)
            terms = dataclasses.replace(last.source, partial=self.partial)
            carried[number] = carried[number]._replace(inside=terms)
            carry[number] = carry[number]._replace(inside=self.begun[number].source)
        stmts = itertools.chain(*self.body.slots)
        body = with_statements(
            self.stmt.body,
            [replace_buffers(s, whole) for s in stmts if not makes_one_of(s, dropped)],
        )
        border = dataclasses.replace(
            self.border, carry=tuple(carry), carried=tuple(carried)
        )
        return with_scan_border(self.stmt, body, border)


def _is_added_to(body: Program, param: Buffer, number: int) -> bool:
    """Whether a result is the param plus other values, and nothing else reads it."""
    readers: dict[str, list[Stmt]] = {}
    for stmt in body.body:
        for buffer in reads_writes(stmt)[0]:
            readers.setdefault(buffer.name, []).append(stmt)
    value = param
    while reading := readers.get(value.name, []):
        (stmt, *others) = reading
        # Another reader needs the whole sum in each iteration.
        if others or not isinstance(stmt, Compute):
            return False
        (unit_eqn,), (out,) = stmt.unit.eqns, stmt.outs
        name = unit_eqn.eqn.primitive.name
        converts = name == "convert_element_type" and out.dtype == value.dtype
        if not (converts or name in ("add", "add_any")):
            return False
        value = out
    return value.name == body.results[number].name


def with_statements(program: Program, stmts: Sequence[Stmt]) -> Program:
    """`program` with other statements, without remarks on reductions that are gone."""
    left = {each.out.name for each in stmts if is_reduction(each)}
    gone = {each.out.name for each in program.body if is_reduction(each)} - left
    remarks = (
        remark
        for remark in program.remarks
        if not (isinstance(remark, LayoutReport) and remark.value in gone)
    )
    return dataclasses.replace(program, body=tuple(stmts), remarks=tuple(remarks))


def makes_one_of(stmt: Stmt, names: Container[str]) -> bool:
    """Whether a statement moves or reduces a value to one of those names."""
    return isinstance(stmt, Reshard) and stmt.out.name in names
