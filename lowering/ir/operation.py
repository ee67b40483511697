"""A straight-line statement as propagation sees it: values tied by factors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir.layout import Layout, Partial, axes_size
from jhost.lowering.ir.statements import Buffer, Compute, ControlFlow, Set, Stmt
from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    JoinedReads,
    factors_of,
)
from jhost.lowering.rules.flops import flops_of
from jhost.lowering.rules.reads import WindowReads
from jhost.lowering.rules.reducers import Reducer

Assignment: TypeAlias = tuple[tuple[str, ...], ...]
"""Per factor, the mesh axes that it is spread over, major first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperandWindow:
    """A dim of an operand that the steps of a factor read in windows, of so many."""

    operand: int
    dim: int
    size: int
    factor: int
    reads: WindowReads


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A `Set` or a one-equation `Compute`: buffer names in and out, and their dims.

    Or it is a value that crosses the border of control flow `stmt`, from or to a body.
    If it `forwards`, its operand is moved to where its result rests.  With `taking` its
    operand's layout decides, whatever its readers prefer, and `like` names another
    value whose layout decides.  `reduces` says that it works on each step of a reduced
    factor.

    `pinned` is its only possible assignment, if its rule says so.  `cut` has the dims
    of each operand that only loops cut, and `windows` those that are read in windows.
    `joined` says that it only joins elements of its operands along a dim.  `nested` has
    the dims that follow several factors.  `flops` is the work on whole arrays, if it
    `reduces`.
    """

    stmt: Compute | Set | ControlFlow
    ins: tuple[str, ...]
    outs: tuple[str, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    reducers: tuple[Reducer | None, ...]
    forwards: bool = False
    taking: bool = False
    like: str | None = None
    pinned: Assignment | None = None
    windows: tuple[OperandWindow, ...] = ()
    joined: JoinedReads | None = None
    nested: tuple[FactorDim, ...] = ()
    reduces: bool = False
    cut: tuple[frozenset[int], ...] = ()
    flops: int = 0

    def required(self, operand: int, assignment: Assignment) -> Layout:
        """The layout that `assignment` asks of an operand."""
        return _induced(self.operands[operand], assignment)

    def produced(self, result: int, assignment: Assignment) -> tuple[Layout, Partial]:
        """The layout that a result has, and over which axes it is still partial."""
        followed = factors_of(self.results[result])
        partial: Partial = tuple(
            (axis, reducer)
            for factor, reducer in enumerate(self.reducers)
            if reducer is not None and factor not in followed
            for axis in assignment[factor]
        )
        return _induced(self.results[result], assignment), partial

    def exchanges(self, assignment: Assignment, mesh: Mapping[str, int]) -> bool:
        """Whether devices exchange pieces of all operands, which it only joins."""
        joined = self.joined
        return joined is not None and axes_size(assignment[joined.factor], mesh) > 1

    def forwarded(self, rest: Layout) -> Layout:
        """The layout of a forwarding operation's operand; the result's is `rest`."""
        spread = list(nowhere(self))
        for dim, axes in zip(self.results[0], rest, strict=True):
            if dim is not None:
                spread[dim.factor] = axes
        return _induced(self.operands[0], tuple(spread))

    def following(self, layout: Layout) -> Assignment:
        """The assignment that lays its operand out so."""
        spread = list(nowhere(self))
        for dim, axes in zip(self.operands[0], layout, strict=True):
            if dim is not None:
                spread[dim.factor] = axes
        return tuple(spread)

    @property
    def stacks(self) -> bool:
        """Whether a value leaves an iteration and is stacked, as it was made there."""
        return self.taking and not self.forwards and self.like is None

    @property
    def carries(self) -> bool:
        """Whether a value enters a body that may hand it to the next iteration."""
        enters = isinstance(self.stmt, ControlFlow) and self.forwards
        return enters and not self.taking

    @property
    def makes_any_part(self) -> bool:
        """Whether every device can make any part of its result without operands."""
        # An iota, for example: each device begins to count at its own number.
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
        """Whether every factor divides evenly over its axes, and what it reads too."""
        for size, axes in zip(self.sizes, assignment, strict=True):
            if axes and size % axes_size(axes, mesh):
                return False
        # The dim that windows read may have another size than the factor's steps.
        for window in self.windows:
            if window.size % axes_size(assignment[window.factor], mesh):
                return False
        return all(self.is_contiguous(dim, assignment, mesh) for dim in self.nested)

    def claims(
        self, dim: FactorDim, axes: Sequence[str], mesh: Mapping[str, int]
    ) -> Iterator[Claim]:
        """The factor of each axis of a dim; inner ones have those that others leave."""
        factor, inside, taken = dim.factor, dim.inside, 1
        for axis in axes:
            if inside is not None and taken == self.sizes[factor]:
                factor, inside, taken = inside.factor, inside.inside, 1
            taken *= mesh[axis]
            yield axis, factor

    def is_contiguous(
        self, dim: FactorDim, assignment: Assignment, mesh: Mapping[str, int]
    ) -> bool:
        """Whether a device has one part of a dim that follows several factors.

        Steps of a factor are spread only where each device has one step around them.
        """
        whole = False
        for factor in dim.factors:
            devices = axes_size(assignment[factor], mesh)
            if whole and devices > 1:
                return False
            whole = whole or devices != self.sizes[factor]
        return True


def _induced(dims: Dims, assignment: Assignment) -> Layout:
    return tuple(
        [
            ()
            if dim is None
            else assignment[dim.factor]
            if dim.inside is None  # most often, and this is asked often
            else _axes_of(dim, assignment)
            for dim in dims
        ]
    )


def _axes_of(dim: FactorDim, assignment: Assignment) -> tuple[str, ...]:
    if dim.inside is None:
        return assignment[dim.factor]
    return assignment[dim.factor] + _axes_of(dim.inside, assignment)


def has_contraction(stmt: Stmt) -> bool:
    """Whether a statement is a matmul, or another kernel that sums products."""
    if isinstance(stmt, Compute):
        for eqn in stmt.unit.eqns:  # asked so often that a generator takes too long
            if eqn.rule.contracts:
                return True
    return False


def operation(stmt: Compute | Set, prefix: str = "") -> Operation:
    """The operation of `stmt`; a prefix is added to the names of its values."""
    flops, joined = 0, None
    if isinstance(stmt, Set):
        factors = Factors()
        dims = factors.dims(stmt.out.shape)
        rule, operands = factors.rule([dims], [dims]), (dims,)
        ins, outs = (stmt.source,), (stmt.out,)
    else:
        (unit_eqn,) = stmt.unit.eqns
        flops = flops_of(unit_eqn.eqn)
        rule, ins, outs = unit_eqn.rule, stmt.ins, stmt.outs
        operands = operand_maps(stmt)
        joined = _joined(stmt)
    cut = tuple(_cut_by_loops(rule, dims) for dims in operands)
    operands, results = (_sharded(rule, maps) for maps in (operands, rule.results))
    reduces = rule.reduces or rule.contracts
    return Operation(
        stmt=stmt,
        ins=tuple(prefix + buffer.name for buffer in ins),
        outs=tuple(prefix + buffer.name for buffer in outs),
        operands=operands,
        results=results,
        sizes=rule.sizes,
        reducers=rule.reducers,
        reduces=reduces,
        forwards=isinstance(stmt, Set),
        pinned=rule.pinned,
        cut=cut,
        windows=tuple(_windows(operands, ins)),
        joined=joined,
        nested=tuple(_nested(rule)),
        flops=flops if reduces else 0,
    )


def _joined(stmt: Compute) -> JoinedReads | None:
    """What a computation joins, with its operands numbered as the statement's."""
    (unit_eqn,) = stmt.unit.eqns
    joined = unit_eqn.rule.joined
    if joined is None:
        return None
    places = {id(var): n for n, var in enumerate(stmt.unit.invars)}
    invars = unit_eqn.eqn.invars
    reads = tuple((places[id(invars[n])], each) for n, each in joined.reads)
    return dataclasses.replace(joined, reads=reads)


def _windows(maps: Sequence[Dims], ins: Sequence[Buffer]) -> Iterator[OperandWindow]:
    for operand, (dims, buffer) in enumerate(zip(maps, ins, strict=True)):
        for dim, mapped in enumerate(dims):
            if mapped is not None and mapped.reads is not None:
                yield OperandWindow(
                    operand=operand,
                    dim=dim,
                    size=buffer.shape[dim],
                    factor=mapped.factor,
                    reads=mapped.reads,
                )


def _nested(rule: DimRule) -> Iterator[FactorDim]:
    for dims in (*rule.operands, *rule.results) if rule.inner else ():
        yield from (dim for dim in dims if dim is not None and dim.inside is not None)


def operand_maps(stmt: Compute) -> tuple[Dims, ...]:
    """The map of each operand of a computation of one equation."""
    (unit_eqn,) = stmt.unit.eqns
    invars, maps = unit_eqn.eqn.invars, unit_eqn.rule.operands
    # By identity: the operands of an equation may be literals, which have no hash.
    by_var = dict(zip(map(id, invars), maps, strict=True))
    return tuple(by_var[id(var)] for var in stmt.unit.invars)


def followed_dims(stmt: Compute) -> Iterator[tuple[Buffer, int, FactorDim]]:
    """The dims of operands and results that follow factors of the one equation."""
    (unit_eqn,) = stmt.unit.eqns
    maps = (*operand_maps(stmt), *unit_eqn.rule.results)
    for buffer, dims in zip((*stmt.ins, *stmt.outs), maps, strict=True):
        for number, mapped in enumerate(dims):
            if mapped is not None:
                yield buffer, number, mapped


def _cut_by_loops(rule: DimRule, dims: Dims) -> frozenset[int]:
    followed = ((n, dim.factor) for n, dim in enumerate(dims) if dim is not None)
    return frozenset(n for n, factor in followed if factor in rule.unsharded)


def _sharded(rule: DimRule, maps: tuple[Dims, ...]) -> tuple[Dims, ...]:
    """The maps, whole where only loops cut."""
    if not rule.unsharded:
        return maps
    return tuple(
        tuple(None if d is None or d.factor in rule.unsharded else d for d in dims)
        for dims in maps
    )


# --- Assignments -------------------------------------------------------------- #

Claim: TypeAlias = tuple[str, int]
"""A mesh axis, and a factor that some value's layout puts it on."""


def claims_of(
    op: Operation,
    ins: Mapping[str, Layout],
    outs: Mapping[str, Layout],
    mesh: Mapping[str, int],
) -> list[Claim]:
    """Which mesh axis is on which factor, by the layouts of operands and results."""
    return [
        claim
        for names, maps, layouts in (
            (op.ins, op.operands, ins),
            (op.outs, op.results, outs),
        )
        for name, dims in zip(names, maps, strict=True)
        if name in layouts
        for dim, axes in zip(dims, layouts[name], strict=True)
        if axes and dim is not None
        for claim in op.claims(dim, axes, mesh)
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
        # Several values may put the axis there; it is major to those claimed later.
        if chosen[axis] == factor and axis not in spread[factor]:
            spread[factor].append(axis)
    return tuple(map(tuple, spread))
