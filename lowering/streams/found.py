"""The streams that nobody marked, and that could hide a program's transfers.

A contraction reads the result of a communication, or makes its source.  If a stream
along one dim of that value has both, a loop over chunks of the dim can move one chunk
while another is computed.  Communications of one chain, such as a layer of a
transformer, are in one stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TypeAlias

from jhost._jax import is_in_backward, is_transposed, source_line
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
"""Gives the seconds of a contraction or a communication."""

Parts: TypeAlias = Mapping[int, Participation]
"""The nodes in a stream, each with its part."""


@dataclasses.dataclass(frozen=True, slots=True)
class FoundStream:
    """A stream that could hide communications.

    Attributes:
        marks: the marks that would ask for it.  A group marks values alike, such as one
            value of each layer.
        moved: the names of the communications.
        hidden: the most seconds that loops could hide: the communications take no
            longer, or the contractions do not.
        work: the seconds of the contractions.
        beside: the seconds of the products that work on rows of the dim.
        place: orders dims: later dims are higher, but the last dim is lowest.
    """

    marks: tuple[tuple[StreamChoice, ...], ...]
    moved: frozenset[str]
    hidden: float
    work: float
    beside: float
    place: int

    @property
    def every_mark(self) -> list[StreamChoice]:
        return [mark for group in self.marks for mark in group]

    @property
    def lines(self) -> tuple[str, ...]:
        """The user's lines of its marks, each once."""
        lines = (line for mark in self.every_mark for line in mark.lines)
        return tuple(dict.fromkeys(lines))


def found_streams(
    program: Program, seconds: SecondsOf, spares: bool
) -> list[FoundStream]:
    """The streams of one straight-line program; those that could hide most come first.

    No two of them hide the same communication, or cut the same product.  With `spares`
    the transfers of weights count as well that the program would not need if it moved
    chunks of rows instead.
    """
    found = list(_StreamSearch(program, seconds, spares).every())
    kept: list[FoundStream] = []
    while found:
        kept.append(best := _best(found))
        found = [each for each in found if not _overlap(each, best)]
    return kept


def _overlap(stream: FoundStream, other: FoundStream) -> bool:
    """Whether two streams exclude each other."""
    if not stream.moved.isdisjoint(other.moved):
        return True
    return not {m.buffer for m in stream.every_mark}.isdisjoint(
        m.buffer for m in other.every_mark
    )


_EQUAL = 0.9
"""Two streams count as equal if one could hide this share of what the other could."""


def _best(found: Sequence[FoundStream]) -> FoundStream:
    """The stream that could hide most, and among equals the one with most products.

    Among equals of these, the one along the last dim but one.  The last dim has
    features, which products contract, and earlier dims are short where axes shard
    sequences.
    """
    most = max(each.hidden for each in found)
    found = [each for each in found if each.hidden >= _EQUAL * most]
    most = max(each.beside for each in found)
    found = [each for each in found if each.beside >= _EQUAL * most]
    return max(found, key=lambda each: each.place)


class _StreamSearch:
    def __init__(self, program: Program, seconds: SecondsOf, spares: bool) -> None:
        self.spares = spares
        self.graph = graph_of(program)
        self.serial = [mark for mark in program.marks if isinstance(mark, SerialMark)]
        self.mesh = dict(program.mesh.shape)
        self.seconds = [seconds(node.stmt) for node in self.graph]

    def every(self) -> Iterator[FoundStream]:
        """One stream for each dim along which some communication could be hidden."""
        reached: set[tuple[str, int]] = set()
        for number, node in enumerate(self.graph):
            stay = self.rows_that_stay(number) if self.spares else ()
            dims = *_dims_that_move(node, self.mesh), *stay
            for buffer, dim in dims:
                if (buffer.name, dim) in reached:
                    continue
                parts = self.parts(buffer, dim)
                reached |= {(buffer.name, dim), *_places(self.graph, parts)}
                if (stream := self.stream(parts)) is not None:
                    yield stream

    def parts(self, buffer: Buffer, dim: int) -> Parts:
        """The nodes that would be in the stream of a mark on that dim."""
        spec = PipelineSpec(pipeline=None, chunks=None)
        mark = StreamChoice(
            buffer=buffer.name, dim=dim, spec=spec, lines=(), found=True
        )
        plan = plan_streams(self.graph, [mark], self.serial, self.mesh)
        return plan.participations

    def stream(self, parts: Parts) -> FoundStream | None:
        """What the stream with these parts could hide, if it can hide anything."""
        products = set(self.products(parts))
        moves = [n for n, part in parts.items() if self.moves(n, part)]
        hidden = {n: self.hidden(n, parts, products) for n in moves}
        hidden = {n: seconds for n, seconds in hidden.items() if seconds}
        first = next(iter((*hidden, *products)), None)
        if first is None:
            return None
        place = self.place(parts, first)
        spared: dict[int, float] = {}
        if self.spares and place >= 0:
            spared = {n: self.seconds[n] for n in self.spared(parts)}
        hidden |= spared
        if not hidden:
            return None
        work = self.sum([n for n in parts if self.contracts(n)])
        return FoundStream(
            marks=self.marks(parts, bool(spared)),
            moved=frozenset(self.name(n) for n in hidden),
            hidden=min(work, sum(hidden.values())),
            work=work,
            beside=self.sum([*products]),
            place=place,
        )

    def place(self, parts: Parts, number: int) -> int:
        """The position of the dim in an operand of a node; -1 for the last."""
        position, access = next(iter(parts[number].reads.items()))
        last = len(self.graph[number].reads[position].shape) - 1
        return -1 if access.dim == last else access.dim

    # --- Weights that could stay ---------------------------------------------------- #

    def rows_that_stay(self, number: int) -> Iterator[tuple[Buffer, int]]:
        """The dims of products that axes shard over which their weight is gathered.

        The weight could stay instead, while chunks of the dim move.  The last dim has
        features: chunks of these would be parts of another weight.
        """
        stmt = self.graph[number].stmt
        if not isinstance(stmt, Communicate) or stmt.kind != "AllGather":
            return
        if not self.seconds[number]:
            return
        for reader in self.around(number, forward=True):
            if _is_product(self.graph[reader].stmt):
                for buffer in self.graph[reader].writes:
                    yield from _rows_over(buffer, stmt.axes)

    def spared(self, parts: Parts) -> Iterator[int]:
        """The transfers of weights and of their gradients over axes that shard the dim.

        They are not needed if chunks of the dim move instead.
        """
        for number, part in parts.items():
            if not self.contracts(number):
                continue
            reads = self.graph[number].reads
            dims = (reads[n].dims[access.dim] for n, access in part.reads.items())
            axes = {axis for dim in dims for axis in dim.axes}
            for forward in (False, True):
                for other in self.around(number, forward):
                    stmt = self.graph[other].stmt
                    moves = isinstance(stmt, Communicate) and axes.issuperset(stmt.axes)
                    if moves and other not in parts:
                        yield other

    def around(self, number: int, forward: bool) -> Iterator[int]:
        """The transfers and contractions next to a node, one way."""
        seen, waiting = {number}, [number]
        for each in waiting:
            if each != number and self.seconds[each]:
                yield each
                continue
            new = [n for n in self.next(each, forward) if n not in seen]
            seen.update(new)
            waiting += new

    def hidden(self, number: int, parts: Parts, products: Set[int]) -> float:
        """The seconds of a communication that a loop could hide behind products.

        Products read a value that is gathered in chunks, and make one that is reduced.
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
        """Whether a path in the stream leads from a communication to a product.

        The path must not go through another communication, which would be hidden there.
        """
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
        """The readers of a node's results, or the makers of its operands."""
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

        It does if the communication moves shards of the dim, or is an all-reduce, which
        becomes a reduce-scatter and an all-gather of shards.
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
        """The products with one operand, and the result, cut by the stream."""
        return [
            number
            for number, part in parts.items()
            if _is_product(self.graph[number].stmt)
            and len(part.reads) == 1
            and part.writes
        ]

    def marks(self, parts: Parts, spares: bool) -> tuple[tuple[StreamChoice, ...], ...]:
        """Marks of the products in a stream; the smallest group comes first."""
        # Products only, and not attention: its keys are rows of a contraction but no
        # chunks.  With a mark on them the stream would end there, and attention would
        # be in no loop.
        rows = sorted(self.products(parts), key=lambda n: -self.seconds[n])
        sums = any(not p.writes and self.contracts(n) for n, p in parts.items())
        alike: dict[object, list[StreamChoice]] = {}
        for number in rows:
            node, part = self.graph[number], parts[number]
            mark = _mark(node, part, sums, spares)
            alike.setdefault(_key(node, mark), []).append(mark)
        # Where layers are written out, the smallest group has one mark for each layer.
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


def _rows_over(buffer: Buffer, axes: Sequence[str]) -> Iterator[tuple[Buffer, int]]:
    """The dims of a value that are sharded over all the axes, but for the last dim."""
    rows = enumerate(buffer.dims[:-1])
    return ((buffer, n) for n, dim in rows if {*axes} <= {*dim.axes})


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


def _mark(node: Node, part: Participation, sums: bool, spares: bool) -> StreamChoice:
    """The mark of a contraction's result along the dim that a stream cuts.

    `sums` says whether there are contractions over all chunks.  They stand beside
    transfers, which is best most often.
    """
    # Two streams: a transfer is launched an iteration before it is needed, instead of
    # all of them at first.
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
        spares=spares,
    )


def _key(node: Node, mark: StreamChoice) -> object:
    """A key that is equal for the same contraction of several layers."""
    assert isinstance(node.stmt, Compute)
    eqn = node.stmt.unit.eqns[0].eqn
    shapes = tuple(buffer.shape for buffer in (*node.reads, *node.writes))
    # A line's product, its gradient and what a backward computes again may be alike.
    return mark.lines, mark.dim, shapes, is_in_backward(eqn), is_transposed(eqn)
