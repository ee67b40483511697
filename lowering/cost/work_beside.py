"""The work that may stand beside a transfer in any order that a program can have.

A transfer that waits for no work, or that no work waits for, needs no loop over chunks:
weights can be gathered early, and their gradients can be summed late.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from jhost.lowering.ir.graph import Graph


class WorkBeside:
    """For each node of a graph, the seconds of work that have no order with it.

    `seconds` has the seconds of each node's own work.  In a body that runs `again`, a
    node that waits for no work of its iteration can move to the iteration before, and a
    node that no work waits for can move to the next.  All work then stands beside it.
    """

    def __init__(self, graph: Graph, seconds: Sequence[float], again: bool) -> None:
        self.seconds, self.again = seconds, again
        self.total = sum(seconds)
        # Sets of nodes with work, as bits: there are two sets for each node.
        self.before, self.behind = [0] * len(graph), [0] * len(graph)
        for number, needed in enumerate(graph.before):
            for other in needed:
                self.before[number] |= self.before[other] | self._bit(other)
        for number in reversed(range(len(graph))):
            for other in graph.before[number]:
                self.behind[other] |= self.behind[number] | self._bit(number)

    def of(self, number: int) -> float:
        """The seconds of work beside one node."""
        before, behind = self.before[number], self.behind[number]
        if self.again and not (before and behind):
            return self.total
        return self.total - self._sum(before | behind)

    def _bit(self, number: int) -> int:
        return bool(self.seconds[number]) << number

    def _sum(self, nodes: int) -> float:
        return sum(
            self.seconds[number] for number in self._working if nodes >> number & 1
        )

    @functools.cached_property
    def _working(self) -> list[int]:
        return [number for number, seconds in enumerate(self.seconds) if seconds]
