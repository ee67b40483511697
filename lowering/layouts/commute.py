"""Carry a reduction behind a computation: C(reduce(x)) becomes reduce(C(x))."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set as AbstractSet

from jhost.lowering.ir.layout import Partial, axes_size, dims_of, layout_of, local_shape
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.operation import Assignment, Operation, operation
from jhost.lowering.ir.statements import Buffer, Compute, Reshard, Set, Stmt
from jhost.lowering.layouts.draft import Change, Draft, is_reduction
from jhost.lowering.rules.reducers import Reducer
from jhost.lowering.rules.table import distributes


def commuted(
    stmt: Compute,
    body: Draft,
    fixed: AbstractSet[str],
    mesh: Mapping[str, int],
    names: FreshNames,
) -> list[Change] | None:
    """The changes that carry the reductions of some operands behind `stmt`.

    None where it does not distribute over them, where another operand does not exist in
    the layout that is then needed, or where the user `fixed` the layout of a value.
    """
    for positions in _groups(stmt, body):
        reductions = [body.reduction(stmt.ins[position]) for position in positions]
        partials = {frozenset(s.source.partial) for s in reductions if s is not None}
        if None in reductions or len(partials) != 1:
            continue
        # The user constrains the reduced value, so it has to exist.
        if fixed & {stmt.ins[position].name for position in positions}:
            continue
        (partial,) = partials
        carrier = _Carrier(stmt, body, tuple(sorted(partial)), positions, mesh, names)
        changes = carrier.changes()
        if changes is not None:
            return changes
    return None


def _groups(stmt: Compute, body: Draft) -> list[frozenset[int]]:
    """The groups of operands whose reductions may be carried, by position in `ins`."""
    reducers: set[Reducer] = {
        reducer
        for buffer in stmt.ins
        if (reduction := body.reduction(buffer)) is not None
        for _, reducer in reduction.source.partial
    }
    if len(reducers) != 1:
        return []
    (reducer,) = reducers
    return [frozenset(group) for group in _terms(stmt, body, reducer)]


def _terms(stmt: Compute, body: Draft, reducer: Reducer) -> Iterator[list[int]]:
    """The groups of operands such that `stmt` distributes over reducing a whole group.

    Zeros are left out, because they add nothing to a sum on any device.
    """
    (unit_eqn,) = stmt.unit.eqns
    position = {id(var): number for number, var in enumerate(stmt.unit.invars)}
    atoms = unit_eqn.eqn.invars
    lone = any(map(body.has_lone_terms, stmt.ins))
    for group in distributes(unit_eqn.eqn, reducer, lone=lone):
        found = [position.get(id(atoms[number])) for number in sorted(group)]
        if None in found:
            # A literal is the same on all devices, so each device would add it once.
            continue
        numbers = [number for number in found if number is not None]
        if reducer == "sum":
            numbers = [n for n in numbers if not body.is_zeros(stmt.ins[n])]
        if numbers:
            yield numbers


def reduced_last(
    name: str,
    body: Draft,
    fixed: AbstractSet[str],
    mesh: Mapping[str, int],
    names: FreshNames,
) -> Reshard | None:
    """The reduction that makes a value, once it is the last step of making it.

    Reductions of the value's terms are carried behind all computations up to it,
    whatever that costs.  None if that cannot be done; some may then be carried already.
    """
    maker = body.makers.get(name)
    # Another reader needs the reduced value.
    if maker is None or len(body.readers.get(name, ())) > 1:
        return None
    if isinstance(maker, Compute):
        for positions in _terms(maker, body, "sum"):
            operands = [maker.ins[position].name for position in positions]
            if len(set(operands)) < len(operands):
                continue  # one value twice: carrying it for one place changes both
            parts = [reduced_last(n, body, fixed, mesh, names) for n in operands]
            changes = commuted(maker, body, fixed, mesh, names) if all(parts) else None
            if changes is not None:
                body.replace(changes)
                maker = body.makers[name]
                break
    if not is_reduction(maker) or layout_of(maker.source) != layout_of(maker.out):
        return None
    return maker if {r for _, r in maker.source.partial} == {"sum"} else None


class _Carrier:
    def __init__(
        self,
        stmt: Compute,
        body: Draft,
        partial: Partial,
        positions: frozenset[int],
        mesh: Mapping[str, int],
        names: FreshNames,
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

    def changes(self) -> list[Change] | None:
        if self.axes != self.unit_eqn.axes and self.unit_eqn.rule.contracts:
            return None  # several devices would do the same work
        ins = [self.operand(position) for position in range(len(self.stmt.ins))]
        made = [self.result(position) for position in range(len(self.stmt.outs))]
        if None in ins or None in made:
            return None
        changes: list[Change] = []
        after: list[Stmt] = []
        outs: list[Buffer] = []
        for out, partial in zip(self.stmt.outs, made, strict=True):
            assert partial is not None
            copy = self.body.only_copy(out)
            outs.append(partial)
            if copy is not None:
                # The only reader moves the value anyway, and can reduce it in the same
                # step.  A plain copy (`jhost.serial`) becomes the reduction.
                changes.append((copy, (Reshard(out=copy.out, source=partial),)))
            else:
                after.append(Reshard(out=out, source=partial))
        unit_eqn = dataclasses.replace(self.unit_eqn, axes=self.axes)
        unit = dataclasses.replace(self.stmt.unit, eqns=(unit_eqn,))
        compute = dataclasses.replace(
            self.stmt,
            unit=unit,
            ins=tuple(buffer for buffer in ins if buffer is not None),
            outs=tuple(outs),
        )
        return [*changes, (self.stmt, (compute, *after))]

    def operand(self, position: int) -> Buffer | None:
        """The new operand: a partial value, or a whole one in the layout needed."""
        buffer, want = self.stmt.ins[position], self.op.required(position, self.axes)
        maker = self.body.makers.get(buffer.name)
        if position in self.positions:
            assert isinstance(maker, Reshard)
            return maker.source if layout_of(maker.source) == want else None
        if layout_of(buffer) == want:
            return buffer
        if isinstance(maker, Set | Reshard) and not maker.source.partial:
            return maker.source if layout_of(maker.source) == want else None
        return None

    def result(self, position: int) -> Buffer | None:
        """The partial value that the computation then makes."""
        out = self.stmt.outs[position]
        layout, partial = self.op.produced(position, self.axes)
        reducers = {reducer for _, reducer in (*partial, *self.partial)}
        copy = self.body.only_copy(out)
        # A sum over one axis and a maximum over another do not commute, so only one of
        # them can be put off.
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
