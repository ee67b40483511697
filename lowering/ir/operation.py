"""A straight-line statement as propagation sees it: values tied by factors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.layout import Layout, Partial
from jhost.lowering.ir.statements import Compute, Set
from jhost.lowering.rules.dim_rule import Dims, Factors, Reducer, axes_size

Assignment: TypeAlias = tuple[tuple[str, ...], ...]
"""Per factor, the mesh axes that it is spread over, major first."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A `Set` or a one-equation `Compute`: buffer names in and out, and their dims.

    `pinned` is the one assignment that it can have, where its rule says so.
    """

    stmt: Compute | Set
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reducers: tuple[Reducer | None, ...]
    pinned: Assignment | None = None

    @property
    def reduces(self) -> bool:
        """Whether some factor is reduced."""
        return any(self.reducers)

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

    @property
    def makes_any_part(self) -> bool:
        """Whether every device can make any part of its result out of nothing."""
        made = not self.ins and len(self.outs) == 1
        return made and None not in self.results[0] and self.pinned is None

    def making(self, layout: Layout) -> Assignment:
        """The assignment that makes a result in `layout`, where it can be any part."""
        spread = list(nowhere(self))
        for dim, axes in zip(self.results[0], layout, strict=True):
            if dim is not None:
                spread[dim.factor] = axes
        return tuple(spread)

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
        pinned=rule.pinned,
    )


# --- Assignments -------------------------------------------------------------- #

Claim: TypeAlias = tuple[str, int]
"""A mesh axis, and a factor that some value's layout puts it on."""


def claims_of(
    op: Operation, ins: Mapping[str, Layout], outs: Mapping[str, Layout]
) -> list[Claim]:
    """Which mesh axis is on which factor, by the layouts of operands and results."""
    return [
        (axis, dim.factor)
        for names, maps, layouts in (
            (op.ins, op.operands, ins),
            (op.outs, op.results, outs),
        )
        for name, dims in zip(names, maps, strict=True)
        if name in layouts
        for dim, axes in zip(dims, layouts[name], strict=True)
        if dim is not None
        for axis in axes
    ]


def nowhere(op: Operation) -> Assignment:
    """Every device does all of the work."""
    return ((),) * len(op.sizes)


def assignments_by(factors: int, claims: Sequence[Claim]) -> Iterator[Assignment]:
    """Every way to give each claimed axis to one of its claimants, or to nobody."""
    claimants: dict[str, list[int | None]] = {}
    for axis, factor in claims:
        if factor not in claimants.setdefault(axis, []):
            claimants[axis].append(factor)
    for choice in itertools.product(*([*c, None] for c in claimants.values())):
        yield assignment_of(factors, claims, dict(zip(claimants, choice, strict=True)))


def assignment_of(
    factors: int, claims: Sequence[Claim], chosen: Mapping[str, int | None]
) -> Assignment:
    """Axes by factor, in the order in which the claims name them."""
    spread: list[list[str]] = [[] for _ in range(factors)]
    for axis, factor in claims:
        if chosen[axis] == factor and axis not in spread[factor]:
            spread[factor].append(axis)
    return tuple(tuple(axes) for axes in spread)
