"""What a program does step by step, with its loops, in the user's names."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from jhost._jax import NO_LINE, aval_of, source_line
from jhost._text import counted
from jhost.lowering.communication_report import CommunicationReport
from jhost.lowering.cost.exposed import transfer_times
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.index import LoopIndex, evaluate, leaves
from jhost.lowering.ir.layout import axes_size, bytes_of, size_in_bytes
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.ir.reach import Reach, lane_of
from jhost.lowering.ir.transfers import received_bytes, sent_to_others
from jhost.lowering.ir.unit_printer import aval_text, type_text
from jhost.lowering.places import places_of
from jhost.lowering.rules.collectives import WrittenCollective, written_in
from jhost.lowering.rules.dim_rule import shape_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A computation or a communication of the program, or a loop or branch around some.

    Attributes:
        text: what it does.
        layout: the types of its operands and results, as in the Host IR.
        communication: what it moves, if it is a communication.
        steps: the steps in a loop or branch.
    """

    text: str
    layout: str = ""
    communication: CommunicationReport | None = None
    steps: tuple[Step, ...] = ()


def steps_of(
    program: Program,
    times: int,
    rates: Rates | None = None,
    reach: Mapping[str, Reach] | None = None,
) -> tuple[Step, ...]:
    """The steps of a program, or of a body that is run so many `times`.

    Transfers have their predicted times where there are `rates`.  `reach` says how far
    apart the devices along each axis lie.
    """
    walk = _Reporter(program, times, rates, reach or {})
    return tuple(walk.steps(program.body, Fraction(1)))


def communications_in(steps: Iterable[Step]) -> Iterator[CommunicationReport]:
    """All communications of steps and of those that they hold."""
    for step in steps:
        if step.communication:
            yield step.communication
        yield from communications_in(step.steps)


def named_bodies(
    stmt: ir.ControlFlow, times: int
) -> Iterator[tuple[str, Program, int]]:
    """Each body with its name in messages, and how often it runs."""
    # How often a `while` goes round, nobody knows before.  A branch is taken once at
    # most.
    length = stmt.length if isinstance(stmt, ir.Scan) else 1
    where = f" [{stmt.where}]" if stmt.where else ""
    for name, body in zip(_body_names(stmt), stmt.bodies, strict=True):
        yield name + where, body, times * length


def _body_names(stmt: ir.ControlFlow) -> Sequence[str]:
    match stmt:
        case ir.Scan(length=length):
            return [f"in a scan of {counted(length, 'iteration')}"]
        case ir.While():
            return ["in the condition of a while loop", "in a while loop"]
        case ir.Cond(branches=branches):
            count = len(branches)
            return [f"in branch {number} of {count}" for number in range(count)]


def takes_turns(loop: ir.For) -> bool:
    """Whether the iterations of a loop take turns on streams, and do work there."""
    ordering = [isinstance(s, ir.SetCurrentStream | ir.Synchronize) for s in loop.body]
    inner = any(isinstance(s, ir.For) and takes_turns(s) for s in loop.body)
    # Its body begins with the stream of the iteration.  A loop that only waits for all
    # streams has no work.
    return inner or (ordering[0] and not all(ordering))


class _Reporter:
    """Reports the steps of a program, or of a body that runs so many `times`."""

    def __init__(
        self,
        program: Program,
        times: int,
        rates: Rates | None,
        reach: Mapping[str, Reach],
    ) -> None:
        self.program, self.times, self.rates, self.reach = program, times, rates, reach
        self.ranks = Ranks(program.mesh.shape)
        self.loops: dict[str, int] = {}
        self.places = places_of(program)
        # Without rates there are no times, and reports leave them out.
        self.seconds = transfer_times(program, rates) if rates else {}

    def steps(self, body: Sequence[ir.Stmt], repeats: Fraction) -> Iterator[Step]:
        """The steps of statements that are as much work as `repeats` first chunks."""
        for stmt in body:
            match stmt:
                case ir.Compute():
                    yield _computation(self.program, stmt)
                    yield from _written_in(self.program, stmt, self.times)
                case ir.Communicate():
                    yield self.communication(stmt, repeats)
                case ir.For():
                    worth = repeats * _chunks_worth(stmt)
                    self.loops[stmt.index] = stmt.extent
                    inner = tuple(self.steps(stmt.body, worth))
                    del self.loops[stmt.index]
                    yield from _around(_loop_text(stmt), inner)
                case ir.Scan() | ir.While() | ir.Cond():
                    for name, inner, often in named_bodies(stmt, self.times):
                        yield from _around(name, self.inside(inner, often))
                case _:
                    pass

    def inside(self, body: Program, times: int) -> tuple[Step, ...]:
        return steps_of(body, times, self.rates, self.reach)

    def communication(self, stmt: ir.Communicate, repeats: Fraction) -> Step:
        report = CommunicationReport(
            kind=stmt.kind,
            axes=stmt.axes,
            # The source has the name: what comes of it is one that jhost made up.
            value=display_name(self.program, stmt.source.name),
            # A ragged last chunk is a fraction of a first one.  Rounded one by one,
            # chunks would not add up to the value.
            bytes=int(self.received(stmt) * repeats) * self.times,
            chunks=math.ceil(repeats),
            times=self.times,
            lane=lane_of(stmt, self.reach),
        )
        if place := self.places.get(stmt.name):
            report = dataclasses.replace(report, **place._asdict())
        if time := self.seconds.get(stmt.name):
            report = dataclasses.replace(
                report,
                seconds=time.seconds * self.times,
                exposed=time.exposed * self.times,
            )
        layout = f"{type_text(stmt.source)} -> {type_text(stmt.out)}"
        return Step(text=str(report), layout=layout, communication=report)

    def received(self, stmt: ir.Communicate) -> Fraction:
        """The bytes that a device receives each time, on average, from others."""
        devices = self.ranks.extent(stmt.axes)
        held = received_bytes(stmt.kind, bytes_of(stmt.source), devices)
        return held * sent_to_others(stmt, self.ranks, self.loops)


def _around(text: str, steps: tuple[Step, ...]) -> Iterator[Step]:
    if steps:
        yield Step(text=text, steps=steps)


def _loop_text(loop: ir.For) -> str:
    turns = ", which take turns on queues" if takes_turns(loop) else ""
    return f"loop of {counted(loop.extent, 'iteration')}{turns}"


def _computation(program: Program, stmt: ir.Compute) -> Step:
    names = Counter(each.eqn.primitive.name for each in stmt.unit.eqns)
    texts = [f"{n} {name}" if n > 1 else name for name, n in names.items()]
    ins, outs = _typed(program, stmt.ins), _typed(program, stmt.outs)
    return Step(text=", ".join(texts), layout=f"{ins} -> {outs}" if ins else outs)


def _written_in(program: Program, stmt: ir.Compute, times: int) -> Iterator[Step]:
    """The collectives in a `jax.shard_map`, which is a step of its own."""
    mesh = dict(program.mesh.shape)
    for each in stmt.unit.eqns:
        for found in written_in(each.eqn):
            yield _as_written(found, source_line(each.eqn), mesh, times)


def _as_written(
    found: WrittenCollective, where: str, mesh: Mapping[str, int], times: int
) -> Step:
    # How many rows go where is only known at run time.  There is room for the most.
    value, most = aval_text(found.source), found.room or found.source
    layout = value if found.room is None else f"{value} -> {aval_text(found.room)}"
    kind = "AllToAll" if found.kind == "RaggedAllToAll" else found.kind
    often = times * found.times
    held = size_in_bytes(shape_of(most), aval_of(most).dtype)
    report = CommunicationReport(
        kind=found.kind,
        axes=found.axes,
        value=layout,
        bytes=received_bytes(kind, held, axes_size(found.axes, mesh)) * often,
        chunks=1,
        times=often,
        written=True,
        # Users wrote it themselves, so its line tells them which one it is.
        where="" if where == NO_LINE else where,
    )
    return Step(text=str(report), layout=layout, communication=report)


def _typed(program: Program, buffers: Sequence[ir.Buffer]) -> str:
    """Each once: several buffers may be parts of one value."""
    texts = [f"{display_name(program, b.name)}: {type_text(b)}" for b in buffers]
    return ", ".join(dict.fromkeys(texts))


def _chunks_worth(loop: ir.For) -> Fraction:
    """The iterations of `loop` by work; a smaller last one counts as a fraction."""
    index = LoopIndex(loop.index)
    # Any part of a chunk has the proportions of the chunk: the first that is found will
    # do.
    for stmt in ir.walk(loop.body):
        chunk = getattr(stmt, "chunk", None)
        size = (
            chunk.size if chunk else stmt.size if isinstance(stmt, ir.Select) else None
        )
        if size is not None and leaves(size) <= {index}:
            sizes = [evaluate(size, {index: i}) for i in range(loop.extent)]
            return Fraction(sum(sizes), sizes[0])
    return Fraction(loop.extent)
