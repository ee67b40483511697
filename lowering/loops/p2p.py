"""The p2p pipeline: a chunk belongs to one device, and moves from device to device.

D devices share the streamed dim.  At step k device r works on the chunk of device r + k
(modulo D): the chunk comes from its owner, or the result goes there (see `moves.py`).
The device's own chunk needs no transfer.  Its work hides the first receive if it stands
before the loop, and the last send if it stands after the loop.  A loop that receives
and sends has half of it on each side (nvFuser's pull requests 4515 and 5618).
"""

from __future__ import annotations

from collections.abc import Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Node
from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.ir.queues import MAIN, OWN, on_stream
from jhost.lowering.loops.chunk import LoopSpec
from jhost.lowering.loops.collective import INDEX, round_robin
from jhost.lowering.loops.moves import MovingLoop
from jhost.lowering.streams.participation import Access


class P2PLoop(MovingLoop):
    """A loop over the other devices' chunks, and this device's own around it."""

    def __init__(self, spec: LoopSpec) -> None:
        super().__init__(spec)
        self.group = spec.nodes
        growths = [spec.participation(node).ratio for node in spec.nodes]
        self.receives, self.sends = max(growths) > 1, min(growths) < 1
        # A stream waits for what it has sent, so with fewer streams a send would hold
        # back the next receive.
        fewer = None if self.sends else spec.choice.spec.streams
        self.streams = min(spec.streams, fewer or spec.streams)
        self.beside: list[ir.Stmt] = []
        """Cheap work that needs nothing of the loop, before the last own chunk."""

    @property
    def ends_alone(self) -> bool:
        """Whether only the device's own chunk stands beside the last sends."""
        return self.sends and bool(self.split(self.pieces)[1])

    def statements(self) -> list[ir.Stmt]:
        head, tail = self.split(self.pieces)
        own: dict[tuple[str, Access], ir.Buffer] = {}
        first = self.segment(head, Constant(0), self.own_piece, own)
        remote = self.segment(self.group, self.remote_step, self.remote_piece, {})
        last = self.segment(tail, Constant(0), self.own_piece, own)
        wait, work = round_robin(remote, self.count, self.streams)
        return [
            *self.before,
            ir.GetCurrentStream(stream=MAIN),
            wait,
            # OWN waits for MAIN here and not after the loop, where it would wait for
            # the last transfers too.
            *self.on_own_stream([ir.Synchronize(stream=MAIN), *self.each_piece(first)]),
            *(self.wait_for_own_chunk(min(self.count, self.streams)) if first else ()),
            work,
            *self.on_own_stream([*self.beside, *self.each_piece(last)]),
            ir.Synchronize(stream=OWN),
            *self.totals(),
            *self.after,
        ]

    def split(self, pieces: int) -> tuple[Sequence[Node], Sequence[Node]]:
        """The work on the device's own chunk before the loop over `pieces`, and after.

        In a loop that receives and sends, the last reduction is the first node after.
        """
        if not self.sends or (self.receives and pieces > 1):
            return self.group, ()
        if not self.receives:
            return (), self.group
        reductions = [i for i, node in enumerate(self.group) if _reduces(node)]
        # The first half hides the first receive, the second the last send.
        last = max(reductions, default=0)
        return self.group[:last], self.group[last:]

    def segment(
        self,
        nodes: Sequence[Node],
        step: Index,
        piece: Index,
        chunks: dict[tuple[str, Access], ir.Buffer],
    ) -> list[ir.Stmt]:
        """The statements of `nodes` on one chunk; `chunks` are those at hand."""
        self.step, self.piece, self.chunks, self.body = step, piece, chunks, []
        for node in nodes:
            self.node(node)
        return self.body

    def on_own_stream(self, body: list[ir.Stmt]) -> list[ir.Stmt]:
        if not body:
            return []
        return [*on_stream(OWN, body)]

    def wait_for_own_chunk(self, used: int) -> list[ir.Stmt]:
        """With few streams, a wait for the device's own chunk, as for an iteration."""
        if used == self.count:
            return []
        # Launching a transfer keeps the host busy.  Without this wait, the transfers of
        # later iterations would all be launched before the first matmul.
        stream = ir.Stream(index=Constant(used - 1))
        return [*on_stream(stream, [ir.Synchronize(stream=OWN)])]

    def each_piece(self, body: list[ir.Stmt]) -> list[ir.Stmt]:
        if self.pieces == 1 or not body:
            return body
        return [ir.For(index=INDEX.name, extent=self.pieces, body=tuple(body))]

    # --- Chunks --------------------------------------------------------------- #

    @property
    def own_piece(self) -> Index:
        return INDEX if self.pieces > 1 else Constant(0)

    @property
    def remote_step(self) -> Index:
        """The step of an iteration: it works on the chunk of the device so far on."""
        return self.hidden.step(INDEX // self.pieces)

    @property
    def count(self) -> int:
        """The iterations for the chunks of other devices."""
        return (self.devices - 1 - self.hidden.count) * self.pieces

    @property
    def remote_piece(self) -> Index:
        return INDEX % self.pieces if self.pieces > 1 else Constant(0)


def _reduces(node: Node) -> bool:
    if not isinstance(node.stmt, ir.Compute):
        return False
    return any(eqn.rule.reduces for eqn in node.stmt.unit.eqns)
