"""Kinds of operations: two of a kind are assigned alike, and cost the same.

Layers repeat their operations, and an optimizer does the same to many weights.
Findings about one operation hold for each of its kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.operation import Operation
from jhost.lowering.layouts.preferences import Preferences
from jhost.lowering.layouts.transfer_bytes import ReshardCosts

_NAMES = {"stmt", "ins", "outs", "like"}
_SAID = [f.name for f in dataclasses.fields(Operation) if f.name not in _NAMES]
"""What an operation says beside the names of its values."""


class Kinds:
    """The number of the kind of each operation of a program."""

    def __init__(self, preferences: Preferences, costs: ReshardCosts) -> None:
        self.preferences = preferences
        self.costs = costs
        self.numbers: dict[Hashable, int] = {}
        # By the operation itself, because its id may be reused once it is gone.
        self.known: dict[Operation, int] = {}

    def of(self, op: Operation) -> int:
        number = self.known.get(op)
        if number is None:
            number = self.numbers.setdefault(self._said(op), len(self.numbers))
            self.known[op] = number
        return number

    def _said(self, op: Operation) -> Hashable:
        # A value that is read twice moves once.
        places = {name: place for place, name in enumerate((*op.ins, *op.outs))}
        values = [(places[name], self._value(name)) for name in (*op.ins, *op.outs)]
        said = [getattr(op, name) for name in _SAID]
        return len(op.ins), op.like is None, tuple(values), *said

    def _value(self, name: str) -> Hashable:
        buffer, costs = self.costs.buffers[name], self.costs
        return (
            buffer.shape,
            buffer.dtype.itemsize,
            costs.times(name),
            costs.streamed.get(name),
            name in costs.made_anywhere,
            self.preferences.specs.get(name),
            name in self.preferences.barriers,
        )


def by_place(
    op: Operation, moves: Iterable[tuple[str, Layout]]
) -> frozenset[tuple[int, Layout]]:
    """Moves of an operation's operands, without their names."""
    return frozenset((op.ins.index(name), want) for name, want in moves)
