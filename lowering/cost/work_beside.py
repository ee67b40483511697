"""The work that may stand beside a transfer in any order that a program can have.

What waits for no work, or has none waiting for it, needs no loop over chunks to hide
it: weights can be gathered early, and their gradients be summed late.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from jhost.lowering.ir.graph import Graph

_Steps: TypeAlias = Callable[[int], Iterator[int]]
"""The nodes next to one, on one side."""


class WorkBeside:
    """For each node of a graph, the seconds of work that have no order with it.

    `seconds` are those of the nodes' own work.  In a body that runs `again`, what waits
    for nothing of its iteration can be moved to the one before, and what nothing waits
    for to the next.  All work then stands beside it.
    """

    def __init__(self, graph: Graph, seconds: Sequence[float], again: bool) -> None:
        self.graph, self.seconds, self.again = graph, seconds, again
        self.total = sum(seconds)
        # Sets of nodes as bits, since there is one for each node.
        self.before = self._reached(range(len(graph)), self._made_by)
        self.behind = self._reached(reversed(range(len(graph))), self._read_by)

    def of(self, number: int) -> float:
        """The seconds of work beside one node."""
        before, behind = self.before[number], self.behind[number]
        if self.again and not (before and behind):
            return self.total
        return self.total - self._sum(before | behind)

    def _reached(self, numbers: Iterable[int], steps: _Steps) -> dict[int, int]:
        """The nodes with work that steps lead to from each, which come before it."""
        reached: dict[int, int] = {}
        for number in numbers:
            every = 0
            for other in steps(number):
                every |= reached[other] | (bool(self.seconds[other]) << other)
            reached[number] = every
        return reached

    def _made_by(self, number: int) -> Iterator[int]:
        makers = self.graph.makers
        names = (buffer.name for buffer in self.graph[number].reads)
        return (makers[name] for name in names if name in makers)

    def _read_by(self, number: int) -> Iterator[int]:
        readers = self.graph.readers
        names = (buffer.name for buffer in self.graph[number].writes)
        return (reader for name in names for reader in readers.get(name, ()))

    def _sum(self, nodes: int) -> float:
        return sum(
            self.seconds[number] for number in self._working if nodes >> number & 1
        )

    @functools.cached_property
    def _working(self) -> list[int]:
        return [number for number, seconds in enumerate(self.seconds) if seconds]
