"""The streams that nobody marked, and that could hide what a program moves.

A contraction waits for what a communication brings, or makes what it takes.  Where the
stream along one of that value's dims takes in both, a loop over chunks of the dim can
move one chunk while another is computed.  Communications of one chain, such as a layer
of a transformer, are in one stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TypeAlias

from jhost._jax import source_line
from jhost.lowering.ir.graph import Graph, Node, graph_of
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.marks import SerialMark, StreamChoice
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.pipelines import PipelineSpec
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Communicate, Compute, Stmt
from jhost.lowering.rules.dim_rule import factors_of
from jhost.lowering.streams.participation import Participation
from jhost.lowering.streams.plan import plan_streams

SecondsOf: TypeAlias = Callable[[Stmt], float]
"""What a contraction or a communication takes."""

Parts: TypeAlias = Mapping[int, Participation]
"""The nodes in a stream, each with its part."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream that could hide communications, which are `moved`, by name.

    `marks` would ask for it.  Those together mark alike values, such as one of each
    layer.  No loop hides more than `hidden` seconds: what moves takes no longer, or the
    contractions in the stream.  Those that work on rows of the dim take `beside`
    seconds.  The dim's `place` is higher the further behind it stands, and lowest for
    the last one.
    """

    marks: tuple[tuple[StreamChoice, ...], ...]
    moved: frozenset[str]
    hidden: float
    beside: float
    place: int

    @property
    def every_mark(self) -> list[StreamChoice]:
        return [mark for group in self.marks for mark in group]


def found_streams(program: Program, seconds: SecondsOf) -> list[FoundStream]:
    """The streams of one straight-line program, those that could hide most first.

    No two of them hide the same communication.
    """
    found = list(_StreamSearch(program, seconds).every())
    kept: list[FoundStream] = []
    while found:
        kept.append(best := _best(found))
        found = [each for each in found if each.moved.isdisjoint(best.moved)]
    return kept


_EQUAL = 0.9
"""From this share on, what two streams could hide is no difference."""


def _best(found: Sequence[FoundStream]) -> FoundStream:
    """The stream that could hide most, beside most.

    Of equals that along the last dim but one: the last dim is that of features, which
    products contract, and what shards sequences already leaves few of them.
    """
    most = max(each.hidden for each in found)
    found = [each for each in found if each.hidden >= _EQUAL * most]
    most = max(each.beside for each in found)
    found = [each for each in found if each.beside >= _EQUAL * most]
    return max(found, key=lambda each: each.place)


class _StreamSearch:
    def __init__(self, program: Program, seconds: SecondsOf) -> None:
        self.graph = graph_of(program)
        self.serial = [mark for mark in program.marks if isinstance(mark, SerialMark)]
        self.mesh = dict(program.mesh.shape)
        self.seconds = [seconds(node.stmt) for node in self.graph]

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

    def parts(self, buffer: Buffer, dim: int) -> Parts:
        """The nodes that a mark of that dim would have in its stream."""
        spec = PipelineSpec(pipeline=None, chunks=None)
        mark = StreamChoice(buffer=buffer.name, dim=dim, spec=spec, lines=())
        plan = plan_streams(self.graph, [mark], self.serial, self.mesh)
        return plan.participations

    def stream(self, parts: Parts) -> FoundStream | None:
        """What the stream with these parts could hide, if it can hide anything."""
        products = set(self.products(parts))
        moved = [n for n, part in parts.items() if self.moves(n, part)]
        hidden = {n: self.hidden(n, parts, products) for n in moved}
        moved = [n for n in moved if hidden[n]]
        if not moved:
            return None
        work = [n for n in parts if self.contracts(n)]
        return FoundStream(
            marks=self.marks(parts),
            moved=frozenset(self.name(n) for n in moved),
            hidden=min(self.sum(work), sum(hidden.values())),
            beside=self.sum([*products]),
            place=self.place(parts, moved[0]),
        )

    def place(self, parts: Parts, number: int) -> int:
        """Where the dim stands in what a communication moves."""
        dim, last = parts[number].reads[0].dim, len(self.graph[number].reads[0].shape)
        return -1 if dim == last - 1 else dim

    def hidden(self, number: int, parts: Parts, products: Set[int]) -> float:
        """The seconds of a communication that a loop could hide behind products.

        What is gathered in chunks is read by them, and what is reduced made by them.
        """
        stmt = self.graph[number].stmt
        assert isinstance(stmt, Communicate)
        ways = {"AllGather": (True,), "ReduceScatter": (False,)}
        both = ways.get(stmt.kind, (True, False))
        found = [self.leads(number, parts, products, forward) for forward in both]
        return self.seconds[number] * sum(found) / len(found)

    def leads(
        self, number: int, parts: Parts, products: Set[int], forward: bool
    ) -> bool:
        """Whether the stream leads from a communication to a product, past no other."""
        seen, waiting = {number}, [number]
        for each in waiting:
            if each in products:
                return True
            if each != number and isinstance(self.graph[each].stmt, Communicate):
                continue
            new = [n for n in self.next(each, forward) if n in parts and n not in seen]
            seen.update(new)
            waiting += new
        return False

    def next(self, number: int, forward: bool) -> Iterator[int]:
        """The nodes that read what one makes, or that make what it reads."""
        node = self.graph[number]
        if forward:
            return (n for b in node.writes for n in self.graph.readers.get(b.name, ()))
        makers = (self.graph.makers.get(buffer.name) for buffer in node.reads)
        return (maker for maker in makers if maker is not None)

    def sum(self, numbers: Sequence[int]) -> float:
        return sum(self.seconds[n] for n in numbers)

    def name(self, number: int) -> str:
        stmt = self.graph[number].stmt
        assert isinstance(stmt, Communicate)
        return stmt.name

    def moves(self, number: int, part: Participation) -> bool:
        """Whether a p2p loop moves the chunks of a communication from place to place.

        That is what moves shards of the dim, and an all-reduce, as its two halves do.
        """
        stmt = self.graph[number].stmt
        if not isinstance(stmt, Communicate) or not self.seconds[number]:
            return False
        if part.ratio != 1:
            return True
        dim = part.reads[0].dim
        return stmt.kind == "AllReduce" and _divides(stmt, dim, self.mesh)

    def contracts(self, number: int) -> bool:
        return has_contraction(self.graph[number].stmt)

    def products(self, parts: Parts) -> list[int]:
        """The products of which the stream cuts one operand, and the result."""
        return [
            number
            for number, part in parts.items()
            if _is_product(self.graph[number].stmt)
            and len(part.reads) == 1
            and part.writes
        ]

    def marks(self, parts: Parts) -> tuple[tuple[StreamChoice, ...], ...]:
        """Marks of the products in a stream, those first of which there are fewest.

        Keys of attention are rows of a contraction, and then no chunks: marked as well,
        the stream ends there, and attention itself is in no loop.
        """
        rows = sorted(self.products(parts), key=lambda n: -self.seconds[n])
        sums = any(not p.writes and self.contracts(n) for n, p in parts.items())
        alike: dict[object, list[StreamChoice]] = {}
        for number in rows:
            node, part = self.graph[number], parts[number]
            mark = _mark(node, part, sums)
            alike.setdefault(_key(node, mark), []).append(mark)
        # Those of which each layer has one, where layers are written out.
        return tuple(map(tuple, sorted(alike.values(), key=len)))


def _is_product(stmt: Stmt) -> bool:
    """Whether it is one product of rows and a matrix: no attention, and no batch."""
    if not isinstance(stmt, Compute):
        return False
    (unit_eqn,) = stmt.unit.eqns
    rule = unit_eqn.rule
    if not rule.contracts or rule.matmul is not None:
        return False
    left, right, out = map(factors_of, (*rule.operands[:2], rule.results[0]))
    return not left & right & out


def _dims_that_move(
    node: Node, mesh: Mapping[str, int]
) -> Iterator[tuple[Buffer, int]]:
    """The dims of a communication's result along which a stream may hide it."""
    stmt = node.stmt
    if not isinstance(stmt, Communicate):
        return
    match stmt.kind:
        case "AllGather" | "ReduceScatter" | "AllToAll":
            dims = [dim for dim in (stmt.dim, stmt.source_dim) if dim is not None]
        case "AllReduce":
            every = range(len(stmt.out.shape))
            dims = [dim for dim in every if _divides(stmt, dim, mesh)]
        case _:
            dims = []
    yield from ((stmt.out, dim) for dim in dims)


def _divides(stmt: Communicate, dim: int, mesh: Mapping[str, int]) -> bool:
    """Whether the devices of a communication can each have a part of a dim."""
    size = stmt.out.shape[dim]
    return size > 0 and size % axes_size(stmt.axes, mesh) == 0


def _places(graph: Graph, parts: Parts) -> Iterator[tuple[str, int]]:
    """The values that a stream cuts, each with its dim."""
    for number, part in parts.items():
        node = graph[number]
        for buffers, accesses in ((node.reads, part.reads), (node.writes, part.writes)):
            for position, access in accesses.items():
                yield buffers[position].name, access.dim


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
        spec=PipelineSpec(
            pipeline="p2p",
            chunks=None,
            streams=2,
            sums="beside transfers" if sums else "in chunks",
        ),
        by_name=False,
        lines=(source_line(node.stmt.unit.eqns[0].eqn),),
        found=True,
    )


def _key(node: Node, mark: StreamChoice) -> object:
    """What contractions of layers alike have in common."""
    shapes = tuple(buffer.shape for buffer in (*node.reads, *node.writes))
    return mark.lines, mark.dim, shapes
