"""One reduction carried behind one computation: P -> R, C(R) becomes C(P) -> R'."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set as AbstractSet

from jhost.lowering.graph import touched
from jhost.lowering.ir import Buffer, Compute, Set, Stmt
from jhost.lowering.layout import dims_of, layout_of, local_shape
from jhost.lowering.names import Names
from jhost.lowering.operations import Assignment, Operation, operation
from jhost.lowering.reshard import Partial
from jhost.lowering.rules import Reducer, axes_size
from jhost.lowering.table import distributes


class Body:
    """Statements, and who makes and reads each buffer.

    `needed` are the results, and `marked` what the user said something about.
    """

    def __init__(
        self, stmts: Sequence[Stmt], needed: Collection[str], marked: Collection[str]
    ) -> None:
        self.needed = needed
        self.marked = marked
        self.stmts = tuple(stmts)
        self.makers: dict[str, Stmt] = {}
        self.readers: dict[str, list[Stmt]] = {}
        for stmt in stmts:
            reads, writes = touched(stmt)
            self.makers.update((buffer.name, stmt) for buffer in writes)
            for buffer in reads:
                self.readers.setdefault(buffer.name, []).append(stmt)

    def reduction(self, buffer: Buffer) -> Set | None:
        """The `Set` that makes `buffer` from a partial value, if one does."""
        stmt = self.makers.get(buffer.name)
        return stmt if isinstance(stmt, Set) and stmt.source.partial else None

    @property
    def reductions(self) -> dict[str, Set]:
        """All of them, by the name of what they make."""
        return {
            stmt.out.name: stmt
            for stmt in self.stmts
            if isinstance(stmt, Set) and stmt.source.partial
        }

    def only_copy(self, buffer: Buffer) -> Set | None:
        """The `Set` that alone reads `buffer`, if nothing else does."""
        readers = self.readers.get(buffer.name, [])
        kept = buffer.name in self.needed or buffer.name in self.marked
        if kept or len(readers) != 1:
            return None
        return readers[0] if isinstance(readers[0], Set) else None

    def replaced(self, changes: Mapping[int, Sequence[Stmt]]) -> Body:
        """Other statements in place of some, by identity, without unread copies."""
        stmts = [new for s in self.stmts for new in changes.get(id(s), (s,))]
        body = Body(stmts, self.needed, self.marked)
        unread = {
            stmt.out.name
            for stmt in stmts
            if isinstance(stmt, Set)
            and stmt.out.name not in self.needed
            and stmt.out.name not in body.readers
        }
        if not unread:
            return body
        kept = [s for s in stmts if not (isinstance(s, Set) and s.out.name in unread)]
        return Body(kept, self.needed, self.marked).replaced({})


def behind(
    stmt: Compute,
    body: Body,
    fixed: AbstractSet[str],
    mesh: Mapping[str, int],
    names: Names,
) -> Body | None:
    """`body` with the reductions of some operands of `stmt` carried behind it.

    None where it does not distribute over them, where another operand is not there in
    the layout that is needed then, or where a value is `fixed` by the user.
    """
    for positions in _groups(stmt, body):
        reductions = [body.reduction(stmt.ins[position]) for position in positions]
        partials = {frozenset(s.source.partial) for s in reductions if s is not None}
        if None in reductions or len(partials) != 1:
            continue
        if fixed & {stmt.ins[position].name for position in positions}:
            continue
        (partial,) = partials
        carrier = _Carrier(stmt, body, tuple(sorted(partial)), positions, mesh, names)
        new = carrier.body_behind()
        if new is not None:
            return new
    return None


def _groups(stmt: Compute, body: Body) -> list[frozenset[int]]:
    """The groups of operands whose reductions may be carried, by position in `ins`."""
    (unit_eqn,) = stmt.unit.eqns
    reducers: set[Reducer] = {
        reducer
        for buffer in stmt.ins
        if (reduction := body.reduction(buffer)) is not None
        for _, reducer in reduction.source.partial
    }
    if len(reducers) != 1:
        return []
    (reducer,) = reducers
    position = {id(var): number for number, var in enumerate(stmt.unit.invars)}
    atoms = unit_eqn.eqn.invars
    # A literal is the same on all devices, and would be added once by each.
    groups = [
        [position.get(id(atoms[number])) for number in group]
        for group in distributes(unit_eqn.eqn, reducer)
    ]
    return [
        frozenset(number for number in group if number is not None)
        for group in groups
        if None not in group
    ]


class _Carrier:
    def __init__(
        self,
        stmt: Compute,
        body: Body,
        partial: Partial,
        positions: frozenset[int],
        mesh: Mapping[str, int],
        names: Names,
    ) -> None:
        self.stmt = stmt
        self.body = body
        self.partial = partial
        self.positions = positions
        self.mesh = mesh
        self.names = names
        self.op: Operation = operation(stmt)
        (self.unit_eqn,) = stmt.unit.eqns
        axes = {axis for axis, _ in partial}
        self.axes: Assignment = tuple(
            tuple(axis for axis in spread if axis not in axes)
            for spread in self.unit_eqn.axes
        )

    def body_behind(self) -> Body | None:
        if self.axes != self.unit_eqn.axes and self.contracts:
            return None  # devices would repeat one another's work
        ins = [self.operand(position) for position in range(len(self.stmt.ins))]
        made = [self.result(position) for position in range(len(self.stmt.outs))]
        if None in ins or None in made:
            return None
        changes: dict[int, Sequence[Stmt]] = {}
        after: list[Stmt] = []
        outs: list[Buffer] = []
        for out, partial in zip(self.stmt.outs, made, strict=True):
            assert partial is not None
            copy = self.body.only_copy(out)
            outs.append(partial)
            if copy is not None:
                changes[id(copy)] = (dataclasses.replace(copy, source=partial),)
            else:
                after.append(Set(out=out, source=partial))
        unit_eqn = dataclasses.replace(self.unit_eqn, axes=self.axes)
        unit = dataclasses.replace(self.stmt.unit, eqns=(unit_eqn,))
        compute = dataclasses.replace(
            self.stmt,
            unit=unit,
            ins=tuple(buffer for buffer in ins if buffer is not None),
            outs=tuple(outs),
        )
        changes[id(self.stmt)] = (compute, *after)
        return self.body.replaced(changes)

    @property
    def contracts(self) -> bool:
        return len(self.op.operands) > 1 and any(self.op.reducers)

    def operand(self, position: int) -> Buffer | None:
        """What is read then: a partial value, or one that all devices have alike."""
        buffer, want = self.stmt.ins[position], self.op.required(position, self.axes)
        maker = self.body.makers.get(buffer.name)
        if position in self.positions:
            assert isinstance(maker, Set)
            return maker.source if layout_of(maker.source) == want else None
        if layout_of(buffer) == want:
            return buffer
        if isinstance(maker, Set) and not maker.source.partial:
            return maker.source if layout_of(maker.source) == want else None
        return None

    def result(self, position: int) -> Buffer | None:
        """The partial value that is made then."""
        out = self.stmt.outs[position]
        layout, partial = self.op.produced(position, self.axes)
        reducers = {reducer for _, reducer in (*partial, *self.partial)}
        copy = self.body.only_copy(out)
        if len(reducers) > 1 or (out.partial and copy is None):
            return None
        shards = [axes_size(dim.axes, self.mesh) for dim in out.dims]
        shape = [size * count for size, count in zip(out.shape, shards, strict=True)]
        wanted = (copy.out if copy else out).name + "_partial"
        return dataclasses.replace(
            out,
            name=out.name if out.partial else self.names.fresh(wanted),
            shape=local_shape(shape, layout, self.mesh),
            dims=dims_of(layout),
            partial=(*partial, *self.partial),
        )
