"""Contractions that nothing waits for, and the transfers that each stands beside.

The gradient of a weight is read by the optimizer alone, so it may be computed long
after its operands are there: beside a transfer that would have no work beside it.  The
choice goes by counts, as in `order.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jhost.lowering.ir.graph import Group, Node

_TRANSFERS = 2
"""For so many transfers there is work in the contractions that are ready.

Those of a loop hide its own last transfer and the first of the next loop.
"""


class WaitingContractions:
    """The contractions over all chunks of a graph that nothing has taken yet."""

    def __init__(self, graph: Sequence[Node], numbers: Iterable[int]) -> None:
        self.every = [graph[number] for number in sorted(numbers)]
        self.waiting = self.every
        # Names of what is still to be made: a sum that reads none of them is ready.
        self.unmade = {buffer.name for node in graph for buffer in node.writes}

    def made(self, nodes: Iterable[Node]) -> None:
        """Note that all that the nodes write is there from now on."""
        self.unmade -= {buffer.name for node in nodes for buffer in node.writes}

    def beside(self) -> list[Node]:
        """The contractions beside the next transfer: its share of those ready."""
        ready = [
            node
            for node in self.waiting
            if self.unmade.isdisjoint(buffer.name for buffer in node.reads)
        ]
        return self.taken(ready[: -(-len(ready) // _TRANSFERS)])

    def before(self, group: Group) -> list[Node]:
        """The contractions whose results `group` reads."""
        read = {buffer.name for node in group for buffer in node.reads}
        return self.taken(
            [node for node in self.waiting if read & {b.name for b in node.writes}]
        )

    def taken(self, nodes: list[Node]) -> list[Node]:
        """The nodes, which no longer wait."""
        self.waiting = [node for node in self.waiting if node not in nodes]
        self.made(nodes)
        return nodes
