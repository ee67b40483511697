"""`lax.optimization_barrier` around values, with accumulators that go through each.

A barrier that only waits for an accumulator would keep it alive, and XLA would copy it
before it is added to in place.  So one thread goes through all barriers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from jax import lax

TiedValues: TypeAlias = tuple[Any, ...]


class EmittedBarriers:
    """The barriers of a program so far, and the current value of each accumulator.

    By the identity of the old value.  The current value is the old one itself, or the
    result of a barrier, or None once something was added to it.
    """

    def __init__(self) -> None:
        self.accumulators: dict[int, tuple[Any, Any]] = {}

    def accumulated(self, old: Any | None, new: Any) -> None:
        """`new` is an accumulator with something added to `old`, if it had a value."""
        self.accumulators[id(new)] = new, new
        if old is not None:
            self.accumulators[id(old)] = old, None

    def latest(self, value: Any) -> Any:
        """The current value of an accumulator; any other value is itself."""
        while (found := self.accumulators.get(id(value))) and found[1] is not value:
            value = found[1]
        return value

    def behind(self, values: Sequence[Any], deps: Iterable[Any]) -> list[Any]:
        """The values, once `deps` are there."""
        own = {id(value) for value in values}
        others = distinct(map(self.latest, deps))
        # None is an accumulator that something was added to since.
        others = [d for d in others if d is not None and id(d) not in own]
        if not (values and others):
            return list(values)
        # A barrier result that nobody uses keeps its operand in the barrier as long as
        # the operand has other users, as a step's results have.
        tied = lax.optimization_barrier((*values, *others))
        for old, new in zip(others, tied[len(values) :], strict=True):
            if id(old) in self.accumulators:
                self.accumulators[id(old)] = old, new
                self.accumulators[id(new)] = new, new
        return list(tied[: len(values)])


def distinct(values: Iterable[Any]) -> TiedValues:
    """The values, each once."""
    return tuple({id(value): value for value in values}.values())
