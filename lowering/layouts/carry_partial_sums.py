"""Sums that a scan carries stay partial in it, and are reduced once behind it.

Gradients of microbatches are such sums.  They then need one reduction a step over the
axes of data parallelism, instead of one a microbatch.  This is legal where the carry is
only added to.  It takes no more memory where the reduction leaves the layout as it is.

Small sums that a scan stacks, such as the gradients of all layers' gains, are also
reduced once: each of them takes little more than its latency.  Larger sums stay in the
body, where XLA may run them beside other work.
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

from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.border import Crossing, scan_border, with_scan_border
from jhost.lowering.ir.layout import Partial, size_in_bytes
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Remark
from jhost.lowering.ir.statements import Buffer, Compute, Reshard, Scan, Stmt
from jhost.lowering.layouts.commute import reduced_last
from jhost.lowering.layouts.draft import Draft, is_reduction, zero_of
from jhost.lowering.layouts.partial_carry import (
    carrying_partial,
    makes_one_of,
    with_statements,
)
from jhost.lowering.layouts.remarks import reduced_behind_remark
from jhost.lowering.rules.reducers import identity
from jhost.lowering.units.make import computes_of

_LATENCY_BYTES = 2**18
"""An all-reduce of so few bytes takes only its latency, on any GPU with NVLink.

On H200s it takes 20 us in the body of a scan, where it runs alone, and 20 us more until
the last device has come to it.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class CarryPartialSums(EachProgram):
    """Scans that reduce a sum in each iteration -> scans that reduce it behind."""

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
                continue
            body.append(stmt)
            # A sum that begins with zeros may begin with zeros on each device.
            if isinstance(stmt, Compute) and (zero := zero_of(stmt)) is not None:
                zeros[stmt.outs[0].name] = zero
        remarks = [*program.remarks, *remarks]
        return dataclasses.replace(program, body=tuple(body), remarks=tuple(remarks))


def _summed_behind(
    stmt: Scan, zeros: Mapping[str, Any], names: FreshNames
) -> list[Stmt]:
    """A scan, and behind it the reductions that need not be made in it."""
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
    """Whether reducing the part of one iteration takes as long as reducing a scalar."""
    size = size_in_bytes(stacked.shape[1:], stacked.dtype)
    return size <= _LATENCY_BYTES


def _with_partial_carry(
    stmt: Scan, zeros: Container[str]
) -> tuple[Scan, dict[int, Partial]] | None:
    """The scan with partial sums in its carry, and the axes of each; None without any.

    A scan inside may stack the terms of such a sum.  They are then reduced behind the
    inner scan, if this reduction can move out of the outer one.
    """
    chosen: set[str] | None = None  # at first, all that scans inside stack
    while True:
        body, put_off = _reducing_behind(stmt.body, chosen)
        carrying = carrying_partial(dataclasses.replace(stmt, body=body), zeros)
        if carrying is None:
            return None
        scan, _ = carrying
        reduced = {each.out.name for each in scan.body.body if is_reduction(each)}
        if not put_off & reduced:
            return carrying
        # These are still reduced in each iteration of the outer scan, so moving them
        # out of the inner one gained nothing.  They stay; the rest is tried again.
        chosen = put_off - reduced


# --- Around a scan ---------------------------------------------------------------- #


def _reducing_behind(
    program: Program, chosen: Container[str] | None
) -> tuple[Program, set[str]]:
    """A program that reduces the stacks of its scans behind them.

    Returns:
        The program, and the names of these stacks, which are among `chosen` if given.
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
    body = Draft(program.body, needed, {mark.buffer for mark in program.marks})
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
    stmts = [s for s in itertools.chain(*body.slots) if not makes_one_of(s, dropped)]
    border = dataclasses.replace(border, ys=tuple(ys))
    return with_scan_border(stmt, with_statements(program, stmts), border), reshards


def _reduced_behind(
    stmt: Scan,
    found: Mapping[int, Partial],
    zeros: Mapping[str, Any],
    names: FreshNames,
) -> list[Stmt]:
    """A scan whose sums begin with zeros; their first values are added behind it.

    If the first value is zeros itself, nothing is added.
    """
    before: list[Stmt] = []
    behind: list[Stmt] = []
    carry, carried = list(stmt.carry), list(stmt.carried)
    for number, partial in found.items():
        begin, out = carry[number], carried[number]
        # Not with the first value: each device would add it once.
        name = names.fresh(f"{out.name}_zeros")
        start = dataclasses.replace(begin, name=name, partial=partial)
        name = names.fresh(f"{out.name}_partial")
        terms = dataclasses.replace(out, name=name, partial=partial)
        value = zeros.get(begin.name, identity("sum", begin.dtype))
        fill = functools.partial(_filled, start, value)
        before += computes_of("zeros", fill, [], [start], names)
        carry[number], carried[number] = start, terms
        if begin.name in zeros:
            behind.append(Reshard(out=out, source=terms))
            continue
        total = dataclasses.replace(out, name=names.fresh(f"{out.name}_total"))
        behind.append(Reshard(out=total, source=terms))
        behind += computes_of("add", _added, [begin, total], [out], names)
    stmt = dataclasses.replace(stmt, carry=tuple(carry), carried=tuple(carried))
    return [*before, stmt, *behind]


def _added(begin: jax.Array, total: jax.Array) -> jax.Array:
    """The sum of both, with a barrier around the first.

    XLA simplifies 0 + x to x if it knows the 0, which is wrong where x is -0.0.
    """
    return lax.add(lax.optimization_barrier(begin), total)


def _filled(buffer: Buffer, value: Any) -> jax.Array:
    """The value everywhere, by one equation.

    For a scalar `lax.full` makes a literal and no equation, so a transpose does it.
    """
    if buffer.shape:
        return lax.full(buffer.shape, value, buffer.dtype)
    value = np.asarray(value, buffer.dtype)
    return lax.transpose_p.bind(value, permutation=())
