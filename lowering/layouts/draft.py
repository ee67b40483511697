"""Statements that can be changed and changed back, as long as nothing is settled."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from jax.extend.core import Literal

from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.statements import Buffer, Compute, Reshard, Set, Stmt, UnitEqn
from jhost.lowering.rules.table import keeps_terms

Change: TypeAlias = tuple[Stmt, Sequence[Stmt]]
"""A statement, and the statements that take its slot."""


class Draft:
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
