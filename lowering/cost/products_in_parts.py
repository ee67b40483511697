"""Products of which devices send parts, computed in these parts.

A sum over devices by permutes sends each device its part of the terms.  XLA copies a
part of an array before it is sent, so a program would hold the terms twice, for as long
as the sum is under way.  The product of a part of an operand has memory of its own.
Small products take longer in parts, so the predicted time decides about each.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from jax import lax

from jhost.lowering.cost.copies import copy_of
from jhost.lowering.cost.kernels import Kernel, kernels
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.index import Index, Rank, ranks
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.rules.dim_rule import FactorDim
from jhost.lowering.schedule.permutes import part_of
from jhost.lowering.units.make import barrier_of, on_part, type_of


def products_in_parts(program: Program, rates: Rates | None) -> Program:
    """`program` with those products in parts that take less time so."""
    parts = _only_read_in_parts(program)
    # Most programs have none, and names take long to collect.
    if not parts:
        return program
    in_parts = ProductsInParts(program, rates)
    made = {
        name: products
        for stmt in program.body
        if isinstance(stmt, ir.Compute)
        for name in (out.name for out in stmt.outs)
        if name in parts and (products := in_parts.products(stmt, parts[name]))
    }
    body = (each for stmt in program.body for each in _with_parts(stmt, made))
    return dataclasses.replace(program, body=tuple(body)) if made else program


def _only_read_in_parts(program: Program) -> dict[str, list[ir.Select]]:
    """The parts by rank of values that nothing reads whole, by the values' names."""
    parts = defaultdict[str, list[ir.Select]](list)
    whole = {result.name for result in program.results}
    for stmt in program.body:
        if isinstance(stmt, ir.Select) and ranks(stmt.index):
            parts[stmt.source.name].append(stmt)
            whole.add(stmt.out.name)  # it is no array by itself
        elif isinstance(stmt, ir.Allocate):
            whole.add(stmt.buffer.name)
        else:
            whole |= {buffer.name for buffer in reads_writes(stmt)[0]}
    return {name: some for name, some in parts.items() if name not in whole}


def _with_parts(
    stmt: ir.Stmt, made: Mapping[str, Sequence[ir.Stmt]]
) -> Sequence[ir.Stmt]:
    """A statement, or what stands in its place if some products are `made` in parts."""
    if isinstance(stmt, ir.Compute):
        return next((made[out.name] for out in stmt.outs if out.name in made), [stmt])
    in_parts = isinstance(stmt, ir.Select) and stmt.source.name in made
    return [] if in_parts else [stmt]


class ProductsInParts:
    """Cuts products of a program into parts, if that takes less time."""

    def __init__(self, program: Program, rates: Rates | None) -> None:
        self.mesh: Mapping[str, int] = program.mesh.shape
        self.rates = rates
        self.names = FreshNames.of(program)
        moved = (stmt for stmt in program.body if isinstance(stmt, ir.Communicate))
        self.sent = {stmt.source.name for stmt in moved}

    def products(
        self, stmt: ir.Compute, parts: Sequence[ir.Select]
    ) -> list[ir.Stmt] | None:
        """The products of which each makes one of the parts; None if they gain nothing.

        Each comes with the part of an operand that it reads.
        """
        cut = _cut(stmt, parts)
        made = [*self.made(stmt, parts, *cut)] if cut else []
        return made if made and self.gains(stmt, parts, made) else None

    def gains(
        self, stmt: ir.Compute, parts: Sequence[ir.Select], made: Sequence[ir.Stmt]
    ) -> bool:
        """Whether the statements `made` take less time than the product and copies."""
        if self.rates is None:
            return False
        # The device's own part is added from where it is.
        copied = (part for part in parts if part.out.name in self.sent)
        return self.seconds(made, self.rates) < self.seconds(
            [stmt, *copied], self.rates
        )

    def made(
        self, stmt: ir.Compute, parts: Sequence[ir.Select], number: int, dim: int
    ) -> Iterator[ir.Stmt]:
        """The products that make parts, each of a part of the operand `number`."""
        outs = tuple(part.out for part in parts)
        alone = tuple(
            dataclasses.replace(out, name=self.names.fresh(out.name)) for out in outs
        )
        for part, out in zip(parts, alone, strict=True):
            ins, size = [*stmt.ins], out.shape[part.dim]
            read = part_of(ins[number], dim, part.index, size, self.names)
            ins[number] = read.out
            count = part.source.shape[part.dim] // size
            unit = on_part(stmt.unit, _followed(stmt, part), count)
            yield read
            yield dataclasses.replace(stmt, unit=unit, ins=tuple(ins), outs=(out,))
        # Or XLA makes the part that stays much later, and keeps the operands for it.
        unit = barrier_of(self.names.fresh("parts"), *map(type_of, outs))
        yield ir.Compute(unit=unit, ins=alone, outs=outs)

    def seconds(self, stmts: Sequence[ir.Stmt], rates: Rates) -> float:
        """How long products take, and copies of parts."""
        at: dict[Index, int] = {Rank(axis): 0 for axis in self.mesh}
        found: list[Kernel] = []
        for stmt in stmts:
            if isinstance(stmt, ir.Compute):
                found += kernels(stmt, self.mesh, at)
            elif isinstance(stmt, ir.Select):
                found.append(copy_of(stmt.out))
        return sum(kernel.seconds(rates) for kernel in found)


def _cut(stmt: ir.Compute, parts: Sequence[ir.Select]) -> tuple[int, int] | None:
    """The one operand, and its dim, that parts of a product's result follow."""
    (each, *more), (first, *others) = stmt.unit.eqns, parts
    # Only this primitive's params say nothing about shapes.
    is_product = not more and each.eqn.primitive is lax.dot_general_p
    two = len({buffer.name for buffer in stmt.ins}) == 2
    if not (is_product and two) or stmt.reducer or stmt.chunk:
        return None
    alike = all((p.dim, p.groups, p.drop) == (first.dim, 1, False) for p in parts)
    size = sum(part.out.shape[first.dim] for part in parts)
    if not (others and alike and size == first.source.shape[first.dim]):
        return None
    factor = _followed(stmt, first)
    follow = [
        (number, dims.index(factor))
        for number, dims in enumerate(each.rule.operands)
        if factor in dims
    ]
    return follow[0] if len(follow) == 1 else None


def _followed(stmt: ir.Compute, part: ir.Select) -> FactorDim:
    """What the dim of a product's result follows that a part is taken of."""
    followed = stmt.unit.eqns[0].rule.results[0][part.dim]
    assert followed is not None, "each dim of a product follows one of an operand"
    return followed
