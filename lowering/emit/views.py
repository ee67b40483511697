"""What one device holds while a program is evaluated: values by name, and indices."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from jhost.lowering.emit.buffers import View, new_view
from jhost.lowering.emit.groups import axis_index, rank_in
from jhost.lowering.emit.windows import window
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import read_whole
from jhost.lowering.ir.index import Index, LoopIndex, Rank, evaluate
from jhost.lowering.ir.machine import Machine
from jhost.lowering.ir.program import Program
from jhost.lowering.units.evaluate import ChunkAt, Site


class OwnRanks(dict[Index, Any]):
    """The device's rank along each axis that an index asks for, traced once."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __missing__(self, index: Index) -> Any:
        if not isinstance(index, Rank):
            raise KeyError(index)
        rank = self[index] = axis_index(index.axis, self.sizes)
        return rank


class Views(Machine):
    """The views of a program's buffers, by their names."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.mesh.shape)
        self.read_whole = read_whole(program)
        self.views: dict[str, View] = {}
        self.own_ranks = OwnRanks(self.ranks.sizes)

    def new(self, buffer: ir.Buffer, shape: tuple[int, ...]) -> View:
        whole = buffer.name in self.read_whole
        return new_view(buffer, shape, len(self.ranks.sizes), whole)

    def read(self, buffer: ir.Buffer) -> Any:
        return self.views[buffer.name].read()

    def write(self, buffer: ir.Buffer, value: Any) -> None:
        """Write `value`; a name without memory, or with a larger one, gets its own."""
        view = self.views.get(buffer.name)
        if view is None or view.shape != value.shape:
            view = self.views[buffer.name] = self.new(buffer, value.shape)
        view.write(value)

    def select(self, stmt: ir.Select) -> None:
        source, size = self.views[stmt.source.name], self.static(stmt.size)
        index = self.value(stmt.index)
        # The region is known for every rank, the start only for this one.
        region = source.region.select(stmt.dim, index, size, stmt.groups, stmt.drop)
        start = self.index(stmt.index)
        shown = window(source.shape, stmt.dim, start, size, stmt.groups, stmt.drop)
        self.views[stmt.out.name] = source.select(shown, region)

    def is_part(self, buffer: ir.Buffer) -> bool:
        """Whether a buffer is an alias."""
        return self.views[buffer.name].source is not None

    def memory(self, name: str) -> int | None:
        """The memory that a name stands for, if it exists."""
        return id(self.views[name].memory) if name in self.views else None

    # --- Indices -------------------------------------------------------------- #

    def index(self, index: Index) -> Any:
        """The value of `index`: an int where all ranks agree, else a traced scalar."""
        value = self.value(index)
        if isinstance(value, int):
            return value
        # Only where ranks differ: XLA reads and writes static slices in place.
        loops: dict[Index, Any] = {LoopIndex(n): i for n, i in self.loops.items()}
        return evaluate(index, ChainMap(loops, self.own_ranks))

    def site(self, chunk: ir.Chunk | None) -> Site:
        at = chunk and ChunkAt.of(
            chunk, self.index(chunk.start), self.static(chunk.size)
        )
        return Site(mesh=self.ranks.sizes, rank=rank_in(self.ranks.sizes), chunk=at)
