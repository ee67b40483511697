"""The collective pipeline: chunk s is the s-th slice of every device's shard.

The shape is nvFuser's (its pull requests 4217 and 4402).  Allocations come first.  A
loop then makes every stream wait for the current one.  The next loop works, one
iteration on each stream, and the current stream waits for each of them.
"""

from __future__ import annotations

import dataclasses
import math

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Node
from jhost.lowering.ir.index import Constant, Index, LoopIndex, minimum
from jhost.lowering.ir.queues import MAIN, on_stream
from jhost.lowering.loops.chunk import ChunkLoop, DimChunk, LoopSpec

INDEX = LoopIndex("i")


class CollectiveLoop(ChunkLoop):
    """A loop with an iteration for each chunk; the last chunk may be smaller."""

    def __init__(self, spec: LoopSpec) -> None:
        super().__init__(spec)
        self.extent = spec.extent
        self.steps = -(-self.extent // spec.choice.chunks)
        # As in `torch.chunk`: equal chunks but for a smaller last one, and maybe fewer
        # chunks than asked for.  Loops are unrolled, so a smaller chunk costs nothing.
        self.count = -(-self.extent // self.steps)

    def statements(self) -> list[ir.Stmt]:
        for node in self.spec.nodes:
            self.node(node)
        wait, work = round_robin(self.body, self.count, self.spec.streams)
        return [*self.before, ir.GetCurrentStream(stream=MAIN), wait, work, *self.after]

    def window(self, groups: int) -> DimChunk:
        start = INDEX * self.steps
        size = chunk_size(self.extent, self.steps, INDEX)
        # Every chunk begins and ends at a multiple of the grain, the last one too.
        grain = math.gcd(self.steps, self.extent)
        return DimChunk(start, size, self.steps, self.extent, groups, grain)

    def communicate(self, node: Node, stmt: ir.Communicate, source: ir.Buffer) -> None:
        """Append the same collective, on a chunk."""
        out = self.write(node.writes[0], self.spec.participation(node).writes[0])
        chunked = dataclasses.replace(stmt, out=out, source=source)
        self.body.extend((chunked, *node.stmts[1:]))


def chunk_size(extent: int, steps: int, number: Index) -> Index:
    """The steps of chunk `number`; the last chunk has the rest of `extent`."""
    if extent % steps == 0:
        return Constant(steps)
    return minimum(steps, extent - number * steps)


def round_robin(body: list[ir.Stmt], count: int, streams: int) -> tuple[ir.For, ir.For]:
    """A loop in which streams wait for MAIN, and a loop of `body` in turns on them."""
    # The wait for MAIN is a loop of its own.  In the loop that works, each iteration
    # would wait for what MAIN has by then, and nothing would overlap.
    used = min(count, streams)
    stream = ir.Stream(index=INDEX % used if used < count else INDEX)
    wait = on_stream(stream, [ir.Synchronize(stream=MAIN)])
    work = (*on_stream(stream, body), ir.Synchronize(stream=stream))
    return (
        ir.For(index=INDEX.name, extent=used, body=wait),
        ir.For(index=INDEX.name, extent=count, body=work),
    )
