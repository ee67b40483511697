"""Where a stream ends because what comes next has fewer steps than it has chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction

from jhost._text import counted
from jhost.lowering.ir.graph import Graph
from jhost.lowering.ir.statements import Buffer
from jhost.lowering.streams.participation import Participation


def too_few(steps: Fraction, count: int) -> str:
    """Why a stream ends where there are fewer steps than chunks."""
    has = counted(steps, "step")
    return f"it has {has}, fewer than the {count} chunks asked for"


def out_of_reach(
    graph: Graph,
    buffer: str,
    parts: Mapping[int, Participation],
    counts: Mapping[int, int | None],
) -> tuple[set[int], dict[int, str]]:
    """The parts that a stream only reaches through ones with too few steps, with these.

    `counts` has the chunks that a part cannot be cut into.  Beside the parts stands why
    the stream ends at some of them.  A mark without any other part keeps all.
    """
    enough = {n: part for n, part in parts.items() if counts[n] is None}
    near = _within_reach(graph, buffer, enough)
    if not near:
        return set(), {}
    reasons: dict[int, str] = {}
    for number in _ends(graph, near, parts):
        count = counts[number]
        assert count is not None
        reasons[number] = too_few(parts[number].steps, count)
    return parts.keys() - near, reasons


def _within_reach(
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


def _ends(
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
