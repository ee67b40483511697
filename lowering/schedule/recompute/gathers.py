"""Each loop gathers values again that only loops cut, such as attention's keys.

With chunks, keys are never whole on a device.  If a backward read the keys that its
forward had gathered, they would be kept whole in between, for all layers at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence, Set

from jhost.lowering.ir.graph import Graph, Node
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.operation import operand_maps
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.statements import Buffer, Communicate, Compute, Stmt, Wait


def with_gathers_again(
    program: Program, graph: Graph, pipelined: Collection[int]
) -> Program:
    """`program` with a gather for each later reader of a gathered value.

    The readers are `pipelined`, and loops cut the gathered dim for all of them.
    """
    kept = _kept(program, graph, pipelined)
    if not kept:
        return program
    names = FreshNames.of(program)
    body: dict[int, list[Stmt]] = {}
    for number, reader, out in kept:
        gather = graph[number].stmt
        assert isinstance(gather, Communicate)
        name = names.fresh(gather.name)
        copy = dataclasses.replace(out, name=names.fresh(out.name))
        again = dataclasses.replace(gather, name=name, out=copy)
        *before, stmt = body.get(reader, [graph[reader].stmt])
        stmt = replace_buffers(stmt, {out.name: copy})
        body[reader] = [*before, again, Wait(communication=name), stmt]
    stmts = (body.get(number, node.stmts) for number, node in enumerate(graph))
    return dataclasses.replace(program, body=tuple(s for each in stmts for s in each))


def gathers_again(nodes: Iterable[Node], others: Iterable[Node]) -> bool:
    """Whether some of the `nodes` gather a value that some of the `others` gather."""
    first = _gathered(others)
    return bool(first) and any(source in first for source in _gathered(nodes))


def _gathered(nodes: Iterable[Node]) -> list[Buffer]:
    """The values that nodes gather."""
    stmts = [node.stmt for node in nodes]
    gathers = [stmt for stmt in stmts if isinstance(stmt, Communicate)]
    return [gather.source for gather in gathers if gather.kind == "AllGather"]


def _kept(
    program: Program, graph: Graph, pipelined: Collection[int]
) -> list[tuple[int, int, Buffer]]:
    """The later readers of gathers: both numbers, and the gathered buffer."""
    results = {buffer.name for buffer in program.results}
    found: list[tuple[int, int, Buffer]] = []
    for number in sorted(pipelined):
        stmt = graph[number].stmt
        if not isinstance(stmt, Communicate) or stmt.kind != "AllGather":
            continue
        readers = graph.readers.get(stmt.out.name, ())
        cut = all(n in pipelined and _only_loops_cut(graph[n], stmt) for n in readers)
        # Nothing reads an array without elements that was to be joined with another.
        if readers and cut and stmt.out.name not in results:
            # The first reader keeps the gather as it is.
            first, *later = readers
            found += [
                (number, n, stmt.out) for n in later if _follows(n, first, graph.before)
            ]
    return found


def _only_loops_cut(node: Node, gather: Communicate) -> bool:
    """Whether a computation's gathered dim is of a factor that is not sharded."""
    if not isinstance(node.stmt, Compute):
        return False
    (unit_eqn,) = node.stmt.unit.eqns
    ins = zip(node.stmt.ins, operand_maps(node.stmt), strict=True)
    dims = [maps[gather.dim or 0] for buffer, maps in ins if buffer == gather.out]
    unsharded = unit_eqn.rule.unsharded
    return all(dim is not None and dim.factor in unsharded for dim in dims)


def _follows(number: int, first: int, before: Sequence[Set[int]]) -> bool:
    """Whether a node needs node `first`, directly or through others."""
    found, waiting = {number}, [number]
    while waiting:
        new = {n for n in before[waiting.pop()] if n >= first} - found
        found |= new
        waiting += new
    return first in found
