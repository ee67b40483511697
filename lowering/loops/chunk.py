"""Writes the statements of one stream as a loop over chunks.

The pipeline says what a chunk is: see `collective.py` and `p2p.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence, Set

from jax import lax

from jhost._dtypes import summed_in
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Group, Node, read_by
from jhost.lowering.ir.index import Index
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.loops.pipelining import Pipelining
from jhost.lowering.schedule.permutes import is_narrow
from jhost.lowering.streams.participation import Access, Participation
from jhost.lowering.units.make import type_of, unit_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """What one loop does.

    Attributes:
        nodes: the nodes of the loop, all of one stream.
        participations: how each node takes part, by the identity of the node.
        leaving: the values that something outside of the loop reads.
        stream: the name of the stream.
        extent: the steps on a device that can be cut into chunks.
        choice: the pipeline.
        mesh: the size of each mesh axis.
        streams: the most queues that iterations take turns on.
        names: the names that the program has taken.
    """

    nodes: Group
    participations: Mapping[int, Participation]
    leaving: Set[str]
    stream: str
    extent: int
    choice: Pipelining
    mesh: Mapping[str, int]
    streams: int
    names: FreshNames

    def participation(self, node: Node) -> Participation:
        return self.participations[id(node)]

    def leaves(self, buffer: ir.Buffer) -> bool:
        """Whether anything outside of the loop reads `buffer`."""
        return buffer.name in self.leaving

    def of(self, nodes: Group) -> LoopSpec:
        """The spec of some of the nodes; what the other nodes read leaves the loop."""
        own = set(map(id, nodes))
        read = read_by(node for node in self.nodes if id(node) not in own)
        return dataclasses.replace(self, nodes=nodes, leaving=self.leaving | read)


@dataclasses.dataclass(frozen=True, slots=True)
class DimChunk:
    """The steps `[start : start + size]` of a dim that a chunk covers.

    The dim has `groups` stretches of `extent` steps each.  `most` is the size of the
    largest chunk.  All chunks begin and end at multiples of `grain`.
    """

    start: Index
    size: Index
    most: int
    extent: int
    groups: int = 1
    grain: int = 1


class ChunkLoop(abc.ABC):
    """Writes the `body` of an iteration, and the statements `before` and `after` it.

    `filled` has the buffers that the loop writes chunk by chunk.
    """

    def __init__(self, spec: LoopSpec) -> None:
        self.spec = spec
        self.stream = spec.stream
        self.filled: dict[str, ir.Buffer] = {}
        self.before: list[ir.Stmt] = []
        self.body: list[ir.Stmt] = []
        self.after: list[ir.Stmt] = []
        self.chunks: dict[tuple[str, Access], ir.Buffer] = {}
        self.accumulators: dict[str, ir.Buffer] = {}

    @abc.abstractmethod
    def statements(self) -> list[ir.Stmt]:
        """The whole loop, from its allocations to what follows it."""

    @abc.abstractmethod
    def window(self, groups: int) -> DimChunk:
        """The chunk of a dim of that many groups, in this iteration."""

    @abc.abstractmethod
    def communicate(self, node: Node, stmt: ir.Communicate, source: ir.Buffer) -> None:
        """Append a communication of a chunk."""

    # --- Statements ----------------------------------------------------------- #

    def node(self, node: Node) -> None:
        """Append `node`, working on a chunk."""
        part = self.spec.participation(node)
        ins = [self.operand(node, i, part) for i in range(len(node.reads))]
        match node.stmt:
            case ir.Compute() as stmt:
                self.compute(node, stmt, ins)
            case ir.Set():
                out = self.write(node.writes[0], part.writes[0])
                self.body.append(ir.Set(out=out, source=ins[0]))
            case ir.Communicate() as stmt:
                self.communicate(node, stmt, ins[0])
            case ir.Select() as stmt:
                self.part_by_rank(stmt, ins[0], part.writes[0])
            case _:
                raise AssertionError(f"{node.stmt} has no part in a stream")

    def compute(self, node: Node, stmt: ir.Compute, ins: Sequence[ir.Buffer]) -> None:
        """A computation on a chunk; into accumulators where results lack its factor."""
        part = self.spec.participation(node)
        (unit_eqn,) = stmt.unit.eqns
        assert part.factor is not None
        reducer = unit_eqn.rule.reducers[part.factor]
        outs = [
            self.write(buffer, part.writes[i])
            if i in part.writes
            else self.accumulator(buffer, reducer in ("sum", "softmax"))
            for i, buffer in enumerate(node.writes)
        ]
        # The equation gets the accumulator's dtype.  A matmul of bfloat16 then returns
        # float32 itself, and nothing is rounded between the chunks.
        dtypes = [None if i in part.writes else b.dtype for i, b in enumerate(outs)]
        unit_eqn = dataclasses.replace(
            unit_eqn,
            stream=part.factor,
            accumulators=tuple(dtypes) if any(dtypes) else (),
        )
        self.body.append(
            ir.Compute(
                unit=dataclasses.replace(stmt.unit, eqns=(unit_eqn,)),
                ins=tuple(ins),
                outs=tuple(outs),
                chunk=self.chunk_of(part),
                reducer=reducer if any(dtypes) else None,
            )
        )

    def chunk_of(self, part: Participation) -> ir.Chunk:
        """The chunk that a computation works on in this iteration."""
        window = self.window(int(part.groups))
        return ir.Chunk(
            start=window.start,
            size=window.size,
            extent=window.extent,
            groups=window.groups,
            grain=window.grain,
        )

    def part_by_rank(self, stmt: ir.Select, source: ir.Buffer, access: Access) -> None:
        """Append an alias of a chunk, and a copy of it if it leaves the loop."""
        alias = self.chunk(stmt.out, access)
        self.body.append(dataclasses.replace(stmt, out=alias, source=source))
        if self.spec.leaves(stmt.out):
            out = self.write(stmt.out, access)
            self.body.append(ir.Set(out=out, source=alias))

    # --- Buffers -------------------------------------------------------------- #

    def operand(self, node: Node, number: int, part: Participation) -> ir.Buffer:
        """What a node reads of one of its operands in an iteration."""
        return self.read(node.reads[number], part.reads.get(number))

    def read(self, buffer: ir.Buffer, access: Access | None) -> ir.Buffer:
        """The operand in an iteration: whole, a chunk made here, or an alias."""
        if access is None:
            return buffer
        if (buffer.name, access) not in self.chunks:
            self.select(buffer, access)
        return self.chunks[buffer.name, access]

    def write(self, buffer: ir.Buffer, access: Access) -> ir.Buffer:
        """The buffer of a result: an alias of its whole, or a chunk that stays here."""
        if not self.spec.leaves(buffer):
            return self.chunk(buffer, access)
        whole = with_stream(buffer, access.dim, self.stream)
        self.filled[whole.name] = whole
        self.allocate(whole)
        return self.select(buffer, access)

    def allocate(self, buffer: ir.Buffer) -> None:
        """Make `buffer` exist before the loop, once."""
        if ir.Allocate(buffer=buffer) not in self.before:
            self.before.append(ir.Allocate(buffer=buffer))

    def chunk(self, buffer: ir.Buffer, access: Access) -> ir.Buffer:
        """A buffer for this iteration's chunk of `buffer`."""
        window = self.window(int(access.groups))
        shape = list(buffer.shape)
        shape[access.dim] = window.groups * window.most * _scale(buffer, access, window)
        chunk = dataclasses.replace(
            with_stream(buffer, access.dim, self.stream),
            name=self.spec.names.fresh(f"{buffer.name}_i"),
            shape=tuple(shape),
        )
        self.chunks[buffer.name, access] = chunk
        return chunk

    def select(self, buffer: ir.Buffer, access: Access) -> ir.Buffer:
        """An alias for this iteration's chunk of `buffer`, which is outside."""
        out = self.chunk(buffer, access)
        window = self.window(int(access.groups))
        scale = _scale(buffer, access, window)
        select = ir.Select(
            out=out,
            source=buffer,
            dim=access.dim,
            index=window.start * scale,
            size=window.size * scale,
            groups=window.groups,
        )
        self.body.append(select)
        return out

    def accumulator(self, buffer: ir.Buffer, is_sum: bool) -> ir.Buffer:
        """The buffer that reduces the chunks of a result, wide enough for a sum."""
        # A maximum loses nothing in a narrow dtype.
        if not is_sum or not is_narrow(buffer):
            self.allocate(buffer)
            return buffer
        if buffer.name in self.accumulators:
            return self.accumulators[buffer.name]
        name = self.spec.names.fresh(f"{buffer.name}_sum")
        wide = dataclasses.replace(buffer, name=name, dtype=summed_in(buffer.dtype))
        self.allocate(wide)
        unit = unit_of(
            self.spec.names.fresh("narrow"),
            lax.convert_element_type,
            type_of(wide),
            new_dtype=buffer.dtype,
        )
        # Rounded once, behind the loop.
        self.after.append(ir.Compute(unit=unit, ins=(wide,), outs=(buffer,)))
        self.accumulators[buffer.name] = wide
        return wide


def with_stream(buffer: ir.Buffer, dim: int, stream: str) -> ir.Buffer:
    """`buffer`, shown as cut into chunks along `dim`."""
    dims = list(buffer.dims)
    dims[dim] = ir.Dim(axes=dims[dim].axes, stream=stream)
    return dataclasses.replace(buffer, dims=tuple(dims))


def _scale(buffer: ir.Buffer, access: Access, window: DimChunk) -> int:
    """The elements of the dim that one step stands for."""
    return buffer.shape[access.dim] // (window.groups * window.extent)
