"""Contractions over all chunks, beside transfers of whole shards.

The gradient of a weight contracts all rows, and only the optimizer waits for it.
Chunks would hide a backward's transfers, but they make matmuls smaller, and these
contractions need the chunks put together.  The contractions can hide the transfers
themselves.  Whole shards come while contractions of earlier loops are computed, and
sums go to their owners beside the loop's own contractions.
`schedule/whole_shards.py` decides when the transfers are issued, and
`schedule/waiting_contractions.py` which contractions stand beside them.

On two H100s six layers of Llama 8B in a scan, forward and backward, take 67.6 ms in
this way, 69.8 ms with the contractions behind loops over chunks, and 73.6 ms with one
collective for each transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Group, Node
from jhost.lowering.ir.index import Constant
from jhost.lowering.ir.queues import on_own
from jhost.lowering.loops.chunk import LoopSpec
from jhost.lowering.loops.moves import MovingLoop
from jhost.lowering.schedule.waiting_contractions import WaitingContractions
from jhost.lowering.schedule.whole_shards import in_turns, with_work_beside


class WholeShards(MovingLoop):
    """Communications issued together, by permutes, with contractions beside them."""

    def __init__(self, spec: LoopSpec, contractions: Sequence[Node]) -> None:
        super().__init__(spec)
        self.beside = _statements(contractions)

    def statements(self) -> list[ir.Stmt]:
        moved: list[ir.Stmt] = []
        for node in self.spec.nodes:
            # All shards move at once, because no work here is on a single shard.
            for step in range(self.devices):
                self.step, self.chunks, self.body = Constant(step), {}, []
                self.node(node)
                moved += self.body
        return with_work_beside([*self.before, *moved], self.beside)


class Unchunked:
    """The work of a loop on whole arrays, with contractions beside its transfers."""

    def __init__(self, spec: LoopSpec, contractions: WaitingContractions) -> None:
        self.spec = spec
        self.contractions = contractions
        self.filled: dict[str, ir.Buffer] = {}
        self.last: list[ir.Stmt] = []

    def statements(self) -> list[ir.Stmt]:
        body: list[ir.Stmt] = []
        for moves, group in in_turns(self.spec.nodes, self.is_moved):
            body += self.moved(group) if moves else self.computed(group)
        self.contractions.made(self.spec.nodes)
        # Tokens order the work against the transfers.
        return [*on_own(body), *self.last]

    def is_moved(self, node: Node) -> bool:
        communicates = isinstance(node.stmt, ir.Communicate)
        return communicates and self.spec.participation(node).ratio != 1

    def computed(self, nodes: Group) -> list[ir.Stmt]:
        self.contractions.made(nodes)
        return _statements(nodes)

    def moved(self, nodes: Group) -> list[ir.Stmt]:
        """Communications issued at one time, with contractions beside them."""
        shards = WholeShards(self.spec.of(nodes), self.contractions.beside())
        statements = shards.statements()
        self.filled |= shards.filled
        # Totals that nothing here reads are added up behind the loop, on no stream.
        # XLA may then fuse them into their readers, and reads the terms in place.
        if not self.reads(nodes):
            self.last += shards.totals()
            return statements
        self.contractions.made(nodes)
        return [*statements, *shards.totals()]

    def reads(self, nodes: Group) -> bool:
        """Whether anything here reads what the nodes make."""
        made = {buffer.name for node in nodes for buffer in node.writes}
        return any(b.name in made for node in self.spec.nodes for b in node.reads)


def _statements(nodes: Iterable[Node]) -> list[ir.Stmt]:
    return [stmt for node in nodes for stmt in node.stmts]
