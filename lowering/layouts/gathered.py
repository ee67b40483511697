"""Where a value was gathered for an operation that needs one of its dims whole.

The gather may be several operations earlier.  It may gather the operand of a cast, for
example, because that has fewer bytes, and then every device makes the whole cast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jhost.lowering.ir.graph import makers_of
from jhost.lowering.ir.operation import Operation
from jhost.lowering.ir.statements import Compute
from jhost.lowering.layouts.solve import Solution
from jhost.lowering.layouts.transfer_bytes import NOTHING, TransferBytes
from jhost.lowering.rules.dim_rule import factors_of

_STEPS = 16
"""The most operations that are followed backward; there are few casts in a row."""


class Gathered(NamedTuple):
    """A value that is gathered because a dim of it has to be whole, and its bytes."""

    name: str
    moved: TransferBytes


class Gathers:
    """The gathers of one solution, found from the operations that need them."""

    def __init__(self, solution: Solution) -> None:
        self.solution = solution
        self.makers = makers_of(op.outs for op in solution.operations)

    def of(self, number: int) -> Iterator[tuple[int, int, Gathered]]:
        """The gathers for an operation's whole dims, with operand and dim of each."""
        op = self.solution.operations[number]
        spread = self._spread(number)
        # Dims of several factors are whole where no mesh axis may cut them.
        nested = factors_of(op.nested)
        for position, name in enumerate(op.ins):
            for dim, mapped in enumerate(op.operands[position]):
                if mapped is not None and mapped.factor not in nested:
                    continue
                # If the axis is on another dim of the operation, each device still has
                # its own part of the work.
                if {*self.solution.layouts[name][dim]} - spread:
                    yield position, dim, self._gathered(number, position)
                else:
                    for found in self._before(name, dim, spread):
                        yield position, dim, found

    def _before(self, name: str, dim: int, spread: set[str]) -> Iterator[Gathered]:
        """The gathers of the values that a value is made of, for one dim of it."""
        waiting, steps = [(name, dim)], _STEPS
        while waiting and steps:
            steps -= 1
            (name, dim) = waiting.pop()
            number = self.makers.get(name, -1)
            op = self.solution.operations[number]
            # A contraction has reasons of its own, and so has a border of a body.
            if number < 0 or op.reduces or not isinstance(op.stmt, Compute):
                continue
            mapped = op.results[op.outs.index(name)][dim]
            for source, place in _along(op, mapped.factor) if mapped else ():
                lost = {*self.solution.layouts[op.ins[source]][place]}
                if lost - spread - self._spread(number):
                    yield self._gathered(number, source)
                else:
                    waiting.append((op.ins[source], place))

    def _gathered(self, number: int, position: int) -> Gathered:
        op, solution = self.solution.operations[number], self.solution
        name, assignment = op.ins[position], solution.assignments[number]
        have, want = solution.layouts[name], op.required(position, assignment)
        return Gathered(name, solution.costs.reshard(name, have, want))

    def _spread(self, number: int) -> set[str]:
        return {axis for axes in self.solution.assignments[number] for axis in axes}


def moved_in_all(gathers: set[Gathered]) -> TransferBytes:
    """The bytes of all these gathers."""
    return sum((each.moved for each in gathers), NOTHING)


def _along(op: Operation, factor: int) -> Iterator[tuple[int, int]]:
    """The operands' dims that follow a factor."""
    for position, dims in enumerate(op.operands):
        for dim, mapped in enumerate(dims):
            if mapped is not None and mapped.factor == factor:
                yield position, dim
