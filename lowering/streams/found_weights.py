"""Weights that are gathered, and could stay while rows move in chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from jhost.lowering.ir.graph import Graph
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.statements import Buffer, Communicate, Compute, Stmt
from jhost.lowering.rules.dim_rule import factors_of
from jhost.lowering.streams.found_marks import Parts

Around: TypeAlias = Callable[[int, bool], Sequence[int]]
"""Gives the transfers and contractions right before a node, or right behind it."""


def around_in(graph: Graph, seconds: Sequence[float]) -> Around:
    """A search next to the nodes of a graph, which looks at each node once."""
    return functools.cache(
        lambda number, forward: tuple(_around(number, graph, seconds, forward))
    )


def rows_that_stay(
    number: int, graph: Graph, seconds: Sequence[float], around: Around
) -> Iterator[tuple[Buffer, int]]:
    """The dims of products that axes shard over which a gather brings their weight.

    The weight could stay instead, while chunks of the dim move.  The last dim has
    features: chunks of these would be parts of another weight.
    """
    stmt = graph[number].stmt
    if not isinstance(stmt, Communicate) or stmt.kind != "AllGather":
        return
    if not seconds[number]:
        return
    for reader in around(number, True):
        if is_product(graph[reader].stmt):
            for buffer in graph[reader].writes:
                yield from _rows_over(buffer, stmt.axes)


def spared_by(parts: Parts, graph: Graph, around: Around) -> Iterator[int]:
    """The transfers of weights and of their gradients over axes that shard the dim.

    They are not needed if chunks of the dim, which a stream with these parts cuts, move
    instead.
    """
    for number, part in parts.items():
        if not has_contraction(graph[number].stmt):
            continue
        reads = graph[number].reads
        dims = (reads[n].dims[access.dim] for n, access in part.reads.items())
        axes = {axis for dim in dims for axis in dim.axes}
        for forward in (False, True):
            for other in around(number, forward):
                stmt = graph[other].stmt
                moves = isinstance(stmt, Communicate) and axes.issuperset(stmt.axes)
                if moves and other not in parts:
                    yield other


def _around(
    number: int, graph: Graph, seconds: Sequence[float], forward: bool
) -> Iterator[int]:
    """The transfers and contractions next to a node, one way."""
    seen, waiting = {number}, [number]
    for each in waiting:
        # What takes no seconds, as a cast does, is walked through.
        if each != number and seconds[each]:
            yield each
            continue
        new = [n for n in graph.next_to(each, forward) if n not in seen]
        seen.update(new)
        waiting += new


def is_product(stmt: Stmt) -> bool:
    """Whether it is one product of rows and a matrix: no attention, and no batch."""
    if not isinstance(stmt, Compute):
        return False
    (unit_eqn,) = stmt.unit.eqns
    rule = unit_eqn.rule
    if not rule.contracts or rule.matmul is not None:
        return False
    left, right, out = map(factors_of, (*rule.operands[:2], rule.results[0]))
    # A factor of both operands and of the result is a batch.
    return not left & right & out


def _rows_over(buffer: Buffer, axes: Sequence[str]) -> Iterator[tuple[Buffer, int]]:
    """The dims of a value that are sharded over all the axes, but for the last dim."""
    rows = enumerate(buffer.dims[:-1])
    return ((buffer, n) for n, dim in rows if {*axes} <= {*dim.axes})
