"""Turn streams into loops: each statement that joins one works on a chunk at a time.

Statements of one stream share a loop wherever the dependency graph lets them.  Two
things split a loop in two: a statement outside of the stream on a path between two
statements of it, and a value that one makes in chunks and another needs whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import ClassVar

from jax.extend.core import JaxprEqn, jaxprs_in_params

from jhost import errors
from jhost._jax import source_line
from jhost.lowering.ir.bodies import CONTROL_FLOW, EachProgram, is_alike
from jhost.lowering.ir.derived import Shared
from jhost.lowering.ir.graph import Group, Node, merge_groups
from jhost.lowering.ir.marks import StreamChoice, Wish
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note, StreamReport, UnmetWish
from jhost.lowering.ir.requests import stream_choices, without_wish
from jhost.lowering.ir.statements import Communicate, Compute, Stmt
from jhost.lowering.loops.builder import Built, LoopBuilder
from jhost.lowering.loops.gather_again import with_gathers_again
from jhost.lowering.loops.legality import Pipelining, choose_pipeline, off
from jhost.lowering.rules.collectives import written_in
from jhost.lowering.streams.participation import Access, participation_of
from jhost.lowering.streams.plan import StreamPlan, plan_program


@dataclasses.dataclass(frozen=True, slots=True)
class _LoopGroups:
    """Which nodes of a program share loops, for what its streams were `made`.

    They are `built` by which of them are not to be made, as marks say.
    """

    program: Program
    graph: Sequence[Node]
    made: Mapping[str, Pipelining]
    extents: Mapping[str, int]
    groups: Sequence[Group]
    built: dict[tuple[bool, ...], Built] = dataclasses.field(
        default_factory=dict[tuple[bool, ...], Built]
    )

    def are_of(
        self,
        program: Program,
        made: Mapping[str, Pipelining],
        extents: Mapping[str, int],
    ) -> bool:
        """Whether they are those of a program with such streams."""
        alike = is_alike(self.program, program)
        return alike and self.made == made and self.extents == extents


@dataclasses.dataclass(frozen=True, slots=True)
class LowerStreams(EachProgram):
    """Straight-line statements with stream marks -> statements and loops.

    `streams` is the number of streams that a loop's iterations take turns on.  What
    cannot be is refused, or, in a program that is not `strict`, left unpipelined.
    """

    name: ClassVar[str] = "lower_streams"

    streams: int = 4
    strict: bool = True
    known: Shared[_LoopGroups] = dataclasses.field(
        default_factory=Shared[_LoopGroups], compare=False, repr=False
    )

    def change(self, program: Program) -> Program:
        asked = stream_choices(program)
        marks = [mark for mark in asked if mark.pipeline != "off"]
        left_out = [mark for mark in asked if mark.pipeline == "off"]
        if self.strict:
            check_no_mark_is_lost(program)
        # Without marks nothing can have a stream: the program is as it was.
        if not program.marks:
            return program
        graph, plan = plan_program(program)
        mesh = dict(program.mesh.shape)
        if unmet := [*wishes_that_fail(graph, plan, mesh)]:
            return self.change(without_wishes(program, unmet))
        if self.strict:
            check_marks(program, graph, plan, marks)
        made = {stream: self.choose(stream, graph, plan, mesh) for stream in plan.marks}
        pipelined = {number for choice in made.values() for number in choice.parts}
        again = with_gathers_again(program, graph, pipelined)
        # The graph has new nodes, so the streams are planned anew.
        if again is not program:
            return self.change(again)
        built = self.built(program, graph, made, plan.extents)
        reports = [
            stream_report(stream, mark, plan.extents[stream], made[stream], graph)
            for stream, mark in plan.marks.items()
            if not mark.unpipelined
        ]
        reports += plain_reports(marks, graph, plan)
        reports += [
            stream_report(f"s{number}", mark, 1, off("off, as asked"))
            for number, mark in enumerate(left_out, start=len(marks))
        ]
        notes = (*unmet_notes(asked), *stop_notes(graph, plan), *built.notes)
        return dataclasses.replace(
            program,
            body=built.body,
            results=built.results,
            marks=(),
            remarks=(*program.remarks, *reports, *notes),
        )

    def built(
        self,
        program: Program,
        graph: Sequence[Node],
        made: Mapping[str, Pipelining],
        extents: Mapping[str, int],
    ) -> Built:
        """The loops of a program, which may be those of a candidate before."""
        made = {s: _as_built(each, graph) for s, each in made.items()}
        known = self.known.of(program)
        loops = next((e for e in known if e.are_of(program, made, extents)), None)
        if loops is None:
            builder = LoopBuilder(program, graph, made, extents, self.streams)
            groups = merge_groups(
                graph, builder.order(), builder.should_merge, builder.kind_of
            )
            loops = _LoopGroups(program, graph, made, extents, groups)
            known.append(loops)
        builder = LoopBuilder(program, loops.graph, loops.made, extents, self.streams)
        unpipelined = tuple(map(builder.is_unpipelined, loops.groups))
        if unpipelined not in loops.built:
            loops.built[unpipelined] = builder.built(loops.groups)
        return loops.built[unpipelined]

    def choose(
        self,
        stream: str,
        graph: Sequence[Node],
        plan: StreamPlan,
        mesh: Mapping[str, int],
    ) -> Pipelining:
        mark, extent = plan.marks[stream], plan.extents[stream]
        try:
            return choose_pipeline(mark, extent, graph, plan.parts_of(stream), mesh)
        except (errors.PipelineError, errors.ChunksError) as refusal:
            if self.strict:
                raise
            return off(errors.first_line(refusal))


def _as_built(choice: Pipelining, graph: Sequence[Node]) -> Pipelining:
    """What loops go by of a choice: the order of sequences only where rows see some."""
    stmts = (graph[number].stmt for number in choice.parts)
    computes = (stmt for stmt in stmts if isinstance(stmt, Compute))
    windows = any(each.rule.window for stmt in computes for each in stmt.unit.eqns)
    zigzag = choice.zigzag or not windows
    return dataclasses.replace(choice, reason="", zigzag=zigzag)


# --- What was wished for ------------------------------------------------------ #


def wishes_that_fail(
    graph: Sequence[Node], plan: StreamPlan, mesh: Mapping[str, int]
) -> Iterator[UnmetWish]:
    """What a function's settings say of streams that cannot have it, one of each."""
    wishing = {stream: mark for stream, mark in plan.marks.items() if mark.wished}
    idle = dict(_without_work(graph, plan)) if wishing else {}
    for stream, mark in wishing.items():
        wish, reason = None, idle.get(stream, "")
        if reason:
            wish = _wish_among(mark, "chunks")
        else:
            parts = plan.parts_of(stream)
            try:
                choose_pipeline(mark, plan.extents[stream], graph, parts, mesh)
            except errors.PipelineError as refusal:
                wish, reason = _wish_among(mark, "pipeline"), _in_short(refusal)
            except errors.ChunksError as refusal:
                wish = _wish_among(mark, "chunks", "pipeline")
                reason = _in_short(refusal)
        if wish is not None:
            yield UnmetWish(numbers=mark.numbers, wish=wish, reason=reason)


def _wish_among(mark: StreamChoice, *wishes: Wish) -> Wish | None:
    """The first that settings say of the mark, and could be left open."""
    return next((wish for wish in wishes if wish in mark.wished), None)


def _in_short(refusal: errors.JhostError) -> str:
    """What is said of the mark, or else what is wrong, without advice."""
    _, _, said = refusal.offenders[0].partition(": ")
    return said or errors.first_line(refusal).partition(". ")[0].rstrip(".")


def without_wishes(program: Program, unmet: Sequence[UnmetWish]) -> Program:
    """`program` with what is unmet left open, and remarks that say so."""
    marks = list(program.marks)
    for each in unmet:
        for place, mark in enumerate(marks):
            if isinstance(mark, StreamChoice) and set(mark.numbers) & {*each.numbers}:
                marks[place] = without_wish(mark, each.wish, each.reason)
    remarks = (*program.remarks, *unmet)
    return dataclasses.replace(program, marks=tuple(marks), remarks=remarks)


def unmet_notes(marks: Sequence[StreamChoice]) -> Iterator[Note]:
    """Which wishes marks could not follow, in the user's names and lines."""
    for mark in marks:
        for said in mark.unmet:
            form = f"stream on axis {mark.dim} of {{}}: {said}; it is left to jhost"
            yield Note(form=form, values=(mark.buffer,), where=mark.where)


# --- What was asked for ------------------------------------------------------- #


def check_marks(
    program: Program,
    graph: Sequence[Node],
    plan: StreamPlan,
    marks: Sequence[StreamChoice],
) -> None:
    """Refuse streams on dims that nothing can work on in chunks.

    That is, a value's own computation cannot, or chunks were asked for and none of the
    computations around the value can.
    """
    mesh = dict(program.mesh.shape)
    offenders = [
        *_made_whole(graph, marks, mesh),
        *(
            f"axis={plan.marks[stream].dim} at {plan.marks[stream].where}: {reason}"
            for stream, reason in _without_work(graph, plan)
        ),
    ]
    if offenders:
        raise errors.StreamDimError(
            f"{program.name} asks for streams on dims that cannot be worked on in "
            "chunks. Stream another dim, or mark a value before or after.",
            list(dict.fromkeys(offenders)),
        )


def check_no_mark_is_lost(program: Program) -> None:
    """Refuse marks in what stays one equation, which nobody would take up."""
    computes = [stmt for stmt in program.body if isinstance(stmt, Compute)]
    eqns = [each.eqn for stmt in computes for each in stmt.unit.eqns]
    offenders = [
        f"axis={mark.params['axis']} at {source_line(mark)}: in the body of a "
        f"{eqn.primitive.name}, at {source_line(eqn)}"
        for eqn in eqns
        for mark in _marks_in(eqn)
    ]
    if offenders:
        raise errors.StreamDimError(
            f"{program.name} asks for streams inside of what is no loop or branch of "
            "JAX's, and runs as it is. Leave the marks there out.",
            list(dict.fromkeys(offenders)),
        )


def _marks_in(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    for body in jaxprs_in_params(eqn.params):
        for inner in body.eqns:
            if inner.primitive.name == "stream":
                yield inner
            yield from _marks_in(inner)


def _made_whole(
    graph: Sequence[Node], marks: Sequence[StreamChoice], mesh: Mapping[str, int]
) -> Iterator[str]:
    makers = {buffer.name: node for node in graph for buffer in node.writes}
    for mark in marks:
        name, node = mark.buffer, makers.get(mark.buffer)
        while node is not None and not _is_own(node.stmt):
            name = node.reads[0].name
            node = makers.get(name)
        if node is None:
            continue
        position = [buffer.name for buffer in node.writes].index(name)
        access = Access(mark.dim, Fraction(1))
        part = participation_of(node, "", True, position, access, mesh)
        if isinstance(part, str):
            yield f"axis={mark.dim} at {mark.where}: {part}"


def _is_own(stmt: Stmt) -> bool:
    """Whether a value's own computation is this one: copies and padding hand it on."""
    if isinstance(stmt, CONTROL_FLOW):
        return True
    return isinstance(stmt, Compute) and not stmt.unit.pads


def _without_work(graph: Sequence[Node], plan: StreamPlan) -> Iterator[tuple[str, str]]:
    """The streams with chunks around which nothing works in any, and why."""
    for stream, mark in plan.marks.items():
        asked = mark.chunks not in (None, 1)
        if not asked or plan.parts_of(stream) or plan.extents[stream] > 1:
            continue
        for number, reason in plan.declined.items():
            reads_writes = (*graph[number].reads, *graph[number].writes)
            if mark.buffer in {buffer.name for buffer in reads_writes}:
                yield stream, reason


# --- What to say about it ----------------------------------------------------- #


def stream_report(
    stream: str,
    mark: StreamChoice,
    extent: int,
    made: Pipelining,
    graph: Sequence[Node] = (),
) -> StreamReport:
    """What became of one stream, whose parts are nodes of `graph`."""
    return StreamReport(
        stream=stream,
        axis=mark.dim,
        pipeline=made.pipeline,
        chunks=made.chunks,
        extent=extent,
        reason=made.reason,
        lines=mark.lines,
        predicted=mark.predicted,
        measured=mark.measured,
        moves=not made.parts or any(moves(graph[number].stmt) for number in made.parts),
    )


def moves(stmt: Stmt) -> bool:
    """Whether anything goes from device to device in a statement."""
    if isinstance(stmt, Compute):
        return any(any(written_in(each.eqn)) for each in stmt.unit.eqns)
    return isinstance(stmt, Communicate)


def plain_reports(
    marks: Sequence[StreamChoice], graph: Sequence[Node], plan: StreamPlan
) -> Iterator[StreamReport]:
    """Reports on marks that are better not pipelined, one for each line."""
    streams = {
        buffer.name: part.stream
        for number, part in plan.parts.items()
        for buffer in graph[number].writes
    }
    said: set[tuple[tuple[str, ...], str]] = set()
    for number, mark in enumerate(marks):
        if mark.unpipelined and (mark.lines, mark.reason) not in said:
            said.add((mark.lines, mark.reason))
            stream = streams.get(mark.buffer, f"s{number}")
            extent = plan.extents.get(stream, 1)
            yield stream_report(f"s{number}", mark, extent, off(mark.reason))


def stop_notes(graph: Sequence[Node], plan: StreamPlan) -> Iterator[Note]:
    """Where streams stopped, and why."""
    for number, reason in plan.declined.items():
        if number not in plan.parts:
            values = tuple(buffer.name for buffer in graph[number].writes)
            yield Note(form=f"streams stop before {{}}: {reason}", values=values)
