"""The tasks of a Host IR program: its loops unrolled, a task for each statement.

A task says how long it keeps a device and the host busy, and which tasks it waits for:
the ones that made its operands, and the ones before it on its stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import Literal

from jhost.lowering.cost.control_flow_task import Predict, control_flow_task
from jhost.lowering.cost.copies import (
    Copies,
    copy_of,
    is_transposed,
    taken_from_pieces,
    written_in_pieces,
)
from jhost.lowering.cost.kernels import Kernel, forwarded, kernels, steps_for
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.task import Task
from jhost.lowering.cost.transfer_tasks import transfer_tasks
from jhost.lowering.cost.writers import Writers
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.accumulate import accumulators
from jhost.lowering.ir.index import Index, LoopIndex, Rank, evaluate
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.machine import Machine, StreamKey
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.stages import set_aside, stage_runs


def unrolled(
    program: Program,
    rates: Rates,
    predict: Predict,
    *,
    in_pieces: AbstractSet[str] = frozenset(),
    carried: Mapping[str, str] | None = None,
    early: bool = False,
) -> list[Task]:
    """The tasks of a program, in its order; a body of control flow is one task.

    With `carried` params, the program runs twice, and the second run reads its params
    from results of the first.  XLA has options to begin its collectives `early`, in
    bodies too.
    """
    walk = _Unrolled(program, rates, predict, in_pieces, carried or {}, early)
    walk.run(program.body)
    if carried:
        walk.writers.carry(carried)
        walk.run(program.body)
    return walk.tasks


class _Unrolled(Machine):
    """A device's walk through the program, which notes what there is to do."""

    def __init__(
        self,
        program: Program,
        rates: Rates,
        predict: Predict,
        in_pieces: AbstractSet[str],
        carried: Mapping[str, str],
        early: bool,
    ) -> None:
        super().__init__(program.mesh.shape)
        self.early = early
        self.in_body = program.is_body
        self.predict = predict
        self.rates = rates
        self.mesh = self.ranks.sizes
        # The last device: under a causal mask its queries see most keys, so no other
        # device has more to do.
        self.at: dict[Index, int] = {Rank(axis): n - 1 for axis, n in self.mesh.items()}
        self.tasks: list[Task] = []
        self.writers = Writers()
        self.chains: dict[StreamKey, frozenset[int]] = {}
        self.in_flight: dict[str, int] = {}
        self.depth = 0
        self.copies = Copies(
            self.writers,
            in_pieces=in_pieces | written_in_pieces(program),
            copied=taken_from_pieces(program)
            | ({b.name for b in program.results} if program.is_body else set()),
        )
        self.sent = {
            stmt.source.name
            for stmt in ir.walk(program.body)
            if isinstance(stmt, ir.Communicate)
        }
        self.sent |= {result for name, result in carried.items() if name in self.sent}

    def run(self, body: Sequence[ir.Stmt]) -> None:
        for stmt in body:
            match stmt:
                case ir.Allocate(buffer=buffer):
                    self.writers.allocate(buffer.name)
                case ir.For():
                    self.loop(stmt)
                case ir.Select(index=index):
                    self.writers.select(stmt, evaluate(index, self.at))
                case ir.Set(out=out, source=source):
                    made = self.cut(source, self.writers.makers(source))
                    self.forward(out, made)
                    self.put(out, made)
                case ir.Compute():
                    self.compute(stmt)
                case ir.Communicate():
                    self.communicate(stmt)
                case ir.Wait(communication=name):
                    self.join({self.in_flight[name]})
                case ir.GetCurrentStream() | ir.SetCurrentStream():
                    self.switch(stmt)
                case ir.Scan() | ir.While() | ir.Cond():
                    after = frozenset[int]().union(*map(self.writers.makers, stmt.ins))
                    task = control_flow_task(stmt, after, self.rates, self.predict)
                    self.add(task, stmt.outs)
                case ir.Synchronize(stream=stream):
                    self.join(self.chains.get(self.stream_key(stream), frozenset()))
                case _:
                    pass

    def loop(self, loop: ir.For) -> None:
        """The stages of the iterations, in the order in which they are issued."""
        # Stages of other iterations run between the stages of one iteration, so each
        # iteration keeps its own names here.
        own = [({}, {}, {}) for _ in range(loop.extent)]
        self.depth += 1
        for stage in stage_runs(loop):
            i = self.at[LoopIndex(loop.index)] = stage.iteration
            aliases, writers, in_flight = own[i]
            with (
                set_aside(self.writers.aliases, aliases),
                set_aside(self.writers.by_buffer, writers),
                set_aside(self.in_flight, in_flight),
            ):
                self.run(stage.body)
        self.depth -= 1

    def static(self, index: Index, what: str = "index") -> int:
        """The value of an index on the device that is simulated."""
        return evaluate(index, self.at)

    def chain(self) -> frozenset[int]:
        """The tasks that the current stream waits for."""
        return self.chains.get(self.current, frozenset())

    def join(self, tasks: AbstractSet[int]) -> None:
        if self.depth or not self.on_default_stream:
            self.chains[self.current] = self.chain() | tasks

    def compute(self, stmt: ir.Compute) -> None:
        if self.depth or not self.on_default_stream:
            self.in_turn(stmt)
        else:
            self.by_kernel(stmt)

    def by_kernel(self, stmt: ir.Compute) -> None:
        """A task for each kernel: outside of loops XLA orders kernels one by one.

        The kernels that make operands of transfers come first, and the others then run
        beside these transfers.
        """
        given = forwarded(stmt.unit)
        values = [given.get(id(var), id(var)) for var in stmt.unit.outvars]
        outs = list(zip(values, stmt.outs, strict=True))
        urgent = {var for var, buffer in outs if buffer.name in self.sent}
        made = {
            id(var): self.writers.makers(buffer)
            for var, buffer in zip(stmt.unit.invars, stmt.ins, strict=True)
        }
        # XLA's latency-hiding scheduler starts transfers early, so it first runs the
        # kernels that make their operands.
        steps = steps_for(stmt, self.mesh, self.at, urgent)
        for step in steps:
            after = frozenset[int]().union(*(made.get(v, ()) for v in step.reads))
            seconds = step.kernel.seconds(self.rates)
            task = Task(seconds=seconds, host=self.rates.host, after=after)
            made |= dict.fromkeys(step.writes, frozenset({len(self.tasks)}))
            self.add(task, [buffer for var, buffer in outs if var in step.writes])
        for var, buffer in outs:
            if all(var not in step.writes for step in steps):  # the result of a barrier
                self.forward(buffer, frozenset(made.get(var, ())))

    def in_turn(self, stmt: ir.Compute) -> None:
        """One task for all kernels of a step of a loop, in the order of its stream."""
        work = [*kernels(stmt, self.mesh, self.at), *self.copies.of(stmt)]
        sums = [stmt.outs[number] for number in accumulators(stmt)]
        # cuBLAS adds in place, so a matmul only reads its accumulator in addition.  A
        # kernel of several products cannot: its result is read again to be added.
        times = 1 + any(each.rule.matmul is not None for each in stmt.unit.eqns)
        work += [Kernel(times * bytes_of(buffer)) for buffer in sums]
        read = [*stmt.ins, *sums]
        after = self.chain().union(*map(self.writers.makers, read))
        seconds = sum(kernel.seconds(self.rates) for kernel in work)
        task = Task(seconds=seconds, host=self.rates.host * len(work), after=after)
        self.add(task, stmt.outs)
        self.chains[self.current] = frozenset({len(self.tasks) - 1})

    def communicate(self, stmt: ir.Communicate) -> None:
        sent, received = is_transposed(stmt)
        after = self.chain() | self.writers.makers(stmt.source)
        after = self.cut(stmt.source, after, always=sent)
        if not self.depth:
            # The next task on the stream runs after this transfer was issued, so after
            # its operands are there.
            self.join(after)
        self.transfer(stmt, after)
        self.in_flight[stmt.name] = number = len(self.tasks) - 1
        self.put(stmt.out, frozenset({number}), always=received)

    def transfer(self, stmt: ir.Communicate, after: frozenset[int]) -> None:
        # A stream outside of loops has transfers that jhost issued early.
        ordered = self.depth == 0 and not self.on_default_stream
        *alone, rest = transfer_tasks(
            stmt,
            after,
            self.rates,
            self.mesh,
            ordered=ordered,
            # In a body XLA does not move collectives far enough.
            fixed=self.in_body or self.depth > 0,
            early=self.early,
        )
        for task in alone:
            self.add(task, [])
            rest = dataclasses.replace(rest, after=frozenset({len(self.tasks) - 1}))
        self.add(rest, [stmt.out])

    def add(self, task: Task, outs: Sequence[ir.Buffer]) -> None:
        self.writers.write(outs, len(self.tasks))
        self.tasks.append(task)

    def forward(self, out: ir.Buffer, makers: frozenset[int]) -> None:
        """A `Set` costs nothing: values are immutable, so it only adds a name."""
        self.add(Task(seconds=0.0, host=0.0, after=makers), [out])

    # --- Copies --------------------------------------------------------------- #

    def cut(
        self, source: ir.Buffer, after: frozenset[int], *, always: bool = False
    ) -> frozenset[int]:
        """The tasks before a read of `source`; a copy is added if it is a part."""
        if not (always or self.copies.is_part_by_rank(source)):
            return after
        self.add(self.copy("cut", source, after), [])
        return frozenset({len(self.tasks) - 1})

    def put(
        self, out: ir.Buffer, after: frozenset[int], *, always: bool = False
    ) -> None:
        """Add a copy of what `after` brought, if it belongs into a larger array."""
        copies = self.copies
        if always or copies.is_part_by_rank(out) or copies.is_put_together(out):
            self.add(self.copy("put", out, after), [out])

    def copy(
        self, kind: Literal["cut", "put"], part: ir.Buffer, after: frozenset[int]
    ) -> Task:
        seconds, host = copy_of(part).seconds(self.rates), self.rates.host
        return Task(seconds=seconds, host=host, after=after, copy=kind)
