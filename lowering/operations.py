"""A straight-line statement as propagation sees it: values tied by factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from jhost.lowering.ir import Compute, Set
from jhost.lowering.layout import Layout
from jhost.lowering.reshard import Partial
from jhost.lowering.rules import Dims, Factors, Reducer, axes_size

Assignment: TypeAlias = tuple[tuple[str, ...], ...]
"""Per factor, the mesh axes that it is spread over, major first."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A `Set` or a one-equation `Compute`: buffer names in and out, and their dims."""

    stmt: Compute | Set
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reducers: tuple[Reducer | None, ...]

    def required(self, operand: int, assignment: Assignment) -> Layout:
        """The layout that `assignment` asks of an operand."""
        return _induced(self.operands[operand], assignment)

    def produced(self, result: int, assignment: Assignment) -> tuple[Layout, Partial]:
        """The layout that a result has, and over which axes it is still partial."""
        reduced = zip(assignment, self.reducers, strict=True)
        partial: Partial = tuple(
            (axis, reducer)
            for axes, reducer in reduced
            if reducer is not None
            for axis in axes
        )
        return _induced(self.results[result], assignment), partial

    def fits(self, assignment: Assignment, mesh: Mapping[str, int]) -> bool:
        """Whether every factor divides evenly over its axes."""
        return all(
            size % axes_size(axes, mesh) == 0
            for size, axes in zip(self.sizes, assignment, strict=True)
        )


def _induced(dims: Dims, assignment: Assignment) -> Layout:
    return tuple(() if dim is None else assignment[dim.factor] for dim in dims)


def operation(stmt: Compute | Set) -> Operation:
    """What `stmt` reads and writes, and the factors in between."""
    if isinstance(stmt, Set):
        factors = Factors()
        dims = factors.dims(stmt.out.shape)
        rule, operands = factors.rule([dims], [dims]), (dims,)
        ins, outs = (stmt.source,), (stmt.out,)
    else:
        (unit_eqn,) = stmt.unit.eqns
        rule, ins, outs = unit_eqn.rule, stmt.ins, stmt.outs
        by_var = dict(zip(map(id, unit_eqn.eqn.invars), rule.operands, strict=True))
        operands = tuple(by_var[id(var)] for var in stmt.unit.invars)
    return Operation(
        stmt=stmt,
        ins=tuple(buffer.name for buffer in ins),
        outs=tuple(buffer.name for buffer in outs),
        operands=operands,
        results=rule.results,
        sizes=rule.sizes,
        reducers=rule.reducers,
    )
