"""The streams of a program with what each gets, before any loop is made.

Marks are checked here, and the remarks on them are made here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from jax.extend.core import JaxprEqn, jaxprs_in_params

from jhost import errors
from jhost._jax import source_line
from jhost.lowering.ir.bodies import CONTROL_FLOW
from jhost.lowering.ir.graph import Graph, Node
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note, Remark, StreamReport
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.statements import Communicate, Compute, Stmt
from jhost.lowering.loops.legality import choose_pipeline
from jhost.lowering.loops.pipelining import Pipelining, off
from jhost.lowering.loops.windows_at_hand import out_of_reach
from jhost.lowering.loops.wishes import (
    streams_without_work,
    unmet_notes,
    wishes_that_fail,
    without_wishes,
)
from jhost.lowering.rules.collectives import written_in
from jhost.lowering.streams.halos import halos_of, reads_others
from jhost.lowering.streams.participation import Access, participation_of
from jhost.lowering.streams.plan import plan_program
from jhost.lowering.streams.stream_plan import StreamPlan


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStreams:
    """The streams of a program, the nodes that they reach, and what each gets.

    `program` no longer has wishes that cannot be met.
    """

    program: Program
    graph: Graph
    plan: StreamPlan
    made: Mapping[str, Pipelining]

    @property
    def pipelined(self) -> set[int]:
        """The nodes that work in chunks, by number."""
        return {number for each in self.made.values() for number in each.participations}

    def remarks(self) -> list[Remark]:
        """The remarks: what each stream got, and why streams stop where they do."""
        asked = stream_choices(self.program)
        marks = _that_are_on(asked)
        left_out = [mark for mark in asked if mark.spec.pipeline == "off"]
        streams, extents = self.plan.marks, self.plan.extents
        reports = [
            stream_report(stream, mark, extents[stream], self.made[stream], self.graph)
            for stream, mark in streams.items()
            if not mark.unpipelined
        ]
        reports += plain_reports(marks, self.graph, self.plan)
        reports += [
            stream_report(f"s{number}", mark, 1, off("off, as asked"))
            for number, mark in enumerate(left_out, start=len(marks))
        ]
        stops = stop_notes(self.graph, self.plan)
        return [*reports, *unmet_notes(asked), *stops, *self.left_windows()]

    def left_windows(self) -> Iterator[Note]:
        """Notes on what reads in windows, and no chunk of a pipeline has these."""
        mesh = dict(self.program.mesh.shape)
        for stream, made in self.made.items():
            if not made.participations:
                continue
            parts, extent = (
                self.plan.participations_of(stream),
                self.plan.extents[stream],
            )
            reasons = out_of_reach(made, self.graph, parts, extent, mesh)
            for number, part in parts.items():
                stmt = self.graph[number].stmt
                if number not in made.participations and halos_of(stmt, part.factor):
                    reason = reasons.get(number, reads_others(stmt))
                    yield stop_note(self.graph[number], reason)


def planned(program: Program, strict: bool) -> PlannedStreams:
    """What the streams of a straight-line program get.

    A strict program refuses a marked stream that cannot get a loop; any other leaves it
    unpipelined.  A stream that jhost found is never refused: the user did not ask for
    it, and layouts may change after it was found.
    """
    graph, plan = plan_program(program)
    mesh = dict(program.mesh.shape)
    if unmet := [*wishes_that_fail(graph, plan, mesh)]:
        # Without one wish another may be met, or fail, so all is planned again.
        return planned(without_wishes(program, unmet), strict)
    if strict:
        check_marks(program, graph, plan)
    made = {stream: _choose(stream, graph, plan, mesh, strict) for stream in plan.marks}
    return PlannedStreams(program, graph, plan, made)


def _that_are_on(marks: Sequence[StreamChoice]) -> list[StreamChoice]:
    return [mark for mark in marks if mark.spec.pipeline != "off"]


def _choose(
    stream: str,
    graph: Graph,
    plan: StreamPlan,
    mesh: Mapping[str, int],
    strict: bool,
) -> Pipelining:
    mark, extent = plan.marks[stream], plan.extents[stream]
    try:
        return choose_pipeline(
            mark, extent, graph, plan.participations_of(stream), mesh
        )
    except (errors.PipelineError, errors.ChunksError) as refusal:
        if strict and not mark.found:
            raise
        return off(errors.first_line(refusal))


# --- What was asked for ------------------------------------------------------- #


def check_marks(
    program: Program,
    graph: Graph,
    plan: StreamPlan,
) -> None:
    """Refuse marked streams on dims that nothing can work on in chunks.

    Either the value's own computation cannot, or the mark asks for chunks and no
    computation around the value can.
    """
    mesh = dict(program.mesh.shape)
    marks = _that_are_on(stream_choices(program))
    offenders = [
        *_made_whole(graph, [mark for mark in marks if not mark.found], mesh),
        *(
            f"axis={plan.marks[stream].dim} at {plan.marks[stream].where}: {reason}"
            for stream, reason in streams_without_work(graph, plan)
            if not plan.marks[stream].found
        ),
    ]
    if offenders:
        raise errors.StreamDimError(
            f"{program.name} asks for streams on dims that cannot be worked on in "
            "chunks. Stream another dim, or mark a value before or after.",
            list(dict.fromkeys(offenders)),
        )


def check_no_mark_is_lost(program: Program) -> None:
    """Refuse marks in the body of an equation that stays one: no pass sees them."""
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
            f"{program.name} has marks in bodies that jhost does not change. It only "
            f"changes the bodies of JAX's loops and branches. Remove these marks.",
            list(dict.fromkeys(offenders)),
        )


def _marks_in(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    for body in jaxprs_in_params(eqn.params):
        for inner in body.eqns:
            if inner.primitive.name == "stream":
                yield inner
            yield from _marks_in(inner)


def _made_whole(
    graph: Graph, marks: Sequence[StreamChoice], mesh: Mapping[str, int]
) -> Iterator[str]:
    for mark in marks:
        name, number = mark.buffer, graph.makers.get(mark.buffer)
        while number is not None and not _is_own(graph[number].stmt):
            name = graph[number].reads[0].name
            number = graph.makers.get(name)
        if number is None:
            continue
        node = graph[number]
        position = [buffer.name for buffer in node.writes].index(name)
        access = Access(mark.dim, Fraction(1))
        part = participation_of(node, "", True, position, access, mesh)
        if isinstance(part, str):
            yield f"axis={mark.dim} at {mark.where}: {part}"


def _is_own(stmt: Stmt) -> bool:
    """Whether a statement computes a value; copies and padding only pass it on."""
    if isinstance(stmt, CONTROL_FLOW):
        return True
    return isinstance(stmt, Compute) and not stmt.unit.pads


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
        fewer=made.fewer,
        found=mark.found,
        moves=not made.participations
        or any(moves(graph[number].stmt) for number in made.participations),
    )


def moves(stmt: Stmt) -> bool:
    """Whether a statement moves anything from device to device."""
    if isinstance(stmt, Compute):
        return any(any(written_in(each.eqn)) for each in stmt.unit.eqns)
    return isinstance(stmt, Communicate)


def plain_reports(
    marks: Sequence[StreamChoice], graph: Graph, plan: StreamPlan
) -> Iterator[StreamReport]:
    """Reports on marks that are better without a pipeline, one for each line."""
    streams = {
        buffer.name: part.stream
        for number, part in plan.participations.items()
        for buffer in graph[number].writes
    }
    said: set[tuple[tuple[str, ...], str]] = set()
    for number, mark in enumerate(marks):
        if mark.found:
            continue  # jhost found it, and the user never asked
        if mark.unpipelined and (mark.lines, mark.reason) not in said:
            said.add((mark.lines, mark.reason))
            stream = streams.get(mark.buffer, f"s{number}")
            extent = plan.extents.get(stream, 1)
            yield stream_report(f"s{number}", mark, extent, off(mark.reason))


def stop_notes(graph: Graph, plan: StreamPlan) -> Iterator[Note]:
    """Where streams stopped, and why."""
    for number, reason in plan.declined.items():
        if number not in plan.participations:
            yield stop_note(graph[number], reason)


def stop_note(node: Node, reason: str) -> Note:
    """A note that streams stop before a node."""
    values = tuple(buffer.name for buffer in node.writes)
    return Note(form=f"streams stop before {{}}: {reason}", values=values)
