"""Kinds of operations: two of a kind are assigned alike, and cost the same.

Layers repeat their operations, and an optimizer does the same to many weights.
Findings about one operation hold for each of its kind, also in other solutions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from jhost._jax import itemsize
from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.preferences import Preferences
from jhost.lowering.layouts.transfer_bytes import ReshardCosts

if TYPE_CHECKING:
    from jhost.lowering.layouts.effects import AssignmentEffect

_NAMES = {"stmt", "ins", "outs", "like"}
_SAID = [f.name for f in dataclasses.fields(Operation) if f.name not in _NAMES]
"""What an operation says beside the names of its values."""


@dataclasses.dataclass(frozen=True, slots=True)
class OfKinds:
    """What solutions found out about kinds of operations.

    Attributes:
        numbers: the kinds, by all that they say.
        effects: the effect of an assignment, by kind and preferences.
        cheapest: the best assignment, by all that it depends on.
        others: what else an operation could have, by all that this depends on.
    """

    numbers: dict[Hashable, int] = dataclasses.field(default_factory=dict[Any, int])
    effects: dict[Hashable, AssignmentEffect] = dataclasses.field(
        default_factory=dict[Any, Any]
    )
    cheapest: dict[Hashable, Assignment] = dataclasses.field(
        default_factory=dict[Any, Any]
    )
    others: dict[Hashable, Sequence[Assignment]] = dataclasses.field(
        default_factory=dict[Any, Any]
    )


class Kinds:
    """The number of the kind of each operation of a program."""

    def __init__(
        self,
        preferences: Preferences,
        costs: ReshardCosts,
        numbers: dict[Hashable, int],
    ) -> None:
        self.preferences = preferences
        self.costs = costs
        self.mesh = tuple(costs.mesh.items())
        self.numbers = numbers
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
        return len(op.ins), op.like is None, self.mesh, tuple(values), *said

    def _value(self, name: str) -> Hashable:
        buffer, costs = self.costs.buffers[name], self.costs
        return (
            buffer.shape,
            itemsize(buffer.dtype),
            costs.times(name),
            costs.streamed.get(name),
            name in costs.made_anywhere,
            self.preferences.specs.get(name),
            name in self.preferences.barriers,
        )


def by_place(
    op: Operation, moves: Collection[tuple[str, Layout]]
) -> frozenset[tuple[int, Layout]]:
    """Moves of an operation's operands, without their names."""
    if not moves:  # most often
        return frozenset()
    return frozenset((op.ins.index(name), want) for name, want in moves)
