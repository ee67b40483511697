"""Host IR to JAX: the program of one device, evaluated under one `jax.shard_map`.

Loops are unrolled; an index is a number where all ranks agree on it, else traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jhost.lowering.emit.buffers import Memory
from jhost.lowering.emit.collectives import communicate
from jhost.lowering.emit.control_flow import call_control_flow, first_read
from jhost.lowering.emit.order import Order
from jhost.lowering.emit.shard_map import shard_map
from jhost.lowering.emit.signs import (
    never_negative_zero,
    sums_begin_with_0,
    with_signs,
)
from jhost.lowering.emit.tied import last_work, made_in, products_of, tied
from jhost.lowering.emit.views import Views
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.accumulate import accumulators, combine
from jhost.lowering.ir.axis_parts import given_entries
from jhost.lowering.ir.machine import refuse_reshard
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.scopes import Scopes
from jhost.lowering.ir.stages import OwnNames, stage_runs
from jhost.lowering.units.evaluate import evaluate_unit

Emitted: TypeAlias = Callable[..., tuple[jax.Array, ...]]


def emit(program: Program, mesh: Mesh | AbstractMesh) -> Emitted:
    """`program` as a JAX function from the global params to the global results.

    The program must be valid; see `verify`.
    """

    from_0 = sums_begin_with_0(mesh)

    def on_device(*params: jax.Array) -> tuple[jax.Array, ...]:
        return _Emitter(program, sums_from_0=from_0).run(params)

    ins, outs = specs_of(program, program.params), specs_of(program, program.results)
    return shard_map(on_device, mesh, ins, outs)


def specs_of(
    program: Program, buffers: Iterable[ir.Buffer]
) -> tuple[PartitionSpec, ...]:
    """How the global arrays of some params or results are sharded."""
    entries = (given_entries(buffer, program.mesh.shape) for buffer in buffers)
    return tuple(PartitionSpec(*(axes or None for axes in each)) for each in entries)


class _Emitter(Views):
    """The state of one evaluation: what the device holds, and what is ordered."""

    def __init__(
        self,
        program: Program,
        scopes: Scopes | None = None,
        *,
        sums_from_0: bool = False,
    ) -> None:
        super().__init__(program)
        self.program = program
        self.sums_from_0 = sums_from_0
        self.never_negative = never_negative_zero(program)
        self.scopes = scopes or Scopes(program)
        self.made: frozenset[str] = frozenset()
        # Products since the last body, by the result that is made of each.
        self.products: dict[str, Any] = {}
        # What cheap work made that a stream waits for: read as the barriers pass it on.
        self.threaded: set[str] = set()
        self.order = Order(weakref.proxy(self))  # no cycle: it may hold arrays

    def run(self, params: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        for buffer, value in zip(self.program.params, params, strict=True):
            self.write(buffer, value)
        self.body(self.program.body)
        end = (
            nullcontext()
            if self.program.is_body
            else jax.named_scope(self.scopes.results)
        )
        with end:
            return tuple(self.read(buffer) for buffer in self.program.results)

    def body(self, body: Iterable[ir.Stmt]) -> None:
        for stmt in body:
            scope = self.scopes.name(stmt, tuple(self.loops.values()))
            # XLA keeps it in the metadata of instructions, where `jhost.profile` reads.
            with jax.named_scope(scope) if scope else nullcontext():
                self.statement(stmt)

    def statement(self, stmt: ir.Stmt) -> None:
        match stmt:
            case ir.Allocate(buffer=buffer):
                self.views[buffer.name] = self.new(buffer, buffer.shape)
            case ir.Deallocate(buffer=buffer):
                del self.views[buffer.name]
            case ir.Select():
                self.select(stmt)
            case ir.Set(out=out, source=source):
                self.write(out, self.read(source))
            case ir.Reshard() | ir.Neighbours():
                refuse_reshard(self.program, stmt)
            case ir.Compute():
                self.compute(stmt)
            case ir.Communicate():
                self.communicate(stmt)
            case ir.Wait(communication=name):
                self.order.wait(name)
            case ir.GetCurrentStream() | ir.SetCurrentStream():
                self.switch(stmt)
            case ir.Synchronize(stream=stream):
                self.order.synchronize(self.stream_key(stream))
            case ir.For():
                self.loop(stmt)
            case ir.NextStage():
                pass  # a loop's body comes stage by stage
            case ir.Scan() | ir.While() | ir.Cond():
                self.control_flow(stmt)

    def operand(self, buffer: ir.Buffer) -> Any:
        """The value of a buffer that a computation reads.

        A received value is read, and put in its place, behind the work beside its
        transfer.  Otherwise XLA would wait for the transfer before that work.
        """
        view = self.views[buffer.name]
        if view.source is None and view.memory.received:
            view.memory.read_behind(self.order.arrived)
        value = self.read(buffer)
        if buffer.name in self.threaded:
            value = self.order.barriers.latest(value)
        return self.order.arrived(value)

    # --- Computation ---------------------------------------------------------- #

    def compute(self, stmt: ir.Compute) -> None:
        ins = [self.operand(buffer) for buffer in stmt.ins]
        made = {n for n, buffer in enumerate(stmt.ins) if self.is_made_here(buffer)}
        parts = {n for n, buffer in enumerate(stmt.ins) if self.is_part(buffer)}
        repeats = self.order.depth > 0
        chosen = sorted(tied(stmt.unit, made, parts, repeats=repeats))
        placed = self.placed_at_once(stmt.outs)
        # What they are put into has to be complete by then as well.
        waiting = [*(ins[n] for n in chosen), *(memory.base for memory in placed)]
        tied_values = iter(self.order.before_compute(waiting))
        for number in chosen:
            ins[number] = next(tied_values)
        for memory in placed:
            memory.base = next(tied_values)
        ins = self.order.leaving(ins)
        # Not widened here: XLA then writes the narrow values, and widens them where it
        # adds.  With this, ring attention over 32,768 tokens on two devices moves 0.4
        # GB to combine its chunks, and 1.5 without.
        # No body stands in a loop over chunks.
        products = [] if self.order.depth else products_of(stmt.unit)
        kept = [var for _, var in products]
        outs = evaluate_unit(stmt.unit, ins, self.site(stmt.chunk), False, kept)
        outs, values = outs[: len(stmt.outs)], outs[len(stmt.outs) :]
        for (number, _), value in zip(products, values, strict=True):
            self.products[stmt.outs[number].name] = value
        found = self.combined(stmt, outs)
        for buffer, value in zip(stmt.outs, found, strict=True):
            self.write(buffer, value)
        for memory in placed:
            memory.assemble()
        if self.order.active and not chosen:
            # XLA would move it behind what waits for it, if its readers did not.
            self.threaded |= {buffer.name for buffer in stmt.outs}
            for value in found:
                self.order.barriers.accumulated(None, value)
        both = zip(outs, found, strict=True)
        added = [value for came, value in both if came.dtype != value.dtype]
        self.order.after_compute(found, added)
        if (number := last_work(stmt.unit)) is not None:
            self.order.worked(found[number])

    def is_made_here(self, buffer: ir.Buffer) -> bool:
        """Whether the loop, or the work around it, makes a buffer or receives it.

        Not what loops before have put together: XLA can read that piece by piece.
        """
        if self.order.depth:
            return buffer.name in self.made
        if self.is_part(buffer):
            return False
        memory = self.views[buffer.name].memory
        chunk = any(dim.stream is not None for dim in buffer.dims)
        return memory.received or (chunk and not memory.pieces)

    def placed_at_once(self, outs: Sequence[ir.Buffer]) -> list[Memory]:
        """The memories that hold `outs` at a place that depends on the device.

        Their parts go in by copies, and each copy had better come before the next step,
        which may have to wait for a transfer, than after the last one.
        """
        if not self.order.active:
            return []
        views = [self.views[b.name] for b in outs if b.name in self.views]
        wanted = [v for v in views if v.memory.read_whole and not v.is_static()]
        return list({id(view.memory): view.memory for view in wanted}.values())

    def combined(self, stmt: ir.Compute, outs: Sequence[Any]) -> list[Any]:
        """`outs`, combined into what accumulators among the buffers hold."""
        numbers, found = accumulators(stmt), list(outs)
        held = [self.held(stmt, stmt.outs[number]) for number in numbers]
        new = combine(stmt, held, [outs[number] for number in numbers])
        for number, old, value in zip(numbers, held, new, strict=True):
            if self.order.active:
                self.order.barriers.accumulated(old, value)
            found[number] = value
        return found

    def held(self, stmt: ir.Compute, accumulator: ir.Buffer) -> Any | None:
        """What an accumulator holds; a fresh one holds nothing."""
        view = self.views[accumulator.name]
        if view.memory.fresh(view.region):
            return None
        return self.order.barriers.latest(view.held())

    # --- Communication -------------------------------------------------------- #

    def communicate(self, stmt: ir.Communicate) -> None:
        source = self.order.before_communication(self.read(stmt.source))
        shift = 0 if stmt.shift is None else self.value(stmt.shift)
        value = communicate(stmt, source, self.ranks, shift)
        unsure = stmt.source.name not in self.never_negative
        if stmt.reducer == "sum" and self.sums_from_0 and unsure:
            value = with_signs(value, source, stmt, self.ranks)
        self.write(stmt.out, value)
        if not self.order.depth:
            # Kept by the memory, since other names may reach it later.
            self.views[stmt.out.name].memory.received = True
        self.order.issued(stmt.name, value)

    # --- Control -------------------------------------------------------------- #

    def loop(self, stmt: ir.For) -> None:
        outermost = not self.order.depth
        if outermost:
            self.made = made_in(stmt)
        # Unrolled: XLA schedules a loop's body by itself, and nothing would overlap
        # across iterations.
        self.order.depth += 1
        own = OwnNames(stmt, self.views, self.order.in_flight)
        for stage in stage_runs(stmt):
            with self.iteration(stmt, stage.iteration), own.of(stage.iteration):
                self.body(stage.body)
            if stage.last:
                _, in_flight = own.end(stage.iteration)
                self.order.in_flight.update(in_flight)
        self.order.depth -= 1
        if outermost:
            self.made = frozenset()

    def kept_beyond(self, stmt: ir.ControlFlow) -> list[Any]:
        """The products before a body that only something behind it reads.

        XLA would make them behind it, and keep what they read until then.  The
        gradient of a vocabulary's weights reads the cotangent of all logits: 2.1 GB of
        6.4 that a step of Llama 8B took over tp of two, beside its backward scan.
        """
        read = {buffer.name for buffer in stmt.ins}
        kept = self.products.items()
        self.products = {}
        return [made for name, made in kept if name in self.views.keys() - read]

    def control_flow(self, stmt: ir.ControlFlow) -> None:
        """`lax`'s own, whose bodies are programs on one device like this one."""

        def run(body: Program, *args: jax.Array) -> tuple[jax.Array, ...]:
            from_0 = self.sums_from_0
            # With an order of its own: XLA schedules each body by itself.
            return _Emitter(body, self.scopes, sums_from_0=from_0).run(args)

        ins = {buffer.name: self.read(buffer) for buffer in stmt.ins}
        first = [buffer.name for buffer in first_read(stmt)]
        there = self.order.before_compute([ins[name] for name in first])
        there = self.order.barriers.behind(there, self.kept_beyond(stmt))
        ins |= zip(first, there, strict=True)
        values = call_control_flow(stmt, [ins[b.name] for b in stmt.ins], run)
        self.order.ran(values)
        for buffer, value in zip(stmt.outs, values, strict=True):
            self.write(buffer, value)
