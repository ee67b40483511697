"""What a step keeps of its chunk, because windows of the chunk beside it read that.

At step k device r works on the chunk r + k, so the chunk before it is that of step
k - 1.  The device's own chunk is made before all others, and read in windows after all
others.  If windows read the chunk behind, the loop takes its steps from the last on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Group, Node
from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.remarks import Note
from jhost.lowering.loops.planned import stop_note
from jhost.lowering.rules.halo import window_p
from jhost.lowering.streams.halos import ChunkHalo, halos_of, reads_others
from jhost.lowering.streams.participation import Participation, rule_of
from jhost.lowering.units.make import type_of, unit_of

Halos: TypeAlias = Mapping[int, Mapping[int, ChunkHalo]]
"""By a node's identity, the halos of its operands."""


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


def have_edges_in_time(nodes: Group, halos: Halos, devices: int) -> bool:
    """Whether a loop of some nodes has the edges of neighbours when it reads them."""
    every = [halo for node in nodes for halo in halos.get(id(node), {}).values()]
    if not every:
        return True
    # Attention may have its sequence in another order.
    rules = filter(None, map(rule_of, nodes))
    # Of two devices each is the neighbour on both sides.
    both = any(h.before > 0 for h in every) and any(h.after > 0 for h in every)
    if any(rule.window for rule in rules) or (both and devices > 2):
        return False
    behind = {id(node) for node in behind_windows(nodes, halos)}
    made = {b.name for node in nodes if id(node) in behind for b in node.writes}
    return not any(
        node.reads[operand].name in made
        for node in nodes
        for operand in halos.get(id(node), ())
    )


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


def behind_windows(nodes: Group, halos: Halos) -> list[Node]:
    """The nodes that read in windows, and those that need what these make."""
    found: list[Node] = []
    made: set[str] = set()
    for node in nodes:
        if id(node) in halos or any(buffer.name in made for buffer in node.reads):
            found.append(node)
            made |= {buffer.name for buffer in node.writes}
    return found


class Edges:
    """The edges of all chunks of a loop, in the order of the steps.

    There is one buffer for the ends of a value's chunks, and one for the starts, as
    wide as the widest windows ask.
    """

    def __init__(
        self,
        devices: int,
        widest: Mapping[tuple[str, bool], int],
        names: FreshNames,
        allocate: Callable[[ir.Buffer], None],
    ) -> None:
        self.devices = devices
        self.widest = widest
        self.names = names
        self.allocate = allocate
        self.buffers: dict[tuple[str, bool], ir.Buffer] = {}
        self.kept: set[str] = set()
        self.windows: dict[tuple[str, ChunkHalo], ir.Buffer] = {}

    def next_chunk(self) -> None:
        """Forget what was kept of the chunk so far, and made for it."""
        self.kept, self.windows = set(), {}

    def keep(
        self, buffer: ir.Buffer, chunk: ir.Buffer, halo: ChunkHalo, step: Index
    ) -> Iterator[ir.Stmt]:
        """Keep what windows of the neighbours read of a chunk of `buffer`."""
        for edges, behind in self.edges(buffer, halo):
            if edges.name in self.kept:
                continue
            self.kept.add(edges.name)
            slot = self.slot(edges, step)
            size = edges.shape[halo.dim + 1]
            start = 0 if behind else chunk.shape[halo.dim] - size
            edge = self.like(chunk, "edge", halo, size)
            begin, length = Constant(start), Constant(size)
            yield ir.Select(
                out=edge, source=chunk, dim=halo.dim, index=begin, size=length
            )
            yield slot
            yield ir.Set(out=slot.out, source=edge)

    def window(
        self,
        buffer: ir.Buffer,
        chunk: ir.Buffer,
        halo: ChunkHalo,
        step: Index,
        place: ir.Chunk,
    ) -> Iterator[ir.Stmt]:
        """Make what windows of a chunk of `buffer` read, and note it in `windows`."""
        if (buffer.name, halo) in self.windows:
            return
        pieces, places = [chunk], [halo.before]
        size = halo.before + chunk.shape[halo.dim] + halo.after
        for edges, behind in self.edges(buffer, halo):
            slot = self.slot(edges, self.step_beside(step, behind))
            yield slot
            pieces.append(slot.out)
            # Of a wider edge there are elements outside of the window.
            wide = edges.shape[halo.dim + 1]
            places.append(size - halo.after if behind else halo.before - wide)
        out = self.like(chunk, "window", halo, size)
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
        self.windows[buffer.name, halo] = out

    def edges(
        self, buffer: ir.Buffer, halo: ChunkHalo
    ) -> Iterator[tuple[ir.Buffer, bool]]:
        """The edges that a halo needs, and whether they are of the chunk behind.

        Edges before a chunk are the last elements of the one before.
        """
        for count, behind in halo.sides:
            if count > 0:
                yield self.edge_buffer(buffer, halo.dim, behind), behind

    def edge_buffer(self, buffer: ir.Buffer, dim: int, behind: bool) -> ir.Buffer:
        key = buffer.name, behind
        if key not in self.buffers:
            shape = list(buffer.shape)
            shape[dim] = self.widest[key]
            self.buffers[key] = dataclasses.replace(
                buffer,
                name=self.names.fresh(f"{buffer.name}_edges"),
                shape=(self.devices, *shape),
                dims=(ir.Dim(), *buffer.dims),
            )
            self.allocate(self.buffers[key])
        return self.buffers[key]

    def slot(self, edges: ir.Buffer, step: Index) -> ir.Select:
        """An alias of the edge of one step's chunk."""
        edge = dataclasses.replace(
            edges,
            name=self.names.fresh(f"{edges.name}_i"),
            shape=edges.shape[1:],
            dims=edges.dims[1:],
        )
        one = Constant(1)
        return ir.Select(out=edge, source=edges, dim=0, index=step, size=one, drop=True)

    def step_beside(self, step: Index, behind: bool) -> Index:
        """The step whose chunk is right before that of a step, or right behind it."""
        if behind:
            return (step + 1) % self.devices
        return Constant(self.devices - 1) if step == Constant(0) else step - 1

    def like(
        self, chunk: ir.Buffer, called: str, halo: ChunkHalo, size: int
    ) -> ir.Buffer:
        """A buffer like a chunk, with so many elements."""
        name = self.names.fresh(f"{chunk.name}_{called}")
        shape = list(chunk.shape)
        shape[halo.dim] = size
        return dataclasses.replace(chunk, name=name, shape=tuple(shape))


def _window(*pieces: jax.Array, **params: Any) -> jax.Array:
    return window_p.bind(*pieces, **params)[0]
