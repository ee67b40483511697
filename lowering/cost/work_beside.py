"""The work that can stand beside a transfer while all work keeps its order.

A transfer is issued behind the last work that it waits for, and waited for before the
first work that needs it.  So weights can be gathered early, and their gradients can be
summed late, and neither needs a loop over chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from jhost.lowering.ir.graph import Graph


class WorkBeside:
    """For each node of a graph, the seconds of work from its operands to its readers.

    `seconds` has the seconds of each node's own work.  `carried` is for a body that
    runs again: it has the name of the result that makes each carried param.  There, a
    node that waits for nothing in its iteration can move to the iteration before, and
    one that nothing waits for can move to the next.  It is None where nothing repeats.
    """

    def __init__(
        self,
        graph: Graph,
        seconds: Sequence[float],
        carried: Mapping[str, str] | None = None,
    ) -> None:
        self.graph = graph
        self.works = list(map(bool, seconds))
        # When each node starts and ends, if work is all there is.
        self.ends = list(itertools.accumulate(seconds))
        self.starts = [0.0, *self.ends[:-1]]
        self.total = sum(seconds)
        again = carried is not None
        self._find_ready({}, -math.inf if again else 0.0)
        self._find_needed({}, math.inf if again else self.total)
        if carried:
            self._tie_iterations(carried)

    def of(self, number: int) -> float:
        """The seconds of work beside one node."""
        # An iteration has each node once, so no more than its own work is beside it.
        return min(self.needed[number] - self.ready[number], self.total)

    def _tie_iterations(self, carried: Mapping[str, str]) -> None:
        """A carried value comes from one iteration, and is needed in the next."""
        made = {name: self._made(result) for name, result in carried.items()}
        read = {result: self._read(name) for name, result in carried.items()}
        self._find_ready(made, -math.inf)
        self._find_needed(read, math.inf)

    def _made(self, result: str) -> float:
        """When the iteration before made a result."""
        number = self.graph.makers.get(result)
        return -math.inf if number is None else self._done(number) - self.total

    def _read(self, param: str) -> float:
        """When the next iteration needs a param."""
        numbers = self.graph.readers.get(param, ())
        return self.total + min(map(self._due, numbers), default=math.inf)

    def _done(self, number: int) -> float:
        """When the last work is done of those that lead to a node's results."""
        return self.ends[number] if self.works[number] else self.ready[number]

    def _due(self, number: int) -> float:
        """When the first work starts of those that need a node's operands."""
        return self.starts[number] if self.works[number] else self.needed[number]

    def _find_ready(self, made: Mapping[str, float], first: float) -> None:
        """When the operands of each node are there; params not in `made` at `first`."""
        self.ready = [first] * len(self.graph)
        for number, node in enumerate(self.graph):
            before = map(self._done, self.graph.before[number])
            params = (made[b.name] for b in node.reads if b.name in made)
            self.ready[number] = max([*before, *params], default=first)

    def _find_needed(self, read: Mapping[str, float], last: float) -> None:
        """When each node's results are needed; results not in `read` at `last`."""
        self.needed = needed = [
            min((read[b.name] for b in node.writes if b.name in read), default=last)
            for node in self.graph
        ]
        for number in reversed(range(len(self.graph))):
            for other in self.graph.before[number]:
                needed[other] = min(needed[other], self._due(number))
