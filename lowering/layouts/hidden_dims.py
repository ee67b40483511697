"""The dims that the user's streams will cut, planned before layouts are decided.

The plan says which transfers a loop could hide.  Only a pipeline that the user named
counts, because any other depends on the layouts.  `Program.streamed` passes the dims to
later passes.  Streams are planned again for the loops, once communications are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jhost.lowering.ir.derived import derived
from jhost.lowering.ir.graph import Node
from jhost.lowering.ir.marks import ShardMark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import stream_choices
from jhost.lowering.ir.statements import Communicate, PipelineKind, Reshard
from jhost.lowering.layouts.reshard import ReshardStep
from jhost.lowering.streams.plan import plan_program
from jhost.lowering.streams.stream_plan import StreamPlan

_HIDING = ("collective", "p2p")


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedDim:
    """A dim that a pipeline works on in chunks.

    Attributes:
        dim: the dim.
        pipeline: the kind of pipeline.
        axes: the mesh axes over which the user sharded it, anywhere in the stream.
        along: the one of several axes along which a p2p pipeline moves chunks.
        where: the user's line, for messages only.
    """

    dim: int
    pipeline: PipelineKind
    axes: frozenset[str]
    along: str | None = None
    where: str = dataclasses.field(default="", compare=False)

    def hides(self, step: ReshardStep) -> bool:
        """Whether the loop can hide `step`, because it computes other chunks meanwhile.

        A collective pipeline hides any communication of its chunks.  A p2p pipeline
        hides those that move shards of the dim: gathers, scatters, all-to-alls, and
        all-reduces, which `SplitAllReduces` turns into the first two.  Its loop may
        also contain collectives over other axes.  They do not count as hidden, as each
        chunk waits for its own.  If they counted, weights sharded over fsdp would stay
        sharded under marks over tp, and each chunk of their products would be summed.
        """
        if self.pipeline == "collective":
            return True
        # `SplitAllReduces` makes permutes of it, on whatever dim the stream is.
        if step.kind == "AllReduce":
            return self.moves(step)
        # Each chunk is a shard of the streamed dim, or a piece of one.
        return self.dim in (step.dim, step.source_dim) and self.moves(step)

    def moves(self, step: ReshardStep) -> bool:
        """Whether the permutes of a p2p pipeline can take the place of `step`."""
        return self.along is None or step.axes == (self.along,)


def one_way_each(
    streamed: Mapping[str, StreamedDim], mesh: Sequence[str]
) -> list[Mapping[str, StreamedDim]]:
    """The dims with each axis as the one of p2p pipelines, the innermost axis first.

    A dim may be sharded over several axes of the `mesh`.  Chunks can move along any one
    of them, and transfers along the others are then not hidden.
    """
    several = {name: d for name, d in streamed.items() if len(d.axes) > 1}
    several = {name: d for name, d in several.items() if d.pipeline == "p2p"}
    axes = frozenset[str]().union(*(dim.axes for dim in several.values()))
    return [
        {
            name: dataclasses.replace(dim, along=axis)
            if name in several and axis in dim.axes
            else dim
            for name, dim in streamed.items()
        }
        for axis in reversed(mesh)
        if axis in axes
    ] or [streamed]


@derived
def streamed_dims(program: Program) -> Mapping[str, StreamedDim]:
    """The dims that pipelines, chosen or asked for, will cut; by value."""
    asked = stream_choices(program)
    # An open mark cuts nothing yet: with `auto`, each candidate is a program with a
    # choice of its own.
    if not any(map(_hides, asked)):
        return {}
    graph, plan = plan_program(program)
    streamed: dict[str, StreamedDim] = {}
    for stream, mark in plan.marks.items():
        if _hides(mark):
            assert mark.spec.pipeline is not None
            dims = _dims_of_values(graph, plan, stream)
            axes = _given_axes(program, dims)
            for name, dim in dims.items():
                found = StreamedDim(dim, mark.spec.pipeline, axes, where=mark.where)
                streamed.setdefault(name, found)
    return streamed


def _hides(mark: StreamChoice) -> bool:
    """Whether a mark asks for a loop: one chunk is none."""
    return mark.spec.pipeline in _HIDING and mark.spec.chunks != 1


def streamed_where_moved(
    program: Program, stmt: Reshard | Communicate
) -> StreamedDim | None:
    """The dim that a pipeline will cut of the value that a statement moves."""
    # Dims were planned before values had layouts, under the name of one of the two.
    streamed = program.streamed
    return streamed.get(stmt.out.name) or streamed.get(stmt.source.name)


def reached_by_streams(program: Program) -> Mapping[str, tuple[str, StreamChoice]]:
    """The stream that reaches each value, and the mark that asks for it there."""
    graph, plan = plan_program(program)
    return {
        name: (stream, dataclasses.replace(mark, buffer=name, dim=dim))
        for stream, mark in plan.marks.items()
        for name, dim in _dims_of_values(graph, plan, stream).items()
    }


def _dims_of_values(
    graph: Sequence[Node], plan: StreamPlan, stream: str
) -> dict[str, int]:
    return {
        buffers[position].name: access.dim
        for number, part in plan.participations_of(stream).items()
        for buffers, accesses in (
            (graph[number].reads, part.reads),
            (graph[number].writes, part.writes),
        )
        for position, access in accesses.items()
    }


def _given_axes(program: Program, dims: Mapping[str, int]) -> frozenset[str]:
    return frozenset(
        axis
        for mark in program.marks
        if isinstance(mark, ShardMark) and mark.buffer in dims
        for axis in mark.spec[dims[mark.buffer]] or ()
    )
