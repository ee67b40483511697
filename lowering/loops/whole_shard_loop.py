"""Contractions over all chunks, beside transfers of whole shards.

The gradient of a weight contracts all rows, and only the optimizer waits for it.
Chunks would hide a backward's transfers, but they make matmuls smaller, and these
contractions need the chunks put together.  The contractions can hide the transfers
themselves.  Whole shards come while contractions of earlier loops are computed, and
sums go to their owners beside the loop's own contractions.
`schedule/whole_shards.py` decides when the transfers are issued, and
`schedule/waiting_contractions.py` which contractions stand beside them.

Six layers of Llama 8B in a scan, forward and backward on two H100s, take 67.6 ms in
this way.  They take 69.8 ms with the contractions behind loops over chunks, and 73.6 ms
with one collective for each transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Group, Node
from jhost.lowering.ir.index import Constant
from jhost.lowering.ir.queues import on_own
from jhost.lowering.loops.chunk import LoopSpec
from jhost.lowering.loops.moves import MovingLoop
from jhost.lowering.schedule.waiting_contractions import WaitingContractions
from jhost.lowering.schedule.whole_shards import (
    as_they_arrive,
    in_turns,
    issued,
    waited_for,
)


class WholeShards(MovingLoop):
    """One communication of whole shards, by permutes that are issued together."""

    def statements(self) -> list[ir.Stmt]:
        moved: list[ir.Stmt] = []
        for node in self.spec.nodes:
            # All shards move at once, because no work here is on a single shard.
            for step in range(self.devices):
                self.step, self.chunks, self.body = Constant(step), {}, []
                self.node(node)
                moved += self.body
        return [*self.before, *moved]


class WholeShardLoop:
    """The work of a loop on whole arrays, with contractions beside its transfers."""

    def __init__(self, spec: LoopSpec, contractions: WaitingContractions) -> None:
        self.spec = spec
        self.contractions = contractions
        self.turns = [*in_turns(spec.nodes, self.is_moved)]
        self.shards: dict[int, WholeShards] = {}
        self.stmts: dict[int, list[ir.Stmt]] = {}
        """The statements of each transfer that was issued, by the node's identity."""
        self.filled: dict[str, ir.Buffer] = {}
        self.last: list[ir.Stmt] = []

    def statements(self) -> list[ir.Stmt]:
        # Tokens order the work against the transfers.
        stmts = [stmt for turn in self.turns for stmt in self.turn(*turn)]
        return [*on_own(stmts), *self.last]

    def ahead(self, node: Node, shards: slice) -> list[ir.Stmt]:
        """Shards of a transfer of the first turn, issued in front of the loop."""
        moved = [*_each_move(self.moves(node))][shards]
        return on_own(issued([stmt for move in moved for stmt in move]))

    def is_moved(self, node: Node) -> bool:
        communicates = isinstance(node.stmt, ir.Communicate)
        return communicates and self.spec.participation(node).ratio != 1

    def turn(self, moved: Group, work: Group) -> Iterator[ir.Stmt]:
        """Transfers issued at one time, contractions beside them, and their readers."""
        early = [node for node in moved if id(node) in self.stmts]
        later = [node for node in moved if id(node) not in self.stmts]
        if later:
            beside = self.contractions.beside()
            yield from self.issued(later)
            yield from _statements(beside)
        # What was issued first is there first.
        for arrives, readers in as_they_arrive([*early, *later], work):
            every = [stmt for node in arrives for stmt in self.stmts[id(node)]]
            yield from waited_for([s for s in every if isinstance(s, ir.Wait)])
            yield from self.arrived(arrives)
            self.contractions.made(readers)
            yield from _statements(readers)

    def issued(self, nodes: Group) -> list[ir.Stmt]:
        """Transfers, issued together behind the work so far."""
        return issued([stmt for node in nodes for stmt in self.moves(node)])

    def moves(self, node: Node) -> list[ir.Stmt]:
        """What issues a transfer, from its allocations on."""
        if id(node) not in self.shards:
            shards = self.shards[id(node)] = WholeShards(self.spec.of([node]))
            self.stmts[id(node)] = shards.statements()
            self.filled |= shards.filled
        return [s for s in self.stmts[id(node)] if not isinstance(s, ir.Wait)]

    def arrived(self, nodes: Group) -> list[ir.Stmt]:
        """The sums of the terms that have come, if these are terms.

        Totals that nothing here reads are added up behind the loop, on no stream.  XLA
        may then fuse them into their readers, and reads the terms in place.
        """
        here: list[ir.Stmt] = []
        for node in nodes:
            totals = self.shards[id(node)].totals()
            if self.reads(node):
                self.contractions.made([node])
                here += totals
            else:
                self.last += totals
        return here

    def reads(self, node: Node) -> bool:
        """Whether anything here reads what a node makes."""
        made = {buffer.name for buffer in node.writes}
        return any(b.name in made for node in self.spec.nodes for b in node.reads)


def _each_move(stmts: Iterable[ir.Stmt]) -> Iterator[list[ir.Stmt]]:
    """Statements up to each communication; those before come with the first."""
    move: list[ir.Stmt] = []
    for stmt in stmts:
        move.append(stmt)
        if isinstance(stmt, ir.Communicate):
            yield move
            move = []
    if move:
        yield move


def _statements(nodes: Iterable[Node]) -> list[ir.Stmt]:
    return [stmt for node in nodes for stmt in node.stmts]
