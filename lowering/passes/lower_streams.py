"""Turn streams into loops: each statement that joins one works on a chunk at a time.

Statements of one stream share a loop wherever the dependency graph lets them; a
statement outside the stream on a path between two of them splits the loop in two, and
so does a value that one makes in chunks and the other needs whole (design section 5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar, Literal

from jhost import errors
from jhost.lowering.graph import Node, merge_groups, nodes
from jhost.lowering.ir import Compute, Program, Remark, SerialMark, StreamMark
from jhost.lowering.stream_loops import LoopBuilder
from jhost.lowering.stream_parts import Access, part_of
from jhost.lowering.stream_plan import StreamPlan, plan_streams

DEFAULT_CHUNKS = 4
"""The chunk count of a pipeline that was asked for without one."""


@dataclasses.dataclass(frozen=True, slots=True)
class LowerStreams:
    """Straight-line statements with stream marks -> statements and loops.

    `chunks` and `pipeline` hold for marks that do not say; `streams` is the number of
    streams that a loop's iterations take turns on.
    """

    name: ClassVar[str] = "lower_streams"

    chunks: int | Literal["auto"] = "auto"
    pipeline: str = "auto"
    streams: int = 4

    def apply(self, program: Program) -> Program:
        marks = [self.asked(m) for m in program.marks if isinstance(m, StreamMark)]
        serial = [m for m in program.marks if isinstance(m, SerialMark)]
        program = dataclasses.replace(program, marks=())
        if not marks:
            return program
        graph, mesh = nodes(program.body), dict(program.mesh.shape)
        plan = plan_streams(graph, marks, serial, mesh)
        check_marks(program, graph, plan, marks)
        choices = {s: choose_chunks(m, plan.extents[s]) for s, m in plan.marks.items()}
        counts = {stream: count for stream, (count, _) in choices.items()}
        builder = LoopBuilder(program, graph, plan, counts, self.streams)
        groups = merge_groups(graph, builder.should_share_loop)
        body = tuple(stmt for group in groups for stmt in builder.lower(group))
        remarks = [
            stream_remark(stream, mark, plan.extents[stream], *choices[stream])
            for stream, mark in plan.marks.items()
        ]
        return builder.finish(body, (*remarks, *stop_remarks(graph, plan)))

    def asked(self, mark: StreamMark) -> StreamMark:
        """`mark` with the function's own settings where it has none; None is "auto"."""
        chunks = self.chunks if mark.chunks is None else mark.chunks
        pipeline = self.pipeline if mark.pipeline is None else mark.pipeline
        return dataclasses.replace(
            mark,
            chunks=None if chunks == "auto" else chunks,
            pipeline=None if pipeline == "auto" else pipeline,
        )


# --- What was asked for ------------------------------------------------------- #


def check_marks(
    program: Program,
    graph: Sequence[Node],
    plan: StreamPlan,
    marks: Sequence[StreamMark],
) -> None:
    """Refuse streams on dims that their value's own computation needs whole."""
    makers = {buffer.name: node for node in graph for buffer in node.writes}
    mesh = dict(program.mesh.shape)
    offenders: list[str] = []
    for mark in marks:
        name, node = mark.buffer, makers.get(mark.buffer)
        while node is not None and not isinstance(node.stmt, Compute):
            name = node.reads[0].name
            node = makers.get(name)
        if node is None or mark.pipeline == "off":
            continue
        position = [buffer.name for buffer in node.writes].index(name)
        access = Access(mark.dim, Fraction(1))
        part = part_of(node, "", True, position, access, mesh)
        if isinstance(part, str):
            offenders.append(f"axis={mark.dim} at {mark.where}: {part}")
    if offenders:
        raise errors.StreamDimError(
            f"{program.name} asks for streams on dims that cannot be worked on in "
            "chunks. Stream another dim, or mark a value before or after.",
            offenders,
        )


def choose_chunks(mark: StreamMark, extent: int) -> tuple[int, str]:
    """How many chunks a stream gets, and why; one chunk is no loop."""
    if mark.pipeline == "off":
        return 1, "off, as asked"
    if mark.pipeline == "p2p":
        raise errors.PipelineError(
            "p2p pipelines are not part of this version of jhost. "
            'Ask for pipeline="collective".',
            [f"axis={mark.dim} at {mark.where}"],
        )
    if mark.chunks is not None:
        assert isinstance(mark.chunks, int)
        if mark.chunks > extent:
            raise errors.ChunksError(
                f"{mark.chunks} chunks were asked for where a device has {extent} "
                "steps to cut. Ask for fewer chunks, or stream another dim.",
                [f"axis={mark.dim} at {mark.where}"],
            )
        return _cut(extent, mark.chunks, f"{mark.chunks} chunks, as asked")
    if mark.pipeline == "collective":
        count = min(DEFAULT_CHUNKS, extent)
        reason = f"{count} chunks, the default of a collective pipeline"
        return _cut(extent, count, reason)
    return 1, (
        "auto: collectives do not hide behind matmuls that fill the device, and "
        "chunks alone only add launches; ask with chunks= or pipeline="
    )


def _cut(extent: int, count: int, reason: str) -> tuple[int, str]:
    """The chunks there are when all but the last have the same size."""
    steps = -(-extent // count)
    chunks = -(-extent // steps)
    if chunks < count:
        reason = f"{chunks} chunks of {steps}: {extent} steps make no {count} of one size"
    return chunks, reason


# --- What to say about it ----------------------------------------------------- #


def stream_remark(
    stream: str, mark: StreamMark, extent: int, count: int, reason: str
) -> Remark:
    """The choice for one stream."""
    pipelined = count > 1
    pipeline = (mark.pipeline or "collective") if pipelined else "off"
    return Remark(
        kind="stream",
        text=f"{stream} on axis {mark.dim} of {mark.buffer}: "
        + (
            f"{pipeline} pipeline, {reason}"
            if pipelined
            else f"not pipelined: {reason}"
        ),
        where=mark.where,
        facts=(
            ("stream", stream),
            ("axis", mark.dim),
            ("pipeline", pipeline),
            ("chunks", count),
            ("extent", extent),
            ("reason", reason),
        ),
    )


def stop_remarks(graph: Sequence[Node], plan: StreamPlan) -> list[Remark]:
    """Where streams stopped, and why."""
    remarks: list[Remark] = []
    for number, reason in plan.declined.items():
        if number not in plan.parts:
            values = ", ".join(buffer.name for buffer in graph[number].writes)
            text = f"streams stop before {values}: {reason}"
            remarks.append(Remark(kind="stop", text=text))
    return remarks
