"""Sums that a scan carries stay partial in it, and are reduced once behind it.

Gradients of microbatches are such sums.  They need one reduction a step over the axes
of data parallelism, instead of one a microbatch.  That is legal where the carry is only
added to.  It costs no memory where the reduction leaves the layout as it is.

Small sums that a scan stacks are reduced once as well, such as the gradients of all
layers' gains: one of them takes little but latency.  Larger ones stay in the body,
where XLA may run them beside other work.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Container, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.border import Crossing, scan_border, with_scan_border
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.layout import Partial, size_in_bytes
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport, Remark
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.statements import Buffer, Compute, Reshard, Scan, Stmt
from jhost.lowering.layouts.commute import Rewrite, is_reduction, reduced_last
from jhost.lowering.layouts.remarks import reduced_behind_remark
from jhost.lowering.rules.reducers import identity
from jhost.lowering.units.make import computes_of

_LATENCY_BYTES = 2**18
"""An all-reduce of so few bytes takes its latency, on any GPU with NVLink.

On H200s it takes 20 us in the body of a scan, beside nothing, and as much again until
the last device is there.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class CarryPartialSums(EachProgram):
    """Scans that reduce in each iteration what they add up -> that reduce it behind."""

    name: ClassVar[str] = "carry_partial_sums"

    def sees(self, program: Program) -> object:
        return None

    def change(self, program: Program) -> Program:
        if not any(isinstance(stmt, Scan) for stmt in program.body):
            return program
        names, zeros = FreshNames.of(program), dict[str, Any]()
        body: list[Stmt] = []
        remarks: list[Remark] = []
        mesh = dict(program.mesh.shape)
        for stmt in program.body:
            if isinstance(stmt, Scan):
                new = _summed_behind(stmt, zeros, names)
                reduced = (each for each in new if isinstance(each, Reshard))
                remarks += (
                    reduced_behind_remark(each, stmt.where, mesh) for each in reduced
                )
                body += new
            else:
                # A sum that begins with zeros may begin with partial zeros.
                zeros |= _zeros_of(stmt)
                body.append(stmt)
        remarks = [*program.remarks, *remarks]
        return dataclasses.replace(program, body=tuple(body), remarks=tuple(remarks))


def _zeros_of(stmt: Stmt) -> dict[str, Any]:
    """The array that a statement fills with zeros, and which: 0.0 or -0.0 of floats."""
    if not isinstance(stmt, Compute) or stmt.ins:
        return {}
    (unit_eqn,) = stmt.unit.eqns
    if unit_eqn.eqn.primitive.name != "broadcast_in_dim":
        return {}
    (value,) = (v.val for v in unit_eqn.eqn.invars if isinstance(v, Literal))
    return {} if np.any(np.asarray(value)) else {stmt.outs[0].name: value}


def _summed_behind(
    stmt: Scan, zeros: Mapping[str, Any], names: FreshNames
) -> list[Stmt]:
    """A scan, and behind it the reductions of what need not be reduced in it."""
    result: list[Stmt] = []
    carrying = _with_partial_carry(stmt, zeros)
    for each in _reduced_behind(*carrying, zeros, names) if carrying else [stmt]:
        if isinstance(each, Scan):
            # Large sums stay in the body, where XLA may run them beside other work.
            wanted = [y for y in each.ys if _is_small(y)]
            each, reshards = _stacking_partial(each, wanted, names)
            result += [each, *reshards]
        else:
            result.append(each)
    return result


def _is_small(stacked: Buffer) -> bool:
    """Whether the part of an iteration is reduced in no less time than a scalar."""
    size = size_in_bytes(stacked.shape[1:], stacked.dtype.itemsize)
    return size <= _LATENCY_BYTES


def _with_partial_carry(
    stmt: Scan, zeros: Container[str]
) -> tuple[Scan, dict[int, Partial]] | None:
    """The scan with sums partial in its carry, and over what each is; None without.

    What a scan inside gives for each of its iterations may be reduced behind that one,
    where it is then carried on.
    """
    chosen: set[str] | None = None  # at first, all that scans inside stack
    while True:
        body, put_off = _reducing_behind(stmt.body, chosen)
        carrying = _carrying_partial(dataclasses.replace(stmt, body=body), zeros)
        if carrying is None:
            return None
        scan, _ = carrying
        reduced = {each.out.name for each in scan.body.body if is_reduction(each)}
        if not put_off & reduced:
            return carrying
        # These are still reduced in each iteration, so to put them off gained nothing.
        # They stay in the scan inside, and the fewer others are tried again.
        chosen = put_off - reduced


def _carrying_partial(
    stmt: Scan, zeros: Container[str]
) -> tuple[Scan, dict[int, Partial]] | None:
    """The scan with each carry partial that can stay so, over what is summed in it."""
    kept: dict[int, Partial] = {}
    partials = [
        tuple(sorted(each.source.partial))
        for each in stmt.body.body
        if is_reduction(each)
    ]
    for partial in dict.fromkeys(partials):
        carry = _PartialCarry(stmt, partial, zeros)
        numbers = [number for number in carry.begun if carry.stays_partial(number)]
        kept |= dict.fromkeys(numbers, partial)
        stmt = carry.scan(numbers)
    return (stmt, kept) if kept else None


class _PartialCarry:
    """A scan whose body begins with the reduction of partial sums that it carries.

    Where that can be done as well behind all that is added, it need not be done in each
    iteration.  What a sum begins with is added behind, so that it must be added to and
    nothing else, unless that is one of `zeros`.
    """

    def __init__(self, stmt: Scan, partial: Partial, zeros: Container[str]) -> None:
        self.stmt, self.partial, self.border = stmt, partial, scan_border(stmt)
        self.names = FreshNames.of(stmt.body)
        self.begun = {
            number: self.reduction(param)
            for number, (begin, param) in enumerate(self.border.carry)
            # What a carry begins with may be added behind, or is nothing.
            if not param.partial
            and (begin.name in zeros or _is_added_to(stmt.body, param, number))
        }
        self.fixed = {m.buffer for m in stmt.body.marks if isinstance(m, ShardMark)}
        self.body = self.beginning_with_reductions()

    def reduction(self, param: Buffer) -> Reshard:
        """The reduction of a partial param, to stand in the place of the param."""
        name = self.names.fresh(f"{param.name}_reduced")
        out = dataclasses.replace(param, name=name)
        return Reshard(out=out, source=dataclasses.replace(param, partial=self.partial))

    def beginning_with_reductions(self) -> Rewrite:
        """The body on the reduced params: it is right, even if nothing is put off."""
        body = self.stmt.body
        reduced = {each.source.name: each.out for each in self.begun.values()}
        stmts = (replace_buffers(each, reduced) for each in body.body)
        needed = {result.name for result in body.results}
        marked = {mark.buffer for mark in body.marks}
        return Rewrite([*self.begun.values(), *stmts], needed, marked)

    def stays_partial(self, number: int) -> bool:
        """Whether a carry can be reduced after all; if so, its statements change."""
        count, begun = len(self.body.changed), self.begun[number]
        result = self.border.carried[number].inside.name
        mesh = dict(self.stmt.body.mesh.shape)
        # The undo is by count: `reduced_last` may have changed some statements in vain.
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
        """The scan with what is `kept` partial, and all else as it was."""
        carry, carried = list(self.border.carry), list(self.border.carried)
        whole = {each.out.name: carry[n].inside for n, each in self.begun.items()}
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
            [replace_buffers(s, whole) for s in stmts if not _makes(s, dropped)],
        )
        border = dataclasses.replace(
            self.border, carry=tuple(carry), carried=tuple(carried)
        )
        return with_scan_border(self.stmt, body, border)


def _is_added_to(body: Program, param: Buffer, number: int) -> bool:
    """Whether that result is a param with something added to it, and nothing else."""
    readers: dict[str, list[Stmt]] = {}
    for stmt in body.body:
        for buffer in reads_writes(stmt)[0]:
            readers.setdefault(buffer.name, []).append(stmt)
    value = param
    while reading := readers.get(value.name, []):
        (stmt, *others) = reading
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


def _makes(stmt: Stmt, names: Container[str]) -> bool:
    return isinstance(stmt, Reshard) and stmt.out.name in names


# --- Around a scan ---------------------------------------------------------------- #


def _reducing_behind(
    program: Program, chosen: Container[str] | None
) -> tuple[Program, set[str]]:
    """A program whose scans leave the reduction of what they stack to it.

    Returns:
        The program, and the names of the stacked values, of all or of those `chosen`.
    """
    names, behind = FreshNames.of(program), set[str]()
    body: list[Stmt] = []
    for stmt in program.body:
        if isinstance(stmt, Scan):
            wanted = [y for y in stmt.ys if chosen is None or y.name in chosen]
            stmt, reshards = _stacking_partial(stmt, wanted, names)
            behind |= {each.out.name for each in reshards}
            body += [stmt, *reshards]
        else:
            body.append(stmt)
    return dataclasses.replace(program, body=tuple(body)), behind


def _stacking_partial(
    stmt: Scan, wanted: Sequence[Buffer], names: FreshNames
) -> tuple[Scan, list[Reshard]]:
    """A scan that stacks partial sums, as far as it can, and their reductions."""
    program = stmt.body
    needed = {result.name for result in program.results}
    body = Rewrite(program.body, needed, {mark.buffer for mark in program.marks})
    fixed = {m.buffer for m in program.marks if isinstance(m, ShardMark)}
    inner, mesh = FreshNames.of(program), dict(program.mesh.shape)
    border = scan_border(stmt)
    ys: list[Crossing] = []
    reshards: list[Reshard] = []
    dropped: list[str] = []
    for out, part in border.ys:
        count, name = len(body.changed), part.name
        last = reduced_last(name, body, fixed, mesh, inner) if out in wanted else None
        if last is None or name in body.readers:
            body.take_back(count)
            ys.append(Crossing(out, part))
            continue
        terms = dataclasses.replace(
            out, name=names.fresh(f"{out.name}_partial"), partial=last.source.partial
        )
        ys.append(Crossing(terms, last.source))
        reshards.append(Reshard(out=out, source=terms))
        dropped.append(name)
    if not reshards:
        return stmt, []
    stmts = [s for s in itertools.chain(*body.slots) if not _makes(s, dropped)]
    border = dataclasses.replace(border, ys=tuple(ys))
    return with_scan_border(stmt, with_statements(program, stmts), border), reshards


def _reduced_behind(
    stmt: Scan,
    found: Mapping[int, Partial],
    zeros: Mapping[str, Any],
    names: FreshNames,
) -> list[Stmt]:
    """Sums begin with nothing on each device: what they begin with is added behind.

    What begins with a zero does so on each device, and nothing is added.
    """
    before: list[Stmt] = []
    behind: list[Stmt] = []
    carry, carried = list(stmt.carry), list(stmt.carried)
    for number, partial in found.items():
        begin, out = carry[number], carried[number]
        # Each device would add what the sum began with.
        name = names.fresh(f"{out.name}_zeros")
        start = dataclasses.replace(begin, name=name, partial=partial)
        name = names.fresh(f"{out.name}_partial")
        terms = dataclasses.replace(out, name=name, partial=partial)
        value = zeros.get(begin.name, identity("sum", begin.dtype))
        fill = functools.partial(_filled, start, value)
        before += computes_of("zeros", fill, [], start, names)
        carry[number], carried[number] = start, terms
        if begin.name in zeros:
            behind.append(Reshard(out=out, source=terms))
            continue
        total = dataclasses.replace(out, name=names.fresh(f"{out.name}_total"))
        behind.append(Reshard(out=total, source=terms))
        behind += computes_of("add", _added, [begin, total], out, names)
    stmt = dataclasses.replace(stmt, carry=tuple(carry), carried=tuple(carried))
    return [*before, stmt, *behind]


def _added(begin: jax.Array, total: jax.Array) -> jax.Array:
    """Their sum; XLA takes 0 + x for x, also where x is -0.0, if it knows the 0."""
    return lax.add(lax.optimization_barrier(begin), total)


def _filled(buffer: Buffer, value: Any) -> jax.Array:
    """The value everywhere, by one equation; of a scalar `lax.full` makes a literal."""
    if buffer.shape:
        return lax.full(buffer.shape, value, buffer.dtype)
    value = np.asarray(value, buffer.dtype)
    return lax.transpose_p.bind(value, permutation=())
