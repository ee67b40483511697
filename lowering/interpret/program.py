"""A Host IR program statement by statement: for debugging, and to check emission.

Buffers are real arrays, an alias reads and writes its source at once, and nothing is
ordered but by the program.  It shares no shortcut with `emit`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jhost.lowering.emit.program import refuse_reshard, spec_of
from jhost.lowering.interpret import steps
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.accumulate import accumulators
from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.ir.machine import Machine
from jhost.lowering.ir.printer import statement_text
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.regions import Region, overlap, whole_region
from jhost.lowering.verify.state import stream_key_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One statement as it ran: its stream, text, loop indices, and the memory after.

    `live_bytes` is what one device holds in buffers, params included.
    """

    stream: str
    text: str
    indices: tuple[tuple[str, int], ...]
    live_bytes: int


def interpret(
    program: Program, mesh: Mesh, args: Sequence[Any]
) -> tuple[tuple[jax.Array, ...], list[Record]]:
    """The results of `program` on the global `args`, and what ran, in order.

    The program must be valid; see `verify`.  `args` may be tracers.
    """
    interpreter = _Interpreter(program, mesh)
    for buffer, value in zip(program.params, args, strict=True):
        shared = steps.stacked(mesh, spec_of(buffer))(value)
        interpreter.memories[buffer.name] = _Memory(shared, written=True)
    interpreter.body(program.body)
    results = tuple(
        steps.unstacked(mesh, spec_of(buffer))(interpreter.read(buffer.name))
        for buffer in program.results
    )
    return results, interpreter.trace


@dataclasses.dataclass(slots=True)
class _Memory:
    """A buffer's value on every device, and which parts were written."""

    value: Any
    written: bool = False
    writes: list[Region] = dataclasses.field(default_factory=list[Region])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Alias:
    """A Select at one iteration; `start` has an entry for each device."""

    stmt: ir.Select
    start: Any
    size: int
    owner: str
    region: Region


class _Interpreter(Machine):
    def __init__(self, program: Program, mesh: Mesh) -> None:
        super().__init__(program.mesh.shape)
        self.program = program
        self.mesh = mesh
        self.memories: dict[str, _Memory] = {}
        self.aliases: dict[str, _Alias] = {}
        self.trace: list[Record] = []

    def body(self, body: Sequence[ir.Stmt]) -> None:
        for stmt in body:
            text = statement_text(stmt, {*self.memories, *self.aliases})
            self.statement(stmt)
            if not isinstance(stmt, ir.For):
                self.record(text)

    def record(self, text: str) -> None:
        devices = self.ranks.count
        held = sum(m.value.nbytes // devices for m in self.memories.values())
        self.trace.append(
            Record(
                stream=stream_key_text(self.current),
                text=text,
                indices=tuple(self.loops.items()),
                live_bytes=held,
            )
        )

    def statement(self, stmt: ir.Stmt) -> None:
        match stmt:
            case ir.Allocate(buffer=buffer):
                self.allocate(buffer)
            case ir.Deallocate(buffer=buffer):
                del self.memories[buffer.name]
            case ir.Select():
                self.select(stmt)
            case ir.Set(out=out, source=source):
                self.write(out.name, self.read(source.name))
            case ir.Reshard():
                refuse_reshard(self.program, stmt)
            case ir.Compute():
                self.compute(stmt)
            case ir.Communicate():
                self.communicate(stmt)
            case ir.Wait():
                pass  # what a communication writes is there at once
            case ir.GetCurrentStream() | ir.SetCurrentStream():
                self.switch(stmt)
            case ir.Synchronize():
                pass  # statements run one after the other
            case ir.For():
                self.loop(stmt)
            case ir.Scan() | ir.While() | ir.Cond():
                self.control_flow(stmt)

    # --- Buffers -------------------------------------------------------------- #

    def allocate(self, buffer: ir.Buffer) -> None:
        shape = (*self.ranks.shape, *buffer.shape)
        self.memories[buffer.name] = _Memory(_poison(shape, buffer.dtype))

    def region(self, name: str) -> Region:
        if name in self.aliases:
            return self.aliases[name].region
        shape = self.memories[name].value.shape[len(self.ranks.shape) :]
        return whole_region(shape, len(self.ranks.shape))

    def owner(self, name: str) -> str:
        return self.aliases[name].owner if name in self.aliases else name

    def select(self, stmt: ir.Select) -> None:
        source, size = stmt.source.name, self.static(stmt.size)
        index = self.value(stmt.index)
        self.aliases[stmt.out.name] = _Alias(
            stmt=stmt,
            start=self.at_ranks(stmt.index),
            size=size,
            owner=self.owner(source),
            region=self.region(source).select(
                stmt.dim, index, size, stmt.groups, stmt.drop
            ),
        )

    def read(self, name: str) -> Any:
        alias = self.aliases.get(name)
        if alias is None:
            return self.memories[name].value
        stmt = alias.stmt
        step = steps.select(self.mesh, stmt.dim, alias.size, stmt.groups, stmt.drop)
        return step(self.read(stmt.source.name), alias.start)

    def write(self, name: str, value: Any) -> None:
        """Write into memory; a name that has none gets it."""
        if self.owner(name) not in self.memories:
            self.memories[name] = _Memory(value)
        self.memories[self.owner(name)].writes.append(self.region(name))
        self.store(name, value)

    def store(self, name: str, value: Any) -> None:
        alias = self.aliases.get(name)
        if alias is None:
            self.memories[name].value = value
            return
        source = alias.stmt.source.name
        step = steps.update(self.mesh, alias.stmt.dim, alias.stmt.groups)
        self.store(source, step(self.read(source), alias.start, value))

    # --- Indices -------------------------------------------------------------- #

    def at_ranks(self, index: Index) -> Any:
        value = self.value(index)
        return self.ranks.everywhere(value).astype(np.int32)

    # --- Work ----------------------------------------------------------------- #

    def compute(self, stmt: ir.Compute) -> None:
        chunk = stmt.chunk
        size = self.static(chunk.size) if chunk else 0
        cut = (chunk.extent, chunk.groups, chunk.grain) if chunk else (0, 1, 1)
        step = steps.compute(self.mesh, stmt.unit, size, *cut)
        start = self.at_ranks(chunk.start if chunk else Constant(0))
        outs = step(start, *(self.read(buffer.name) for buffer in stmt.ins))
        values = dict(zip((buffer.name for buffer in stmt.outs), outs, strict=True))
        sums = [stmt.outs[number].name for number in accumulators(stmt)]
        used = [name for name in sums if not self.is_fresh(name)]
        if used:
            held, new = map(self.read, used), map(values.__getitem__, used)
            found = steps.combine(self.mesh, stmt)(*held, *new)
            values |= zip(used, found, strict=True)
        for name, value in values.items():
            self.write(name, value)

    def is_fresh(self, name: str) -> bool:
        """Whether nothing was written there: the first result is then taken as is."""
        memory, region = self.memories[self.owner(name)], self.region(name)
        touched = any(overlap(region, write) for write in memory.writes)
        return not memory.written and not touched

    def communicate(self, stmt: ir.Communicate) -> None:
        shift = 0 if stmt.shift is None else self.value(stmt.shift)
        targets = self.ranks.targets(stmt.axes, shift)[:, 0]
        sources = tuple(np.argsort(targets).tolist())
        step = steps.communicate(self.mesh, stmt, sources)
        self.write(stmt.out.name, step(self.read(stmt.source.name)))

    # --- Control -------------------------------------------------------------- #

    def loop(self, stmt: ir.For) -> None:
        for value in range(stmt.extent):
            with self.iteration(stmt, value):
                self.scoped(stmt.body)

    def control_flow(self, stmt: ir.ControlFlow) -> None:
        """`lax`'s own on the values of all devices; a body is recorded once."""
        seen: list[Program] = []

        def run(body: Program, *args: Any) -> list[Any]:
            inner = _Interpreter(body, self.mesh)
            for buffer, value in zip(body.params, args, strict=True):
                inner.memories[buffer.name] = _Memory(value, written=True)
            inner.body(body.body)
            if body not in seen:  # JAX may trace it again
                seen.append(body)
                self.trace += inner.trace
            return [inner.read(buffer.name) for buffer in body.results]

        ins = [self.read(buffer.name) for buffer in stmt.ins]
        outs = steps.control_flow(self.mesh, stmt, ins, run)
        for buffer, value in zip(stmt.outs, outs, strict=True):
            self.write(buffer.name, value)

    def scoped(self, body: Sequence[ir.Stmt]) -> None:
        memories, aliases = set(self.memories), set(self.aliases)
        self.body(body)
        self.memories = {n: m for n, m in self.memories.items() if n in memories}
        self.aliases = {n: a for n, a in self.aliases.items() if n in aliases}


def _poison(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Memory without contents, filled so that a read of it shows."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jax.lax.empty(shape, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        # JAX's search for the user's NaNs must not find this one.
        poison = jnp.finfo(dtype).max if jax.config.jax_debug_nans else math.nan
        return jnp.full(shape, poison, dtype)
    return jnp.full(shape, True if dtype == np.bool_ else jnp.iinfo(dtype).max, dtype)
