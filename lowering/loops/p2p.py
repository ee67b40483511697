"""The p2p pipeline: a chunk belongs to one device, and moves from device to device.

Along the mesh axes that shard the streamed dim, device r works at step k on the chunk
of device r + k (modulo D).  Gather side: that chunk comes from its owner.  Reduce side:
the partial result goes to its owner, who adds what comes in the order of the steps: its
own, then those of r - 1, r - 2, ... (nvFuser's pull requests 4515 and 5618).  The
device's own chunk needs no wire.  It stands before the loop, where it hides the first
receive, or after it, where it hides the last send, or half and half.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Node
from jhost.lowering.ir.index import Constant, Index, linear_rank
from jhost.lowering.loops.chunk import MAIN, ChunkLoop, Cut, Work, is_narrow
from jhost.lowering.loops.collective import INDEX, chunk_size, in_turns, on_stream
from jhost.lowering.rules.dim_rule import COMBINE, Reducer, axes_size
from jhost.lowering.streams.parts import Access
from jhost.lowering.units.make import unit_of

OWN = ir.Stream(name="own")
"""The queue of the device's own chunk, which no transfer waits for."""


class P2PLoop(ChunkLoop):
    """A loop over the other devices' chunks, and this device's own around it.

    Each shard, of `extent` steps, is cut into `pieces`.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.group, self.extent = work.nodes, work.extent
        self.axes = axes = work.choice.axes
        growths = [work.part(node).growth for node in work.nodes]
        self.receives, self.sends = max(growths) > 1, min(growths) < 1
        # A stream waits for what it has sent, and would hold back the receive after.
        fewer = None if self.sends else work.choice.streams
        self.streams = min(work.streams, fewer or work.streams)
        self.devices = axes_size(axes, work.mesh)
        self.rank = linear_rank(axes, work.mesh)
        self.steps = -(-self.extent // (work.choice.chunks // self.devices))
        self.pieces = -(-self.extent // self.steps)
        self.step: Index = Constant(0)
        self.piece: Index = Constant(0)
        self.terms: dict[str, ir.Buffer] = {}

    def statements(self) -> list[ir.Stmt]:
        head, tail = self.split(self.pieces)
        own: dict[tuple[str, Access], ir.Buffer] = {}
        first = self.segment(head, Constant(0), self.own_piece, own)
        remote = self.segment(self.group, self.remote_step, self.remote_piece, {})
        last = self.segment(tail, Constant(0), self.own_piece, own)
        count = (self.devices - 1) * self.pieces
        wait, work = in_turns(remote, count, self.streams)
        return [
            *self.before,
            ir.GetCurrentStream(stream=MAIN),
            wait,
            # Only here: after the loop it would wait for the last transfers.
            *self.on_own_stream([ir.Synchronize(stream=MAIN), *self.each_piece(first)]),
            *(self.own_turn(min(count, self.streams)) if first else ()),
            work,
            *self.on_own_stream(self.each_piece(last)),
            ir.Synchronize(stream=OWN),
            *self.totals(),
            *self.after,
        ]

    def split(self, pieces: int) -> tuple[Sequence[Node], Sequence[Node]]:
        """The work on the device's own chunk before the loop over `pieces`, and after.

        With both sides, what follows from the last reduction on waits for the end.
        """
        if not self.sends or (self.receives and pieces > 1):
            return self.group, ()
        if not self.receives:
            return (), self.group
        reductions = [i for i, node in enumerate(self.group) if _reduces(node)]
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

    def own_turn(self, used: int) -> list[ir.Stmt]:
        """The device's own chunk as the iteration before the first, if streams are few.

        Launching a transfer keeps the host, and those of later iterations had better
        not all be launched before the first matmul.
        """
        if used == (self.devices - 1) * self.pieces:
            return []
        turn = ir.Stream(index=Constant(used - 1))
        return [*on_stream(turn, [ir.Synchronize(stream=OWN)])]

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
        """Whose chunk an iteration works on: that of the device so many further on."""
        return INDEX // self.pieces + 1

    @property
    def remote_piece(self) -> Index:
        return INDEX % self.pieces if self.pieces > 1 else Constant(0)

    def window(self, groups: int) -> Cut:
        start = self.piece * self.steps
        size = chunk_size(self.extent, self.steps, self.piece)
        if groups == 1:
            return Cut(start, size, self.steps, self.extent)
        owner = self.rank
        if self.step != Constant(0):
            owner = (self.rank + self.step) % self.devices
        start, extent = owner * self.extent + start, self.extent * self.devices
        return Cut(start, size, self.steps, extent)

    def read(self, buffer: ir.Buffer, access: Access | None) -> ir.Buffer:
        if access is not None and access.groups == 1 and self.pieces == 1:
            return buffer  # a whole shard is the chunk
        return super().read(buffer, access)

    # --- Communication -------------------------------------------------------- #

    def communicate(self, node: Node, stmt: ir.Communicate, source: ir.Buffer) -> None:
        """A gather receives from the owner, a reduce-scatter sends to the owner."""
        part = self.work.part(node)
        if part.growth == 1:
            out = self.write(node.writes[0], part.writes[0])
            self.collective(stmt, out, source)
        elif part.growth > 1:
            out = self.write(node.writes[0], part.writes[0])
            self.move(out, source, self.devices - self.step)
        else:
            self.move(self.term(stmt, source), source, self.step)

    def collective(
        self, stmt: ir.Communicate, out: ir.Buffer, source: ir.Buffer
    ) -> None:
        """A communication over other axes: all devices along them are at one step."""
        name = self.work.names.fresh(stmt.name)
        self.body.append(dataclasses.replace(stmt, name=name, out=out, source=source))
        self.body.append(ir.Wait(communication=name))

    def move(self, out: ir.Buffer, source: ir.Buffer, shift: Index) -> None:
        """Every device sends to the one `shift` further on; its own chunk stays."""
        if self.step == Constant(0):
            self.body.append(ir.Set(out=out, source=source))
            return
        name = self.work.names.fresh("c")
        permute = ir.Communicate(
            name=name,
            kind="CollectivePermute",
            out=out,
            source=source,
            axes=self.axes,
            shift=shift,
        )
        self.body.extend((permute, ir.Wait(communication=name)))

    # --- The reduce side ------------------------------------------------------ #

    def term(self, stmt: ir.Communicate, source: ir.Buffer) -> ir.Buffer:
        """Where the part of a sum that comes at this step goes."""
        terms = self.terms_of(stmt, source)
        term = self.slot(terms, self.step)
        return term if self.pieces == 1 else self.piece_of(term, stmt)

    def piece_of(self, shard: ir.Buffer, stmt: ir.Communicate) -> ir.Buffer:
        """An alias of the piece at hand of what `stmt` makes, or of a term of it."""
        assert stmt.dim is not None
        window = self.window(1)
        scale = shard.shape[stmt.dim] // self.extent
        shape = list(shard.shape)
        shape[stmt.dim] = window.most * scale
        name = self.work.names.fresh(f"{stmt.out.name}_piece")
        piece = dataclasses.replace(shard, name=name, shape=tuple(shape))
        select = ir.Select(
            out=piece,
            source=shard,
            dim=stmt.dim,
            index=window.start * scale,
            size=window.size * scale,
        )
        self.body.append(select)
        return piece

    def terms_of(self, stmt: ir.Communicate, source: ir.Buffer) -> ir.Buffer:
        """A buffer for what all devices send, in the order of the steps."""
        if stmt.out.name not in self.terms:
            spread = tuple(ir.Dim(axes=dim.axes) for dim in source.dims)
            terms = dataclasses.replace(
                stmt.out,
                name=self.work.names.fresh(f"{stmt.out.name}_terms"),
                shape=(self.devices, *stmt.out.shape),
                dims=(ir.Dim(), *spread),
                partial=source.partial,
            )
            self.allocate(terms)
            self.terms[stmt.out.name] = terms
        return self.terms[stmt.out.name]

    def slot(self, terms: ir.Buffer, step: Index) -> ir.Buffer:
        """An alias of the term of one step."""
        term = dataclasses.replace(
            terms,
            name=self.work.names.fresh(f"{terms.name}_i"),
            shape=terms.shape[1:],
            dims=terms.dims[1:],
        )
        one = Constant(1)
        self.body.append(
            ir.Select(out=term, source=terms, dim=0, index=step, size=one, drop=True)
        )
        return term

    def totals(self) -> list[ir.Stmt]:
        """The terms added up, in the order of the steps."""
        self.body = []
        for node in self.group:
            stmt = node.stmt
            if isinstance(stmt, ir.Communicate) and stmt.out.name in self.terms:
                self.total(stmt)
        return self.body

    def total(self, stmt: ir.Communicate) -> None:
        """Append the sum of the terms."""
        terms = self.terms[stmt.out.name]
        ins = tuple(self.slot(terms, Constant(k)) for k in range(self.devices))
        unit = self.unit_of_total(stmt)
        self.body.append(ir.Compute(unit=unit, ins=ins, outs=(stmt.out,)))

    def unit_of_total(self, stmt: ir.Communicate) -> ir.Unit:
        """The sum of all devices' terms of a shard."""
        assert stmt.reducer is not None
        return unit_of(
            self.work.names.fresh("total"),
            functools.partial(_total, stmt.reducer, is_narrow(stmt.out)),
            *[jax.ShapeDtypeStruct(stmt.out.shape, stmt.out.dtype)] * self.devices,
        )


def _total(reducer: Reducer, widen: bool, *terms: jax.Array) -> jax.Array:
    """The terms combined from the left, sums of narrow floats in float32."""
    dtype = terms[0].dtype
    if widen and reducer == "sum":
        terms = tuple(lax.convert_element_type(term, jnp.float32) for term in terms)
    return lax.convert_element_type(functools.reduce(COMBINE[reducer], terms), dtype)


def _reduces(node: Node) -> bool:
    if not isinstance(node.stmt, ir.Compute):
        return False
    return any(eqn.rule.reduces for eqn in node.stmt.unit.eqns)
