"""Straight-line statements as a dependency graph, and the merging of its nodes.

The segmenter and the grouping into loops both ask which statements may stand
together.  Groups are convex: no path leaves one and comes back, so each can run as a
whole.  What may merge is a predicate that the caller hands in (nvFuser #4145).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir import (
    Allocate,
    Buffer,
    Communicate,
    Compute,
    Deallocate,
    For,
    If,
    Recv,
    Select,
    Send,
    Set,
    Stmt,
    Wait,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A statement, or a communication with its wait, and the buffers it touches.

    Of a piece of a barrier, `barrier` names the operands of them all.
    """

    stmts: tuple[Stmt, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    barrier: tuple[str, ...] = ()

    @property
    def stmt(self) -> Stmt:
        return self.stmts[0]


Group: TypeAlias = tuple[Node, ...]
ShouldMerge: TypeAlias = Callable[[Group, Group], bool]
"""Whether two groups may run as one; convexity is not the predicate's business."""


def nodes(
    body: Sequence[Stmt], barriers: Mapping[str, tuple[str, ...]] | None = None
) -> list[Node]:
    """The nodes of `body`: each communication stands together with its wait.

    `barriers` has the operands of the barrier that makes a buffer, by its name.
    """
    barriers = barriers or {}
    waits = {stmt.communication for stmt in body if isinstance(stmt, Wait)}
    made: list[Node] = []
    for stmt in body:
        if isinstance(stmt, Wait):
            continue
        stmts: tuple[Stmt, ...] = (stmt,)
        if isinstance(stmt, Communicate) and stmt.name in waits:
            stmts = (stmt, Wait(communication=stmt.name))
        reads, writes = touched(stmt)
        barrier = barriers.get(writes[0].name, ()) if writes else ()
        made.append(Node(stmts, tuple(reads), tuple(writes), barrier))
    return made


def touched(stmt: Stmt) -> tuple[list[Buffer], list[Buffer]]:
    """The buffers that `stmt` reads, and those that it writes or makes."""
    match stmt:
        case Compute(ins=ins, outs=outs, reducer=reducer):
            return [*ins, *(outs if reducer else ())], [*outs]
        case Set(out=out, source=source) | Communicate(out=out, source=source):
            return [source], [out]
        case Select(out=out, source=source):
            return [source], [out]
        case Allocate(buffer=buffer) | Recv(buffer=buffer):
            return [], [buffer]
        case Send(buffer=buffer) | Deallocate(buffer=buffer):
            return [buffer], []
        case For(body=body):
            return _touched_by_all(body)
        case If(predicate=predicate, then=then, otherwise=otherwise):
            reads, writes = _touched_by_all((*then, *otherwise))
            return [
                *([predicate] if isinstance(predicate, Buffer) else ()),
                *reads,
            ], writes
        case _:
            return [], []


def _touched_by_all(body: Sequence[Stmt]) -> tuple[list[Buffer], list[Buffer]]:
    """What a loop or branch touches outside: writing an alias writes its source."""
    sources: dict[str, Buffer] = {}
    reads: list[Buffer] = []
    writes: list[Buffer] = []
    for stmt in body:
        if isinstance(stmt, Select):
            source = sources.get(stmt.source.name, stmt.source)
            sources[stmt.out.name] = source
            continue
        inner_reads, inner_writes = touched(stmt)
        reads += [sources.get(buffer.name, buffer) for buffer in inner_reads]
        writes += [sources.get(buffer.name, buffer) for buffer in inner_writes]
    return reads, writes


def dependencies(graph: Sequence[Node]) -> list[set[int]]:
    """For each node, those before it that it must follow.

    A read follows the last write, and a write the last write and the reads since.
    """
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    before: list[set[int]] = []
    for number, node in enumerate(graph):
        needs = {
            writer[b.name] for b in (*node.reads, *node.writes) if b.name in writer
        }
        for buffer in node.writes:
            needs.update(readers.pop(buffer.name, ()))
            writer[buffer.name] = number
        for buffer in node.reads:
            readers.setdefault(buffer.name, []).append(number)
        before.append(needs - {number})
    return before


def merge_groups(
    graph: Sequence[Node], before: Sequence[set[int]], should_merge: ShouldMerge
) -> list[Group]:
    """Merge nodes into convex groups as far as the predicate lets; groups in order.

    `before` has the `dependencies` of each node, and more where there is more to keep.
    Nodes come in program order, so nothing depends on the one at hand yet: it may join
    a group unless another group that it needs depends, through others, on that group.
    """
    members: list[list[int]] = []
    upstream: list[set[int]] = []
    group_of: list[int] = []
    for number, node in enumerate(graph):
        needed = {group_of[other] for other in before[number]}
        chosen = len(members)
        for candidate in reversed(range(len(members))):
            blocked = any(candidate in upstream[g] for g in needed - {candidate})
            group = tuple(graph[i] for i in members[candidate])
            if not blocked and should_merge(group, (node,)):
                chosen = candidate
                break
        if chosen == len(members):
            members.append([])
            upstream.append(set())
        members[chosen].append(number)
        group_of.append(chosen)
        _extend_upstream(upstream, chosen, needed - {chosen})
    order = _ordered(members, upstream)
    return [tuple(graph[i] for i in members[group]) for group in order]


def _extend_upstream(upstream: list[set[int]], group: int, needed: set[int]) -> None:
    new = needed.union(*(upstream[g] for g in needed))
    upstream[group] |= new
    for above in upstream:
        if group in above:
            above |= new


def _ordered(members: list[list[int]], upstream: list[set[int]]) -> Iterator[int]:
    """Groups after those they need, otherwise in the order of their first nodes."""
    pending = sorted(range(len(members)), key=lambda group: members[group][0])
    done: set[int] = set()
    while pending:
        group = next(g for g in pending if upstream[g] <= done)
        pending.remove(group)
        done.add(group)
        yield group
