"""Carry a reduction behind a computation: C(reduce(x)) becomes reduce(C(x))."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set as AbstractSet,
)
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from jax.extend.core import Literal

from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.layout import Partial, axes_size, dims_of, layout_of, local_shape
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.operation import Assignment, Operation, operation
from jhost.lowering.ir.statements import (
    Buffer,
    Compute,
    Reshard,
    Set,
    Stmt,
    UnitEqn,
)
from jhost.lowering.rules.reducers import Reducer
from jhost.lowering.rules.table import distributes, keeps_terms

Change: TypeAlias = tuple[Stmt, Sequence[Stmt]]
"""A statement, and the statements that take its slot."""


class Rewrite:
    """Statements that can be changed and changed back, with the users of each buffer.

    Each statement has a slot, and other statements may take the slot.  `needed` has the
    names of the results, and `marked` the names of values that the user marked.
    """

    def __init__(
        self, stmts: Iterable[Stmt], needed: Collection[str], marked: Collection[str]
    ) -> None:
        self.needed = needed
        self.marked = marked
        self.slots: list[tuple[Stmt, ...]] = []
        self.slot_of: dict[int, int] = {}
        self.makers: dict[str, Stmt] = {}
        self.readers: dict[str, dict[int, Stmt]] = {}  # by identity
        self.changed: list[tuple[int, tuple[Stmt, ...]]] = []
        """Each slot that was changed, in order, with the statements it had before."""
        for slot, stmt in enumerate(stmts):
            self.slots.append(())
            self._fill(slot, (stmt,))

    def reduction(self, buffer: Buffer) -> Reshard | None:
        """The reduction that makes `buffer` from a partial value, if there is one."""
        stmt = self.makers.get(buffer.name)
        return stmt if stmt is not None and is_reduction(stmt) else None

    def is_zeros(self, buffer: Buffer) -> bool:
        """Whether nothing but zeros is written to `buffer`."""
        stmt = self.makers.get(buffer.name)
        return stmt is not None and zero_of(stmt) is not None

    def has_lone_terms(self, buffer: Buffer) -> bool:
        """Whether `buffer` is a sum of what each device looked up of its own steps."""
        reduction = self.reduction(buffer)
        if reduction is None:
            return False
        value, axes = reduction.source, {axis for axis, _ in reduction.source.partial}
        while axes and isinstance(maker := self.makers.get(value.name), Compute):
            (unit_eqn,) = maker.unit.eqns
            axes -= _looked_up_over(unit_eqn)
            if axes and not (maker.ins and keeps_terms(unit_eqn.eqn)):
                break
            value = maker.ins[0]
        return not axes

    def only_copy(self, buffer: Buffer) -> Set | Reshard | None:
        """The only reader of `buffer`, if that is a copy or a reshard."""
        kept = buffer.name in self.needed or buffer.name in self.marked
        readers = [*self.readers.get(buffer.name, {}).values()]
        if kept or len(readers) != 1:
            return None
        return readers[0] if isinstance(readers[0], Set | Reshard) else None

    def replace(self, changes: Sequence[Change]) -> None:
        """Replace some statements, and remove copies that nothing reads any more."""
        for old, new in changes:
            slot = self.slot_of[id(old)]
            self.changed.append((slot, self.slots[slot]))
            stmts = ((s,) if s is not old else new for s in self.slots[slot])
            self._fill(slot, tuple(itertools.chain(*stmts)))
        for old, _ in changes:
            for buffer in reads_writes(old)[0]:
                copy = self.makers.get(buffer.name)
                read = buffer.name in self.readers or buffer.name in self.needed
                if isinstance(copy, Set | Reshard) and not read:
                    self.replace([(copy, ())])

    def replaced(self, count: int) -> dict[int, tuple[Stmt, ...]]:
        """By slot, the statements that the changes after the first `count` replaced."""
        return dict(reversed(self.changed[count:]))

    def take_back(self, count: int) -> None:
        """Undo all changes but the first `count`."""
        while len(self.changed) > count:
            self._fill(*self.changed.pop())

    def _fill(self, slot: int, stmts: tuple[Stmt, ...]) -> None:
        for stmt in self.slots[slot]:
            del self.slot_of[id(stmt)]
            reads, writes = reads_writes(stmt)
            for buffer in writes:
                if self.makers.get(buffer.name) is stmt:
                    del self.makers[buffer.name]
            for name in {buffer.name for buffer in reads}:
                del self.readers[name][id(stmt)]
                if not self.readers[name]:
                    del self.readers[name]
        self.slots[slot] = stmts
        for stmt in stmts:
            self.slot_of[id(stmt)] = slot
            reads, writes = reads_writes(stmt)
            self.makers.update((buffer.name, stmt) for buffer in writes)
            for buffer in reads:
                self.readers.setdefault(buffer.name, {})[id(stmt)] = stmt


def zero_of(stmt: Stmt) -> Any:
    """The zero that a statement fills an array with (0.0 or -0.0), or None."""
    if not isinstance(stmt, Compute) or stmt.ins:
        return None
    (unit_eqn,) = stmt.unit.eqns
    if unit_eqn.eqn.primitive.name != "broadcast_in_dim":
        return None
    (value,) = (v.val for v in unit_eqn.eqn.invars if isinstance(v, Literal))
    return None if np.any(np.asarray(value)) else value


def is_reduction(stmt: Stmt) -> TypeGuard[Reshard]:
    """Whether a statement reduces a partial value."""
    return isinstance(stmt, Reshard) and bool(stmt.source.partial)


def _looked_up_over(unit_eqn: UnitEqn) -> set[str]:
    """The axes whose devices each look up their own steps, and else give neutrals."""
    rule = unit_eqn.rule
    if rule.contracts:  # rows of a group are multiplied, and other rows are 0.0
        return set()
    summed = (f for f in rule.picked if rule.reducers[f] == "sum")
    return {axis for factor in summed for axis in unit_eqn.axes[factor]}


def commuted(
    stmt: Compute,
    body: Rewrite,
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


def _groups(stmt: Compute, body: Rewrite) -> list[frozenset[int]]:
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


def _terms(stmt: Compute, body: Rewrite, reducer: Reducer) -> Iterator[list[int]]:
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
    body: Rewrite,
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
        body: Rewrite,
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
