"""Which dims the user's streams will cut, planned before layouts are decided.

The plan says what a loop could take in.  Only a pipeline that the user named counts:
whether another one is made depends on the layouts.  `Program.streamed` hands the dims
on.  Streams are planned again for the loops, once the communications are there.
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
from jhost.lowering.streams.propagation import StreamPlan

_HIDING = ("collective", "p2p")


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedDim:
    """A dim that a pipeline works on in chunks.

    `axes` are the mesh axes over which the user sharded it, here or elsewhere in the
    stream; `along` is that which a p2p pipeline moves chunks along, where it is one of
    several.  `where` the user asked for it is only said.
    """

    dim: int
    pipeline: PipelineKind
    axes: frozenset[str]
    along: str | None = None
    where: str = dataclasses.field(default="", compare=False)

    def hides(self, step: ReshardStep) -> bool:
        """Whether the loop can take in `step`, so that chunks are computed meanwhile.

        A collective pipeline takes in any communication of its chunks.  A p2p pipeline
        takes in those that move shards of the dim: gathers, scatters, all-to-alls, and
        all-reduces, which `SplitAllReduces` turns into the first two.  It takes in
        collectives over other axes as well, but these run alone: each would be waited
        for by its own chunk.  With marks over tp, weights sharded over fsdp would stay
        so, and chunks of their products be summed.
        """
        if self.pipeline == "collective":
            return True
        # `SplitAllReduces` makes permutes of it, on whatever dim the stream is.
        if step.kind == "AllReduce":
            return self.moves(step)
        # Shards of the dim that is cut: each chunk is one, or a piece of one.
        return self.dim in (step.dim, step.source_dim) and self.moves(step)

    def moves(self, step: ReshardStep) -> bool:
        """Whether the permutes of a p2p pipeline can take the place of `step`."""
        return self.along is None or step.axes == (self.along,)


def one_way_each(
    streamed: Mapping[str, StreamedDim], mesh: Sequence[str]
) -> list[Mapping[str, StreamedDim]]:
    """The dims as p2p pipelines along each axis would hide them, the innermost first.

    The axes of a `mesh` over which one dim is sharded may each be that along which its
    chunks move, but only one can be: what moves along the others is not hidden.
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
    """The dims of values that pipelines chosen or asked for will cut, by value."""
    asked = stream_choices(program)
    # Nothing is cut unasked: with `auto` each candidate comes with its own choice.
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
    """The dim that a pipeline will cut of what a statement moves.

    It was planned before values had layouts, when one name stood for all copies.
    """
    streamed = program.streamed
    return streamed.get(stmt.out.name) or streamed.get(stmt.source.name)


def reached_by_streams(program: Program) -> Mapping[str, tuple[str, StreamChoice]]:
    """The stream that reaches each value, and the mark that would say so of it."""
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
