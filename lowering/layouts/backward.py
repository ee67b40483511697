"""Rounds that carry preferences from the consumers of values to their producers."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from jhost.lowering.ir.layout import used_axes
from jhost.lowering.ir.operation import Assignment, Operation
from jhost.lowering.layouts.preferences import Preference, Preferences, Preferred

_NO_AXES = frozenset[str]()


class Backward:
    """The rounds of one start: the first goes through all operations.

    `readers` and `makers` have the operations that read or make each value.
    """

    def __init__(
        self,
        preferences: Preferences,
        operations: Sequence[Operation],
        readers: Mapping[str, Sequence[int]],
        makers: Mapping[str, int],
    ) -> None:
        self.preferences = preferences
        self.operations = operations
        self.readers = readers
        self.makers = makers
        self.asked: dict[int, Sequence[Preferred]] = {}
        """What each operation prefers for its operands."""

    def all(self, assignments: Sequence[Assignment] | None) -> list[str]:
        """Carry preferences through all operations, with assignments if they have any.

        Returns:
            The values whose preferences changed.
        """
        preferences = self.preferences
        before = preferences.snapshot()
        for number in reversed(range(len(self.operations))):
            assignment = self.asking(number, assignments)
            asked = preferences.preferred(self.operations[number], assignment)
            self.asked[number] = asked
            # At first only the axes that constraints suggest are known.
            free = _NO_AXES
            if not assignments and asked:
                free = preferences.axes_beside(used_axes(assignment))
            for name, wanted, used in asked:
                # A layout that uses no axis is no reason to gather a value, so it does
                # not replace another preference.
                if used or name not in preferences.targets:
                    preferences.targets[name] = wanted
                    preferences.free_axes[name] = free
        return preferences.changed_since(before)

    def again(
        self, assignments: Sequence[Assignment], numbers: Collection[int]
    ) -> list[str]:
        """Carry them as `all` would, where only some operations' assignments changed.

        There was a round with assignments before.
        """
        # Most rounds change a few of thousands of operations.
        before: dict[str, Preference] = {}
        queued = {*numbers}
        waiting = sorted(-number for number in queued)
        while waiting:
            number = -heapq.heappop(waiting)
            op = self.operations[number]
            asked = self.preferences.preferred(op, self.asking(number, assignments))
            if asked is self.asked[number]:
                continue
            self.asked[number] = asked
            for name in op.ins:
                before.setdefault(name, self.preferences.of(name))
                maker = self.makers.get(name)
                if self.prefer(name) and maker is not None and maker not in queued:
                    # It may prefer for its operand what readers of its result do.
                    queued.add(maker)
                    heapq.heappush(waiting, -maker)
        return [
            name for name, old in before.items() if self.preferences.of(name) != old
        ]

    def prefer(self, name: str) -> bool:
        """Set what the first reader of a value prefers; whether that is new."""
        for reader in self.readers[name]:
            wanted = [
                want for n, want, used in self.asked[reader] if used and n == name
            ]
            if wanted:
                old = self.preferences.of(name)
                self.preferences.targets[name] = wanted[-1]
                self.preferences.free_axes[name] = _NO_AXES
                return self.preferences.of(name) != old
        return False

    def asking(
        self, number: int, assignments: Sequence[Assignment] | None
    ) -> Assignment:
        """The assignment by which an operation prefers layouts."""
        op = self.operations[number]
        assignment = None if assignments is None else assignments[number]
        if assignment is None or self.preferences.is_as_read(op, assignment):
            return self.preferences.suggested(op)
        return assignment
