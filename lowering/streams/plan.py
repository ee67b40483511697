"""Which statements work in chunks, on which dims, and in how many chunks.

Streams spread from the marked values along factors, backward and forward, through
computations and communications.  They stop at a dim that must be whole, at another
stream, and at `jhost.serial`.  Chunk s of a gathered dim is the s-th slice of every
device's shard, so the plan sees that dim as `groups` equal stretches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jhost.lowering.ir.derived import derived
from jhost.lowering.ir.graph import Graph, Node, graph_of
from jhost.lowering.ir.marks import SerialMark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import (
    asked_of_streams,
    merge_choices,
    stream_choices,
)
from jhost.lowering.streams.participation import Participation
from jhost.lowering.streams.propagation import Propagation
from jhost.lowering.streams.stream_plan import StreamPlan

_EARLIER = "the program before, planned alike"


def plan_program(program: Program) -> tuple[Graph, StreamPlan]:
    """The nodes of a straight-line program, and the streams that its marks make there.

    A mark that is off makes no stream.  The plan is made once for a program, and for
    candidates that ask the same of its streams.
    """
    graph, plan = _planned(program)
    marks = _by_stream(_taken(program))
    for kept, taken in plan.merged:
        both = merge_choices(marks[kept], marks.pop(taken))
        assert both is not None, "they went together when the plan was made"
        marks[kept] = both
    return graph, dataclasses.replace(plan, marks=marks)


def _taken(program: Program) -> list[StreamChoice]:
    return [mark for mark in stream_choices(program) if mark.spec.pipeline != "off"]


def _by_stream(marks: Sequence[StreamChoice]) -> dict[str, StreamChoice]:
    return {f"s{number}": mark for number, mark in enumerate(marks)}


def take_known(program: Program, others: Sequence[Program]) -> bool:
    """Take over known facts of another program that asks the same of its streams.

    Returns whether there is one.  Such programs may differ in other fields of marks.
    If there is none, the plan of another is taken over if it holds for these marks.
    The programs have the same statements, one for one; the bodies in them may differ.
    """
    asked = asked_of_streams(program)
    for other in others:
        # Known facts may hold statements, so they fit no other body.
        if other.body is program.body and asked_of_streams(other) == asked:
            program.derived.update(other.derived)
            return True
    marks = _by_stream(_taken(program))
    for other in others:
        made = other.derived.get(_plan)
        if made and _seeds(program) == _seeds(other) and made[1].holds_for(marks):
            same = other.body is program.body
            program.derived[_plan] = made if same else (graph_of(program), made[1])
            break
    return False


def _seeds(program: Program) -> list[tuple[str, int]]:
    return [(mark.buffer, mark.dim) for mark in _taken(program)]


def with_plan_of(earlier: Program, program: Program) -> Program:
    """`program`, noting that it has most statements and the marks of an `earlier` one.

    Its plan then starts from the earlier plan.
    """
    if program is not earlier:
        program.derived[_EARLIER] = earlier
    return program


def takes_plan(program: Program) -> bool:
    """Whether it has an earlier program's plan."""
    return _EARLIER in program.derived


def _plan(program: Program) -> tuple[Graph, StreamPlan]:
    serial = [mark for mark in program.marks if isinstance(mark, SerialMark)]
    graph = graph_of(program)
    mesh = dict(program.mesh.shape)
    made = _made_earlier(program)
    if made is not None:
        return graph, _made_again(made, graph, _taken(program), serial, mesh)
    return graph, plan_streams(graph, _taken(program), serial, mesh)


_planned = derived(_plan)


def _made_earlier(program: Program) -> tuple[Graph, StreamPlan] | None:
    """The plan of the latest earlier program that has one."""
    earlier: Program | None = program.derived.get(_EARLIER)
    while earlier is not None:
        if (made := earlier.derived.get(_plan)) is not None:
            return made
        earlier = earlier.derived.get(_EARLIER)
    return None


def plan_streams(
    graph: Graph,
    marks: Sequence[StreamChoice],
    serial: Sequence[SerialMark],
    mesh: Mapping[str, int],
) -> StreamPlan:
    """Propagate the streams of `marks` through `graph` to a fixed point."""
    return _spread(Propagation(graph, _reasons(serial), mesh), _by_stream(marks))


def _made_again(
    made: tuple[Graph, StreamPlan],
    graph: Graph,
    marks: Sequence[StreamChoice],
    serial: Sequence[SerialMark],
    mesh: Mapping[str, int],
) -> StreamPlan:
    """A plan for a graph that differs a little from the one `made` has a plan for."""
    before, plan = made
    propagation = Propagation(
        graph, _reasons(serial), mesh, _known(plan, before, graph)
    )
    streams = _by_stream(marks)
    propagation.take_merged(streams, plan)
    return _spread(propagation, streams)


def _known(
    plan: StreamPlan, before: Sequence[Node], graph: Sequence[Node]
) -> dict[int, Participation | str]:
    """What an earlier plan says of the nodes that were in its graph too."""
    every = {**plan.participations, **plan.uncut}
    # By the value that a node makes: a pass may have replaced its statement.
    parts = {before[n].writes[0].name: part for n, part in every.items()}
    # By the statement itself: a new statement may be cut where the old one was not.
    reasons = {id(before[n].stmt): reason for n, reason in plan.declined.items()}
    said = (
        (parts.get(node.writes[0].name) if node.writes else None)
        or reasons.get(id(node.stmt))
        for node in graph
    )
    return {number: each for number, each in enumerate(said) if each is not None}


def _spread(
    propagation: Propagation, streams: Mapping[str, StreamChoice]
) -> StreamPlan:
    for stream, mark in streams.items():
        propagation.seed(stream, mark)
    propagation.run()
    return propagation.finish(streams)


def _reasons(serial: Sequence[SerialMark]) -> dict[str, str]:
    return {mark.buffer: mark.reason for mark in serial}
