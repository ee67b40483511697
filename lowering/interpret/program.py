"""Runs a Host IR program statement by statement, for debugging and to check emission.

Each device has NumPy arrays of its own.  An alias reads and writes its source at once.
Statements run in the order of the program.  This module shares no code with `emit`, so
a mistake in one of them is not repeated in the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jhost.lowering.interpret.arrays import (
    OnDevices,
    as_numpy,
    joined,
    split,
    undefined,
)
from jhost.lowering.interpret.collectives import communicate
from jhost.lowering.interpret.compute import combined, compute
from jhost.lowering.interpret.control_flow import RunOnDevices, control_flow
from jhost.lowering.interpret.memory import ArrayMemory, ArrayView, whole
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.accumulate import accumulators
from jhost.lowering.ir.index import Index
from jhost.lowering.ir.machine import Machine, refuse_reshard, stream_key_text
from jhost.lowering.ir.printer import statement_text
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.stages import OwnNames, stage_runs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One statement as it ran: its stream, text, loop indices, and the memory after.

    `live_bytes` is the bytes of all buffers of one device, params included.
    """

    stream: str
    text: str
    indices: tuple[tuple[str, int], ...]
    live_bytes: int


def interpret(
    program: Program, mesh: Mesh, args: Sequence[Any]
) -> tuple[tuple[jax.Array, ...], list[Record]]:
    """The results of `program` on the global `args`, and the statements as they ran.

    The program must be valid; see `verify`.
    """
    interpreter = _Interpreter(program, mesh)
    ranks, params = interpreter.ranks, program.params
    with (
        # Each device computes by itself: a mesh around it would change types.
        jax.sharding.use_abstract_mesh(AbstractMesh((), ())),
        np.errstate(all="ignore"),
    ):
        values = [
            split(as_numpy(a), p, ranks) for a, p in zip(args, params, strict=True)
        ]
        outs = interpreter.run(values)
        results = zip(outs, program.results, strict=True)
        return tuple(joined(*each, ranks, mesh) for each in results), interpreter.trace


class _Interpreter(Machine):
    def __init__(self, program: Program, mesh: Mesh) -> None:
        super().__init__(program.mesh.shape)
        self.program = program
        self.mesh = mesh
        self.memories: dict[str, ArrayMemory] = {}
        self.aliases: dict[str, ArrayView] = {}
        self.own: list[OwnNames] = []
        """The memories and aliases that iterations of the loops around have made."""
        self.trace: list[Record] = []

    def run(self, args: Sequence[OnDevices]) -> list[OnDevices]:
        """The results, from each device's values of the params."""
        for buffer, values in zip(self.program.params, args, strict=True):
            self.memories[buffer.name] = ArrayMemory.of(values, len(buffer.shape))
        self.body(self.program.body)
        return [self.read(buffer) for buffer in self.program.results]

    def body(self, body: Sequence[ir.Stmt]) -> None:
        for stmt in body:
            text = statement_text(stmt, {*self.memories, *self.aliases})
            self.statement(stmt)
            if not isinstance(stmt, ir.For | ir.NextStage):
                self.record(text)

    def record(self, text: str) -> None:
        # Iterations that have begun hold memory while stages of others run.
        own = (memories for each in self.own for memories, _ in each.own)
        held = (self.memories, *own)
        self.trace.append(
            Record(
                stream=stream_key_text(self.current),
                text=text,
                indices=tuple(self.loops.items()),
                live_bytes=sum(m.values[0].nbytes for h in held for m in h.values()),
            )
        )

    def statement(self, stmt: ir.Stmt) -> None:
        match stmt:
            case ir.Allocate(buffer=buffer):
                self.allocate(buffer)
            case ir.Deallocate(buffer=buffer):
                del self.memories[buffer.name]
            case ir.Select(source=source, out=out):
                view, size = self.view(source.name), self.static(stmt.size)
                self.aliases[out.name] = view.select(stmt, self.at(stmt.index), size)
            case ir.Set(out=out, source=source):
                self.write(out, self.read(source))
            case ir.Reshard() | ir.Neighbours():
                refuse_reshard(self.program, stmt)
            case ir.Compute():
                self.compute(stmt)
            case ir.Communicate():
                self.communicate(stmt)
            case ir.Wait():
                pass  # a communication writes its result at once
            case ir.GetCurrentStream() | ir.SetCurrentStream():
                self.switch(stmt)
            case ir.Synchronize():
                pass  # statements run one after the other
            case ir.For():
                self.loop(stmt)
            case ir.NextStage():
                pass  # a loop's body comes stage by stage
            case ir.Scan() | ir.While() | ir.Cond():
                self.control_flow(stmt)

    # --- Buffers -------------------------------------------------------------- #

    def allocate(self, buffer: ir.Buffer) -> None:
        empty = undefined(buffer.shape, buffer.dtype)
        values = [empty.copy() for _ in range(self.ranks.count)]
        self.memories[buffer.name] = ArrayMemory.of(
            values, len(buffer.shape), written=False
        )

    def view(self, name: str) -> ArrayView:
        return self.aliases.get(name) or whole(name, self.memories[name])

    def read(self, buffer: ir.Buffer) -> OnDevices:
        view = self.aliases.get(buffer.name)
        if view is None:
            return self.memories[buffer.name].values
        return view.read(self.memories[view.owner].values)

    def write(self, buffer: ir.Buffer, values: OnDevices) -> None:
        """Write into memory; a name that is no alias becomes a copy of the values."""
        view = self.aliases.get(buffer.name)
        if view is None:
            copies = list(map(np.copy, values))
            self.memories[buffer.name] = ArrayMemory.of(copies, len(buffer.shape))
            return
        memory = self.memories[view.owner]
        view.write(memory.values, values)
        view.mark(memory.written)

    def is_written(self, buffer: ir.Buffer) -> list[bool]:
        """Whether each device has written the buffer.

        An accumulator that is not written yet takes the first result as it is.
        """
        if buffer.name not in self.aliases and buffer.name not in self.memories:
            return [False] * self.ranks.count
        view = self.view(buffer.name)
        parts = view.read(self.memories[view.owner].written)
        return [bool(part.any()) for part in parts]

    # --- Work ----------------------------------------------------------------- #

    def at(self, index: Index) -> list[int]:
        """The value of `index` on each device."""
        return self.ranks.everywhere(self.value(index)).ravel().tolist()

    def compute(self, stmt: ir.Compute) -> None:
        chunk, ins = stmt.chunk, list(map(self.read, stmt.ins))
        starts = self.at(chunk.start) if chunk else [0] * self.ranks.count
        size = self.static(chunk.size) if chunk else 0
        outs = compute(stmt, ins, starts, size, self.ranks, self.mesh)
        self.accumulate(stmt, outs)
        for buffer, values in zip(stmt.outs, outs, strict=True):
            self.write(buffer, values)

    def accumulate(self, stmt: ir.Compute, outs: Sequence[OnDevices]) -> None:
        """Combine `outs` with the values of accumulators."""
        written = {n: self.is_written(stmt.outs[n]) for n in accumulators(stmt)}
        for device in range(self.ranks.count):
            used = [number for number, there in written.items() if there[device]]
            held = [self.read(stmt.outs[number])[device] for number in used]
            new = [outs[number][device] for number in used]
            found = combined(stmt, held, new) if used else []
            for number, value in zip(used, found, strict=True):
                outs[number][device] = value

    def communicate(self, stmt: ir.Communicate) -> None:
        shift = 0 if stmt.shift is None else self.value(stmt.shift)
        values = communicate(stmt, self.read(stmt.source), self.ranks, shift)
        self.write(stmt.out, values)

    # --- Control -------------------------------------------------------------- #

    def loop(self, stmt: ir.For) -> None:
        """Run the stages of all iterations; an iteration's names end with it."""
        self.own.append(own := OwnNames(stmt, self.memories, self.aliases))
        for stage in stage_runs(stmt):
            with self.iteration(stmt, stage.iteration), own.of(stage.iteration):
                self.body(stage.body)
            if stage.last:
                own.end(stage.iteration)
        self.own.pop()

    def control_flow(self, stmt: ir.ControlFlow) -> None:
        ins = list(map(self.read, stmt.ins))
        outs = control_flow(stmt, ins, self.runner(), self.ranks.count)
        for buffer, values in zip(stmt.outs, outs, strict=True):
            self.write(buffer, values)

    def runner(self) -> RunOnDevices:
        """Runs bodies of one statement, and records each when it first runs."""
        recorded: list[Program] = []

        def run(body: Program, args: Sequence[OnDevices]) -> list[OnDevices]:
            inner = _Interpreter(body, self.mesh)
            results = inner.run(args)
            if body not in recorded:
                recorded.append(body)
                self.trace += inner.trace
            return results

        return run
