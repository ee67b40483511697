"""The marks that ask for a stream that was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jhost._jax import is_in_backward, is_transposed, source_line
from jhost.lowering.ir.graph import Graph, Node
from jhost.lowering.ir.marks import StreamChoice
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.pipelines import PipelineSpec
from jhost.lowering.ir.statements import Communicate, Compute
from jhost.lowering.streams.participation import Participation

Parts: TypeAlias = Mapping[int, Participation]
"""The nodes in a stream, each with its part."""

MarksAlike: TypeAlias = tuple[StreamChoice, ...]
"""Marks that ask for the same of values alike, such as one value of each layer."""


def marks_of(
    works: Sequence[int], parts: Parts, graph: Graph, spares: bool
) -> dict[int, StreamChoice]:
    """By contraction of a stream, in order, the mark that is there for it.

    Keys may be what another contraction makes, and then its mark is there for both.
    """
    cut = [part for n, part in parts.items() if has_contraction(graph[n].stmt)]
    sums = any(not part.writes for part in cut)
    every = {n: _mark(n, parts[n], graph, sums, spares) for n in works}
    first = {mark.buffer: n for n, mark in reversed(every.items())}
    return {n: every[n] for n in sorted(first.values())}


def grouped(
    marks: Mapping[int, StreamChoice], graph: Graph, seconds: Sequence[float]
) -> tuple[MarksAlike, ...]:
    """The marks by what is alike; the smallest group comes first.

    Where layers are written out, it has one mark for each layer.
    """
    alike: dict[object, list[StreamChoice]] = {}
    for number in sorted(marks, key=lambda n: -seconds[n]):
        mark = marks[number]
        alike.setdefault(_key(graph[number], mark), []).append(mark)
    return tuple(map(tuple, sorted(alike.values(), key=len)))


def _mark(
    number: int, part: Participation, graph: Graph, sums: bool, spares: bool
) -> StreamChoice:
    """The mark of what a contraction makes or reads, along the dim that is cut.

    `sums` says whether there are contractions over all chunks.  They stand beside
    transfers, which is best most often.
    """
    # Two streams: a transfer is launched an iteration before it is needed, instead of
    # all of them at first.
    node = graph[number]
    assert isinstance(node.stmt, Compute)
    name, dim = _marked(node, part, graph)
    return StreamChoice(
        buffer=name,
        dim=dim,
        spec=PipelineSpec(
            pipeline="p2p",
            chunks=None,
            streams=2,
            sums="beside transfers" if sums else "in chunks",
        ),
        by_name=False,
        lines=(source_line(node.stmt.unit.eqns[0].eqn),),
        found=True,
        spares=spares,
    )


def _marked(node: Node, part: Participation, graph: Graph) -> tuple[str, int]:
    """A result that is made in chunks; where all are whole, what moves to be read.

    A moved value is marked where it comes from: before layouts there is no other.
    """
    for position, access in part.writes.items():
        return node.writes[position].name, access.dim
    position, access = next(iter(part.reads.items()))
    name = node.reads[position].name
    while name in graph.makers:
        stmt = graph[graph.makers[name]].stmt
        if not isinstance(stmt, Communicate):
            break
        name = stmt.source.name
    return name, access.dim


def _key(node: Node, mark: StreamChoice) -> object:
    """A key that is equal for the same contraction of several layers."""
    assert isinstance(node.stmt, Compute)
    eqn = node.stmt.unit.eqns[0].eqn
    shapes = tuple(buffer.shape for buffer in (*node.reads, *node.writes))
    # A line's product, its gradient and what a backward computes again may be alike.
    return mark.lines, mark.dim, shapes, is_in_backward(eqn), is_transposed(eqn)
