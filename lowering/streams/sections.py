"""The sections of a program that no loop crosses.

A loop from device to device begins with shards of the dim that it works on in chunks,
or ends with them; and no loop holds both what is before and what is behind something
that its stream does not go through, such as attention over a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jhost.lowering.ir.graph import Node, dependencies
from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer
from jhost.lowering.streams.parts import Access, Part
from jhost.lowering.streams.plan import StreamPlan, plan_program


def sections(program: Program, layouts: Mapping[str, Layout]) -> dict[str, range]:
    """The statements of the section that makes each value in a stream, by its name.

    `layouts` are those of the values of a program without communications.
    """
    graph, plan = plan_program(program)
    by_rank: dict[int, list[int]] = {}
    for number, rank in enumerate(_ranks(graph, plan, layouts)):
        if number in plan.parts:
            by_rank.setdefault(rank, []).append(number)
    return {
        buffer.name: range(numbers[0], numbers[-1] + 1)
        for numbers in by_rank.values()
        for number in numbers
        for buffer in graph[number].writes
    }


def _ranks(
    graph: Sequence[Node], plan: StreamPlan, layouts: Mapping[str, Layout]
) -> list[int]:
    """How many sections were left up to each node."""
    ranks: list[int] = []
    left: list[bool] = []  # whether one was left since the last one was entered
    for number, needs in enumerate(dependencies(graph)):
        part = plan.parts.get(number)
        ranks.append(
            max((ranks[n] + (left[n] and part is not None) for n in needs), default=0)
        )
        if part is None:
            left.append(any(left[n] or n in plan.parts for n in needs))
        else:
            left.append(_scatters(graph[number], part, layouts))
    return ranks


def _scatters(node: Node, part: Part, layouts: Mapping[str, Layout]) -> bool:
    """Whether a node shards the dim of its stream over axes that did not shard it."""
    before = set(_axes(node.reads, part.reads, layouts))
    return not set(_axes(node.writes, part.writes, layouts)) <= before


def _axes(
    buffers: Sequence[Buffer],
    accesses: Mapping[int, Access],
    layouts: Mapping[str, Layout],
) -> Iterator[str]:
    for position, access in accesses.items():
        yield from layouts[buffers[position].name][access.dim]
