"""Write the statements of one stream as a loop over chunks.

The shape is nvFuser's (its pull requests 4217 and 4402): allocations, then a loop that
makes every stream wait for the current one, then the loop that works, an iteration a
stream, each of which the current stream waits for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jhost.lowering.graph import Group, Node
from jhost.lowering.index import Constant, Index, LoopIndex, minimum
from jhost.lowering.ir import (
    Allocate,
    Buffer,
    Chunk,
    Communicate,
    Compute,
    Dim,
    For,
    GetCurrentStream,
    Program,
    Remark,
    Select,
    Set,
    SetCurrentStream,
    Stmt,
    Stream,
    Synchronize,
)
from jhost.lowering.names import Names
from jhost.lowering.rewrite import replace_buffers
from jhost.lowering.stream_parts import Access, Part
from jhost.lowering.stream_plan import StreamPlan
from jhost.lowering.unit import unit_of

_INDEX = LoopIndex("i")
_MAIN = Stream(name="main")


class LoopBuilder:
    """Lowers groups of nodes: those of a stream to loops, the others to themselves."""

    def __init__(
        self,
        program: Program,
        graph: Sequence[Node],
        plan: StreamPlan,
        counts: Mapping[str, int],
        streams: int,
    ) -> None:
        self.program = program
        self.parts = {
            id(graph[number]): part
            for number, part in plan.parts.items()
            if counts[part.stream] > 1
        }
        self.extents = plan.extents
        self.counts = counts
        self.streams = streams
        self.names = Names.of(program)
        self.last_reader = _readers(program, graph)
        self.streamed: dict[str, Buffer] = {}

    def should_share_loop(self, one: Group, other: Group) -> bool:
        """Whether two groups are of one stream and hand values on chunk by chunk."""
        parts = [self.parts.get(id(node)) for node in (*one, *other)]
        if any(part is None or part.stream != _stream(parts[0]) for part in parts):
            return False
        return all(self.aligned(maker, user) for maker in one for user in other)

    def aligned(self, maker: Node, user: Node) -> bool:
        """Whether `user` reads what `maker` writes in the very chunks it is made in."""
        writes, reads = self.parts[id(maker)].writes, self.parts[id(user)].reads
        return all(
            writes.get(position) == reads.get(index) and position in writes
            for position, made in enumerate(maker.writes)
            for index, read in enumerate(user.reads)
            if made.name == read.name
        )

    def lower(self, group: Group) -> list[Stmt]:
        """The statements of `group`, as a loop if it is of a stream."""
        part = self.parts.get(id(group[0]))
        if part is None:
            return [stmt for node in group for stmt in node.stmts]
        return _Loop(self, group, part.stream).statements()

    def finish(self, body: tuple[Stmt, ...], remarks: tuple[Remark, ...]) -> Program:
        """The program around `body`, streamed buffers shown as such everywhere."""
        replaced = tuple(replace_buffers(stmt, self.streamed) for stmt in body)
        results = tuple(self.streamed.get(b.name, b) for b in self.program.results)
        return dataclasses.replace(
            self.program,
            body=replaced,
            results=results,
            remarks=(*self.program.remarks, *remarks),
        )


def _stream(part: Part | None) -> str | None:
    return part.stream if part else None


def _readers(program: Program, graph: Sequence[Node]) -> dict[str, list[int]]:
    """The nodes that read each buffer, by identity; 0 stands for the caller."""
    readers: dict[str, list[int]] = {result.name: [0] for result in program.results}
    for node in graph:
        for buffer in node.reads:
            readers.setdefault(buffer.name, []).append(id(node))
    return readers


class _Loop:
    """One loop while it is written."""

    def __init__(self, builder: LoopBuilder, group: Group, stream: str) -> None:
        self.builder = builder
        self.group = group
        self.stream = stream
        self.extent = builder.extents[stream]
        self.steps = -(-self.extent // builder.counts[stream])
        self.count = -(-self.extent // self.steps)
        self.before: list[Stmt] = []
        self.body: list[Stmt] = []
        self.after: list[Stmt] = []
        self.aliases: dict[tuple[str, Access], Buffer] = {}

    def statements(self) -> list[Stmt]:
        """The whole loop, from its allocations to what follows it."""
        for node in self.group:
            self.node(node)
        turns = min(self.count, self.builder.streams)
        stream = Stream(index=_INDEX % turns if turns < self.count else _INDEX)
        enter, leave = SetCurrentStream(stream=stream), SetCurrentStream(stream=_MAIN)
        wait = (enter, Synchronize(stream=_MAIN), leave)
        work = (enter, *self.body, leave, Synchronize(stream=stream))
        return [
            *self.before,
            GetCurrentStream(stream=_MAIN),
            For(index=_INDEX.name, extent=turns, body=wait),
            For(index=_INDEX.name, extent=self.count, body=work),
            *self.after,
        ]

    def node(self, node: Node) -> None:
        """Append `node` working on a chunk."""
        part = self.builder.parts[id(node)]
        ins = [self.read(b, part.reads.get(i)) for i, b in enumerate(node.reads)]
        match node.stmt:
            case Compute() as stmt:
                self.compute(stmt, part, ins, node)
            case Set() as stmt:
                out = self.write(node.writes[0], part.writes[0])
                self.body.append(Set(out=out, source=ins[0]))
            case Communicate() as stmt:
                out = self.write(node.writes[0], part.writes[0])
                chunked = dataclasses.replace(stmt, out=out, source=ins[0])
                self.body.extend((chunked, *node.stmts[1:]))
            case Select() as stmt:
                self.part_by_rank(stmt, ins[0], part.writes[0])
            case _:
                raise AssertionError(f"{node.stmt} has no part in a stream")

    def part_by_rank(self, stmt: Select, source: Buffer, access: Access) -> None:
        """An alias of a chunk; what leaves the loop is copied out of it."""
        alias = self.alias(stmt.out, access)
        self.body.append(dataclasses.replace(stmt, out=alias, source=source))
        if self.leaves(stmt.out):
            out = self.write(stmt.out, access)
            self.body.append(Set(out=out, source=alias))

    def compute(
        self, stmt: Compute, part: Part, ins: Sequence[Buffer], node: Node
    ) -> None:
        (unit_eqn,) = stmt.unit.eqns
        assert part.factor is not None
        unit_eqn = dataclasses.replace(unit_eqn, stream=part.factor)
        chunk = self.chunk(int(part.groups))
        if part.writes:
            outs = [self.write(b, part.writes[i]) for i, b in enumerate(node.writes)]
            unit = dataclasses.replace(stmt.unit, eqns=(unit_eqn,))
            self.body.append(
                Compute(unit=unit, ins=tuple(ins), outs=tuple(outs), chunk=chunk)
            )
            return
        # The streamed factor is reduced: chunks add up in an accumulator.
        reducer = unit_eqn.rule.reducers[part.factor]
        assert reducer is not None
        outs = [self.accumulator(buffer, reducer == "sum") for buffer in node.writes]
        unit_eqn = dataclasses.replace(unit_eqn, accumulator=outs[0].dtype)
        unit = dataclasses.replace(stmt.unit, eqns=(unit_eqn,))
        self.body.append(
            Compute(
                unit=unit,
                ins=tuple(ins),
                outs=tuple(outs),
                chunk=chunk,
                reducer=reducer,
            )
        )

    # --- Buffers -------------------------------------------------------------- #

    def read(self, buffer: Buffer, access: Access | None) -> Buffer:
        """What an operand is in an iteration: whole, a chunk made here, or an alias."""
        if access is None:
            return buffer
        if (buffer.name, access) not in self.aliases:
            self.select(buffer, access)
        return self.aliases[buffer.name, access]

    def write(self, buffer: Buffer, access: Access) -> Buffer:
        """Where a result goes: an alias of its whole, or a chunk that stays here."""
        if self.leaves(buffer):
            whole = _with_stream(buffer, access.dim, self.stream)
            self.builder.streamed[buffer.name] = whole
            self.before.append(Allocate(buffer=whole))
            return self.select(buffer, access)
        return self.alias(buffer, access)

    def leaves(self, buffer: Buffer) -> bool:
        """Whether anything outside the loop reads `buffer`."""
        inside = {id(node) for node in self.group}
        readers = self.builder.last_reader.get(buffer.name, [])
        return any(reader not in inside for reader in readers)

    def alias(self, buffer: Buffer, access: Access) -> Buffer:
        """A buffer for this iteration's chunk of `buffer`."""
        groups = int(access.groups)
        scale = buffer.shape[access.dim] // (groups * self.extent)
        shape = list(buffer.shape)
        shape[access.dim] = groups * scale * self.steps
        chunk = dataclasses.replace(
            _with_stream(buffer, access.dim, self.stream),
            name=self.builder.names.fresh(f"{buffer.name}_i"),
            shape=tuple(shape),
        )
        self.aliases[buffer.name, access] = chunk
        return chunk

    def select(self, buffer: Buffer, access: Access) -> Buffer:
        """An alias of this iteration's chunk of `buffer`, which stands outside."""
        out = self.alias(buffer, access)
        groups = int(access.groups)
        scale = buffer.shape[access.dim] // (groups * self.extent)
        select = Select(
            out=out,
            source=buffer,
            dim=access.dim,
            index=self.start * scale,
            size=self.size * scale,
            groups=groups,
        )
        self.body.append(select)
        return out

    def accumulator(self, buffer: Buffer, is_sum: bool) -> Buffer:
        """Where the chunks of a reduced result come together, wide enough for a sum."""
        narrow = (
            jnp.issubdtype(buffer.dtype, jnp.floating) and buffer.dtype.itemsize < 4
        )
        if not is_sum or not narrow:
            self.before.append(Allocate(buffer=buffer))
            return buffer
        name = self.builder.names.fresh(f"{buffer.name}_sum")
        wide = dataclasses.replace(buffer, name=name, dtype=np.dtype(np.float32))
        self.before.append(Allocate(buffer=wide))
        self.after.append(self.narrow(wide, buffer))
        return wide

    def narrow(self, wide: Buffer, buffer: Buffer) -> Compute:
        """The sum in the dtype that the equation asked for."""
        unit = unit_of(
            self.builder.names.fresh("narrow"),
            lambda x: lax.convert_element_type(x, buffer.dtype),
            jax.ShapeDtypeStruct(wide.shape, wide.dtype),
        )
        return Compute(unit=unit, ins=(wide,), outs=(buffer,))

    # --- Indices -------------------------------------------------------------- #

    @property
    def start(self) -> Index:
        return _INDEX * self.steps

    @property
    def size(self) -> Index:
        """The steps of this iteration: fewer in the last where they do not divide."""
        if self.extent % self.steps == 0:
            return Constant(self.steps)
        return minimum(self.steps, self.extent - _INDEX * self.steps)

    def chunk(self, groups: int) -> Chunk:
        return Chunk(
            start=self.start, size=self.size, extent=self.extent, groups=groups
        )


def _with_stream(buffer: Buffer, dim: int, stream: str) -> Buffer:
    dims = list(buffer.dims)
    dims[dim] = Dim(axes=dims[dim].axes, stream=stream)
    return dataclasses.replace(buffer, dims=tuple(dims))
