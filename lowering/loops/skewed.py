"""The p2p pipeline along two groups of mesh axes at once.

A dim may come together along one axis, and along another it comes together in the other
operand of a contraction, or its sum is scattered.  The chunk r + k of a device at r on
the first axis is then of no use: devices in one row would all send the same sum to one
of them.  So the chunk follows the sum of both ranks, as in Cannon's algorithm (1969, "A
cellular computer to implement the Kalman filter algorithm").

On a mesh of D x D, device (r, c) works at step t on chunk r + c + t (modulo D).  Its
owner in the same column is c + t rows further on, and its owner in the same row r + t
columns.  Both moves are permutations.  No chunk is the own one of every device, so
there is no step without moves, and D steps in all.

Where the axes differ in size there are as many chunks as their least common multiple.
A shard has several of them, so a step moves on by a part of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.index import Constant, Index, linear_rank
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.queues import MAIN
from jhost.lowering.loops.causal import HiddenSteps
from jhost.lowering.loops.chunk import DimChunk, LoopSpec
from jhost.lowering.loops.collective import INDEX, chunk_size, round_robin
from jhost.lowering.loops.p2p import P2PLoop


class SkewedLoop(P2PLoop):
    """A loop over all chunks; each has an owner along two groups of axes."""

    def __init__(self, spec: LoopSpec) -> None:
        super().__init__(spec)
        self.ways, self.hidden = spec.choice.ways, HiddenSteps()

    @property
    def ends_alone(self) -> bool:
        return False  # no chunk is its own

    def statements(self) -> list[ir.Stmt]:
        body = self.segment(self.group, INDEX // self.pieces, self.remote_piece, {})
        wait, work = round_robin(body, self.devices * self.pieces, self.streams)
        return [
            *self.before,
            ir.GetCurrentStream(stream=MAIN),
            wait,
            work,
            *self.totals(),
            *self.after,
        ]

    # --- Chunks --------------------------------------------------------------- #

    @property
    def own(self) -> bool:
        return False

    def window(self, groups: int) -> DimChunk:
        """The piece at hand: of the whole dim, or of a shard with so many chunks."""
        place, chunks = self.place(groups), groups
        start = place * self.extent + self.piece * self.steps
        size = chunk_size(self.extent, self.steps, self.piece)
        grain = math.gcd(self.steps, self.extent)
        return DimChunk(start, size, self.steps, self.extent * chunks, grain=grain)

    def place(self, chunks: int) -> Index:
        """Which of the `chunks` that the whole, or a shard, has is the one at hand."""
        if chunks == 1:
            return Constant(0)
        return self.further_on(self.axes_with(chunks)) % chunks

    def axes_with(self, chunks: int) -> Sequence[str]:
        """The axes over which a shard has so many chunks; none for the whole."""
        ways = (axes for axes in self.ways if self.chunks_in_shard(axes) == chunks)
        return next(ways, ())

    def chunks_in_shard(self, axes: Sequence[str]) -> int:
        return self.devices // axes_size(axes, self.spec.mesh)

    def further_on(self, axes: Sequence[str]) -> Index:
        """How many chunks the one at hand is behind the device's first along `axes`."""
        chunk = self.step
        for other in self.ways:
            if other != axes:
                rank = linear_rank(other, self.spec.mesh)
                chunk = rank * self.chunks_in_shard(other) + chunk
        return chunk

    # --- Communication -------------------------------------------------------- #

    def to_owner(self, stmt: ir.Communicate) -> Index:
        return self.further_on(stmt.axes) // self.chunks_in_shard(stmt.axes)

    def term(self, stmt: ir.Communicate, source: ir.Buffer) -> ir.Buffer:
        chunks = self.chunks_in_shard(stmt.axes)
        # A device's term of each chunk of a shard comes once in so many steps.
        term = self.slot(self.terms_of(stmt, source), self.step // chunks)
        if chunks * self.pieces == 1:
            return term
        return self.piece_of(term, stmt, chunks)
