"""The streams that nobody marked, and that could hide what a program moves.

A contraction waits for what a communication brings, or makes what it takes.  Where the
stream along one of that value's dims takes in both, a loop over chunks of the dim can
move one chunk while another is computed.  Communications of one stream, such as all of
a layer of a transformer, have one loop or share it with their neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from jhost._jax import source_line
from jhost.lowering.ir.graph import Graph, Node, nodes
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.marks import BarrierMark, SerialMark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Communicate, Compute, Stmt
from jhost.lowering.streams.participation import Participation
from jhost.lowering.streams.plan import plan_streams

Seconds = Callable[[Stmt], float]
"""What a contraction or a communication takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream that could hide communications, and what would mark it.

    `moved` are the names of these communications.  No loop hides more than `hidden`
    seconds: the contractions in the stream take no longer, or what moves does not.
    """

    marks: tuple[StreamChoice, ...]
    moved: frozenset[str]
    hidden: float


def found_streams(program: Program, seconds: Seconds) -> list[FoundStream]:
    """The streams of one straight-line program, those that could hide most first.

    No two of them hide the same communication.
    """
    found = sorted(_Search(program, seconds).every(), key=lambda each: -each.hidden)
    taken: set[str] = set()
    kept: list[FoundStream] = []
    for each in found:
        if taken.isdisjoint(each.moved):
            kept.append(each)
            taken |= each.moved
    return kept


class _Search:
    def __init__(self, program: Program, seconds: Seconds) -> None:
        marks = program.marks
        barriers = {m.buffer: m.operands for m in marks if isinstance(m, BarrierMark)}
        self.graph = nodes(program.body, barriers)
        self.serial = [mark for mark in marks if isinstance(mark, SerialMark)]
        self.mesh = dict(program.mesh.shape)
        self.seconds = seconds

    def every(self) -> Iterator[FoundStream]:
        """One stream for each dim along which some communication could be hidden."""
        reached: set[tuple[str, int]] = set()
        for node in self.graph:
            for buffer, dim in _dims_that_move(node, self.mesh):
                if (buffer.name, dim) in reached:
                    continue
                parts = self.parts(buffer, dim)
                reached |= {(buffer.name, dim), *_places(self.graph, parts)}
                if (stream := self.stream(parts)) is not None:
                    yield stream

    def parts(self, buffer: Buffer, dim: int) -> Mapping[int, Participation]:
        """The nodes that a mark of that dim would have in its stream."""
        mark = StreamChoice(
            buffer=buffer.name, dim=dim, chunks=None, pipeline=None, lines=()
        )
        plan = plan_streams(self.graph, [mark], self.serial, self.mesh)
        return plan.participations

    def stream(self, parts: Mapping[int, Participation]) -> FoundStream | None:
        """What the stream with these parts could hide, if it can hide anything."""
        moved = [n for n, part in parts.items() if self.moves(n, part)]
        work = [n for n in parts if _contracts(self.graph[n].stmt)]
        marks = self.marks(parts)
        if not moved or not marks:
            return None
        sums = [self.seconds(self.graph[n].stmt) for n in work]
        sent = [self.seconds(self.graph[n].stmt) for n in moved]
        names = (self.graph[n].stmt for n in moved)
        return FoundStream(
            marks=marks,
            moved=frozenset(s.name for s in names if isinstance(s, Communicate)),
            hidden=min(sum(sums), sum(sent)),
        )

    def moves(self, number: int, part: Participation) -> bool:
        """Whether a p2p loop moves the chunks of a communication from place to place.

        That is what moves shards of the dim, and an all-reduce, as its two halves do.
        """
        stmt = self.graph[number].stmt
        if not isinstance(stmt, Communicate):
            return False
        if part.ratio != 1:
            return True
        return stmt.kind == "AllReduce" and _divides(
            stmt, part.reads[0].dim, self.mesh
        )

    def marks(self, parts: Mapping[int, Participation]) -> tuple[StreamChoice, ...]:
        """Marks of the contraction that takes longest, in each layer alike."""
        heavy = [n for n, p in parts.items() if p.writes and self.contracts(n)]
        if not heavy:
            return ()
        sums = any(not p.writes and self.contracts(n) for n, p in parts.items())
        every = [_mark(self.graph[n], parts[n], sums) for n in heavy]
        longest = max(heavy, key=lambda n: self.seconds(self.graph[n].stmt))
        first = every[heavy.index(longest)]
        key = _key(self.graph[longest], first)
        pairs = zip(heavy, every, strict=True)
        return tuple(m for n, m in pairs if _key(self.graph[n], m) == key)

    def contracts(self, number: int) -> bool:
        return _contracts(self.graph[number].stmt)


def _dims_that_move(node: Node, mesh: Mapping[str, int]) -> Iterator[tuple[Buffer, int]]:
    """The dims of a communication's result along which a stream may hide it."""
    stmt = node.stmt
    if not isinstance(stmt, Communicate):
        return
    match stmt.kind:
        case "AllGather" | "ReduceScatter" | "AllToAll":
            dims = [dim for dim in (stmt.dim, stmt.source_dim) if dim is not None]
        case "AllReduce":
            dims = [d for d in range(len(stmt.out.shape)) if _divides(stmt, d, mesh)]
        case _:
            dims = []
    yield from ((stmt.out, dim) for dim in dims)


def _divides(stmt: Communicate, dim: int, mesh: Mapping[str, int]) -> bool:
    """Whether the devices of a communication can each have a part of a dim."""
    size = stmt.out.shape[dim]
    return size > 0 and size % axes_size(stmt.axes, mesh) == 0


def _places(
    graph: Graph, parts: Mapping[int, Participation]
) -> Iterator[tuple[str, int]]:
    """The values that a stream cuts, each with its dim."""
    for number, part in parts.items():
        node = graph[number]
        for buffers, accesses in ((node.reads, part.reads), (node.writes, part.writes)):
            for position, access in accesses.items():
                yield buffers[position].name, access.dim


def _contracts(stmt: Stmt) -> bool:
    if not isinstance(stmt, Compute):
        return False
    return any(each.rule.contracts for each in stmt.unit.eqns)


def _mark(node: Node, part: Participation, sums: bool) -> StreamChoice:
    """The mark of a contraction's result along the dim that a stream cuts.

    On two streams a transfer is launched an iteration before it is needed, not all of
    them at first.  Where there are `sums` over all chunks, they stand beside transfers,
    which is best most often.
    """
    assert isinstance(node.stmt, Compute)
    position, access = next(iter(part.writes.items()))
    return StreamChoice(
        buffer=node.writes[position].name,
        dim=access.dim,
        chunks=None,
        pipeline=None,
        lines=(source_line(node.stmt.unit.eqns[0].eqn),),
        streams=2,
        sums="beside transfers" if sums else "in chunks",
        found=True,
    )


def _key(node: Node, mark: StreamChoice) -> object:
    """What contractions of layers alike have in common."""
    shapes: Sequence[tuple[int, ...]] = [b.shape for b in (*node.reads, *node.writes)]
    return mark.lines, mark.dim, tuple(shapes)
