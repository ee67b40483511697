"""How chunks of a p2p pipeline move: from their owners, and to them.

At step k device r works on the chunk of device r + k (modulo D).

- All-gather: the chunk comes from its owner.
- Reduce-scatter: the partial result goes to its owner.  The owner adds the terms in the
  order of the steps: its own, then those of r - 1, r - 2, ...
- All-to-all: it moves another dim as well.  Where the streamed dim comes together, the
  owner sends only device r's part of the other dim.  Where the streamed dim is
  scattered, the owner writes what comes to the sender's place in the other dim.
  Nothing is added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Node
from jhost.lowering.ir.index import Constant, Index, linear_rank
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.loops.causal import hidden_steps
from jhost.lowering.loops.chunk import ChunkLoop, DimChunk, LoopSpec
from jhost.lowering.loops.collective import chunk_size
from jhost.lowering.schedule.permutes import combined, is_narrow, part_of, permute
from jhost.lowering.streams.participation import Access
from jhost.lowering.units.make import type_of, unit_of


class MovingLoop(ChunkLoop):
    """A loop over chunks of other devices, which move there or come from there.

    Each shard, of `extent` steps, is cut into `pieces`.  An iteration works on `piece`
    of the shard of the device `step` further on.  The `hidden` steps are left out.
    """

    def __init__(self, spec: LoopSpec) -> None:
        super().__init__(spec)
        self.axes, self.extent = spec.choice.axes, spec.extent
        self.devices = spec.choice.owners(spec.mesh)
        self.rank = linear_rank(self.axes, spec.mesh)
        self.steps = -(-self.extent // (spec.choice.chunks // self.devices))
        self.pieces = -(-self.extent // self.steps)
        self.hidden = hidden_steps(spec)
        self.step: Index = Constant(0)
        self.piece: Index = Constant(0)
        self.terms: dict[str, ir.Buffer] = {}

    # --- Chunks --------------------------------------------------------------- #

    def window(self, groups: int) -> DimChunk:
        start = self.piece * self.steps
        size = chunk_size(self.extent, self.steps, self.piece)
        extent, grain = self.extent, math.gcd(self.steps, self.extent)
        if groups > 1:
            # The dim is whole on the device, so the shard's place in it comes first.
            start = self.rank_after(self.axes, self.step) * self.extent + start
            extent *= self.devices
        return DimChunk(start, size, self.steps, extent, grain=grain)

    @property
    def own(self) -> bool:
        """Whether the chunk at hand is the device's own."""
        return self.step == Constant(0)

    def select(self, buffer: ir.Buffer, access: Access) -> ir.Buffer:
        if access.groups > 1 or self.pieces > 1:
            return super().select(buffer, access)
        # The chunk is a whole shard, which needs no alias.
        whole = self.filled.get(buffer.name, buffer)
        self.chunks[buffer.name, access] = whole
        return whole

    # --- Communication -------------------------------------------------------- #

    def communicate(self, node: Node, stmt: ir.Communicate, source: ir.Buffer) -> None:
        """Append a transfer from the owner of the chunk at hand, or to it.

        An all-to-all also cuts its other dim.  At step k device r - k works on r's
        chunk.  So r sends that device's part of the other dim to it, or writes what
        comes from it to that part.
        """
        part = self.spec.participation(node)
        if stmt.kind == "ReduceScatter" and part.ratio < 1:
            self.move(stmt, self.term(stmt, source), source, self.to_owner(stmt))
            return
        out = self.write(node.writes[0], part.writes[0])
        if part.ratio == 1:
            self.collective(stmt, out, source)
        elif part.ratio > 1:
            if stmt.kind == "AllToAll":
                source = self.part_of_other(stmt, source, stmt.dim, stmt.out)
            self.move(stmt, out, source, self.from_owner(stmt))
        else:
            out = self.part_of_other(stmt, out, stmt.source_dim, stmt.source)
            self.move(stmt, out, source, self.to_owner(stmt))

    def to_owner(self, stmt: ir.Communicate) -> Index:
        """How many ranks the owner of the current chunk is behind this device."""
        return self.step

    def from_owner(self, stmt: ir.Communicate) -> Index:
        """How many ranks the device that works on this one's shard is behind it."""
        return axes_size(stmt.axes, self.spec.mesh) - self.to_owner(stmt)

    def collective(
        self, stmt: ir.Communicate, out: ir.Buffer, source: ir.Buffer
    ) -> None:
        """A communication over other axes: all devices along them are at one step."""
        name = self.spec.names.fresh(stmt.name)
        self.body.append(dataclasses.replace(stmt, name=name, out=out, source=source))
        self.body.append(ir.Wait(communication=name))

    def move(
        self, stmt: ir.Communicate, out: ir.Buffer, source: ir.Buffer, shift: Index
    ) -> None:
        """Append a send to the device `shift` further on; an own chunk is copied."""
        if self.own:
            self.body.append(ir.Set(out=out, source=source))
            return
        move = permute(source, out, stmt.axes, shift, self.spec.names)
        self.body.extend((move, ir.Wait(communication=move.name)))

    def rank_after(self, axes: Sequence[str], shift: Index) -> Index:
        """The rank of the device `shift` further on; for an own chunk the device's."""
        rank = linear_rank(axes, self.spec.mesh)
        return rank if self.own else (rank + shift) % axes_size(axes, self.spec.mesh)

    def part_of_other(
        self, stmt: ir.Communicate, whole: ir.Buffer, dim: int | None, like: ir.Buffer
    ) -> ir.Buffer:
        """An alias for the part of `dim` of the device that works on this shard."""
        assert dim is not None
        size = like.shape[dim]
        # Device r - k works on r's chunk at step k, so the part is that device's.
        start = self.rank_after(stmt.axes, self.from_owner(stmt)) * size
        part = part_of(whole, dim, start, size, self.spec.names, like=like)
        self.body.append(part)
        return part.out

    # --- The reduce side ------------------------------------------------------ #

    def term(self, stmt: ir.Communicate, source: ir.Buffer) -> ir.Buffer:
        """The buffer for the term of a sum that comes at the current step."""
        terms = self.terms_of(stmt, source)
        order = self.step if self.own else self.hidden.order(self.step)
        term = self.slot(terms, order)
        return term if self.pieces == 1 else self.piece_of(term, stmt)

    def piece_of(
        self, shard: ir.Buffer, stmt: ir.Communicate, groups: int = 1
    ) -> ir.Buffer:
        """An alias of the current piece of a shard that `stmt` makes, or of a term."""
        assert stmt.dim is not None
        window = self.window(groups)
        scale = shard.shape[stmt.dim] // window.extent
        shape = list(shard.shape)
        shape[stmt.dim] = window.most * scale
        name = self.spec.names.fresh(f"{stmt.out.name}_piece")
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
        """A buffer for the terms that devices send, in the order of the steps."""
        if stmt.out.name not in self.terms:
            spread = tuple(ir.Dim(axes=dim.axes) for dim in source.dims)
            terms = dataclasses.replace(
                stmt.out,
                name=self.spec.names.fresh(f"{stmt.out.name}_terms"),
                shape=(self.count_of_terms(stmt), *stmt.out.shape),
                dims=(ir.Dim(), *spread),
                partial=source.partial,
            )
            self.allocate(terms)
            self.terms[stmt.out.name] = terms
        return self.terms[stmt.out.name]

    def count_of_terms(self, stmt: ir.Communicate) -> int:
        """How many devices send a term to the owner of a chunk."""
        # Steps that are left out send nothing.
        return axes_size(stmt.axes, self.spec.mesh) - self.hidden.count

    def slot(self, terms: ir.Buffer, step: Index) -> ir.Buffer:
        """An alias of the term of one step."""
        term = dataclasses.replace(
            terms,
            name=self.spec.names.fresh(f"{terms.name}_i"),
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
        # In the order of the steps and not of arrival, so that a second run gives the
        # same bits.
        self.body = []
        for node in self.spec.nodes:
            stmt = node.stmt
            if isinstance(stmt, ir.Communicate) and stmt.out.name in self.terms:
                self.total(stmt)
        return self.body

    def total(self, stmt: ir.Communicate) -> None:
        """Append the sum of the terms."""
        terms = self.terms[stmt.out.name]
        ins = tuple(self.slot(terms, Constant(k)) for k in range(terms.shape[0]))
        unit = self.unit_of_total(stmt)
        self.body.append(ir.Compute(unit=unit, ins=ins, outs=(stmt.out,)))

    def unit_of_total(self, stmt: ir.Communicate) -> ir.Unit:
        """The sum of all terms of a shard."""
        assert stmt.reducer is not None
        count = self.count_of_terms(stmt)
        return unit_of(
            self.spec.names.fresh("total"),
            combined,
            *[type_of(stmt.out)] * count,
            reducer=stmt.reducer,
            widen=is_narrow(stmt.out),
        )
