"""Where a stream ends because what comes next has fewer steps than it has chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jhost.lowering.ir.graph import Graph
from jhost.lowering.ir.statements import Buffer
from jhost.lowering.streams.participation import Participation


def within_reach(
    graph: Graph, buffer: str, parts: Mapping[int, Participation]
) -> set[int]:
    """The parts that a stream reaches from a value through such parts alone."""
    found, values, queue = set[int](), {buffer}, [buffer]
    while queue:
        for number, _, _ in graph.touching.get(queue.pop(), ()):
            if number in parts and number not in found:
                found.add(number)
                new = {each.name for each in _cut(graph, number, parts)} - values
                values |= new
                queue += new
    return found


def ends(
    graph: Graph, near: set[int], parts: Mapping[int, Participation]
) -> Iterator[int]:
    """The other parts that touch what the `near` ones cut."""
    values = {each.name for number in near for each in _cut(graph, number, parts)}
    for number in parts.keys() - near:
        if any(each.name in values for each in _cut(graph, number, parts)):
            yield number


def _cut(
    graph: Graph, number: int, parts: Mapping[int, Participation]
) -> Iterator[Buffer]:
    node, part = graph[number], parts[number]
    yield from (node.reads[position] for position in part.reads)
    yield from (node.writes[position] for position in part.writes)
