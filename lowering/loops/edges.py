"""What a step keeps of its chunk, because windows of the chunks beside it read that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.border import stacked
from jhost.lowering.ir.graph import Group, Node
from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.remarks import Note
from jhost.lowering.loops.planned import stop_note
from jhost.lowering.loops.turns import Halos
from jhost.lowering.rules.halo import window_p
from jhost.lowering.streams.halos import ChunkHalo, halos_of, reads_others
from jhost.lowering.streams.participation import Participation
from jhost.lowering.units.make import type_of, unit_of


def halos_in(
    nodes: Group, participation: Callable[[Node], Participation | None]
) -> Halos:
    """The halos of the nodes that have any."""
    pairs = ((node, participation(node)) for node in nodes)
    return {
        id(node): found
        for node, part in pairs
        if part is not None and (found := halos_of(node.stmt, part.factor))
    }


def widest_edges(nodes: Group, halos: Halos) -> dict[tuple[str, bool], int]:
    """The most elements that windows read before a chunk of a value, and behind it."""
    widest: dict[tuple[str, bool], int] = {}
    for node in nodes:
        for operand, halo in halos.get(id(node), {}).items():
            for count, behind in halo.sides:
                key = node.reads[operand].name, behind
                widest[key] = max(widest.get(key, 0), count)
    return widest


def whole_windows(nodes: Group, halos: Halos) -> Iterator[Note]:
    """Notes on nodes that read in windows, where these make no loop."""
    found = (node for node in nodes if id(node) in halos)
    return (stop_note(node, reads_others(node.stmt)) for node in found)


class Edges:
    """The edges of all chunks of a loop, in the order of the steps.

    There is one buffer for the ends of a value's chunks, and one for the starts, as
    wide as the widest windows ask.
    """

    def __init__(
        self,
        chunks: int,
        widest: Mapping[tuple[str, bool], int],
        names: FreshNames,
        allocate: Callable[[ir.Buffer], None],
    ) -> None:
        self.chunks = chunks
        self.widest = widest
        self.names = names
        self.allocate = allocate
        self.buffers: dict[tuple[str, bool], ir.Buffer] = {}

    def keep(
        self, buffer: ir.Buffer, chunk: ir.Buffer, dim: int, number: Index
    ) -> Iterator[ir.Stmt]:
        """Keep what windows of the neighbours read of a chunk of `buffer`."""
        for behind in (False, True):
            size = self.widest.get((buffer.name, behind), 0)
            if size == 0:
                continue
            slot = self.slot(self.edge_buffer(buffer, dim, behind), number)
            start = 0 if behind else chunk.shape[dim] - size
            edge = self.like(chunk, "edge", dim, size)
            begin, length = Constant(start), Constant(size)
            yield ir.Select(out=edge, source=chunk, dim=dim, index=begin, size=length)
            yield slot
            yield ir.Set(out=slot.out, source=edge)

    def window(
        self,
        buffer: ir.Buffer,
        chunk: ir.Buffer,
        halo: ChunkHalo,
        number: Index,
        place: ir.Chunk,
    ) -> Iterator[ir.Stmt]:
        """Make what windows of a chunk of `buffer` read, in the last statement."""
        pieces, places = [chunk], [halo.before]
        size = halo.before + chunk.shape[halo.dim] + halo.after
        for count, behind in halo.sides:
            if count <= 0:
                continue
            edges = self.edge_buffer(buffer, halo.dim, behind)
            slot = self.slot(edges, self.beside(number, behind))
            yield slot
            pieces.append(slot.out)
            # Of a wider edge there are elements outside of the window.
            wide = edges.shape[halo.dim + 1]
            places.append(size - halo.after if behind else halo.before - wide)
        out = self.like(chunk, "window", halo.dim, size)
        unit = unit_of(
            out.name,
            _window,
            *map(type_of, pieces),
            dim=halo.dim,
            size=size,
            places=tuple((place,) for place in places),
            lengths=tuple((piece.shape[halo.dim],) for piece in pieces),
        )
        # On the chunk that its reader works on, so that both may be one unit.
        yield ir.Compute(unit=unit, ins=tuple(pieces), outs=(out,), chunk=place)

    def edge_buffer(self, buffer: ir.Buffer, dim: int, behind: bool) -> ir.Buffer:
        """The buffer of the ends of all chunks, or of the starts."""
        key = buffer.name, behind
        if key not in self.buffers:
            edge = self.like(buffer, "edges", dim, self.widest[key])
            self.buffers[key] = stacked(edge, self.chunks)
            self.allocate(self.buffers[key])
        return self.buffers[key]

    def slot(self, edges: ir.Buffer, number: Index) -> ir.Select:
        """An alias of the edge of one chunk."""
        edge = dataclasses.replace(
            edges,
            name=self.names.fresh(f"{edges.name}_i"),
            shape=edges.shape[1:],
            dims=edges.dims[1:],
        )
        return ir.Select(
            out=edge, source=edges, dim=0, index=number, size=Constant(1), drop=True
        )

    def beside(self, number: Index, behind: bool) -> Index:
        """The number of the chunk right before a chunk, or right behind it."""
        if behind:
            return (number + 1) % self.chunks
        first = number == Constant(0)
        return Constant(self.chunks - 1) if first else number - 1

    def like(self, chunk: ir.Buffer, called: str, dim: int, size: int) -> ir.Buffer:
        """A buffer like a chunk, or like a value, with so many elements along a dim."""
        name = self.names.fresh(f"{chunk.name}_{called}")
        shape = list(chunk.shape)
        shape[dim] = size
        return dataclasses.replace(chunk, name=name, shape=tuple(shape))


def _window(*pieces: jax.Array, **params: Any) -> jax.Array:
    return window_p.bind(*pieces, **params)[0]
