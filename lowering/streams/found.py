"""The streams that nobody marked, and that could hide a program's transfers.

A contraction reads the result of a communication, or makes its source.  If a stream
along one dim of that value has both, a loop over chunks of the dim can move one chunk
while another is computed.  Communications of one chain, such as a layer of a
transformer, are in one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeAlias

from jhost.lowering.ir.derived import derived
from jhost.lowering.ir.graph import Graph, Node
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.marks import SerialMark, StreamChoice
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.pipelines import PipelineSpec
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Communicate, Stmt
from jhost.lowering.streams.found_marks import Parts, grouped, marks_of
from jhost.lowering.streams.found_stream import FoundStream, best_of, overlap
from jhost.lowering.streams.found_weights import (
    around_in,
    is_product,
    rows_that_stay,
    spared_by,
)
from jhost.lowering.streams.participation import Participation, rule_of
from jhost.lowering.streams.plan import plan_streams

SecondsOf: TypeAlias = Callable[[Stmt], float]
"""Gives some seconds of a contraction or a communication."""


def found_streams(
    program: Program,
    graph: Graph,
    seconds: SecondsOf,
    uneven: SecondsOf,
    spares: bool,
) -> list[FoundStream]:
    """The streams of one straight-line program; those that could hide most come first.

    `graph` has its nodes.  No two streams hide the same communication, or cut the same
    product.  `uneven` says how much longer the last device works than all do on
    average.  With `spares` the transfers of weights count as well that the program
    would not need if it moved chunks of rows instead.
    """
    found = list(_StreamSearch(program, graph, seconds, uneven, spares).every())
    kept: list[FoundStream] = []
    while found:
        kept.append(best := best_of(found))
        found = [each for each in found if not overlap(each, best)]
    return kept


class _StreamSearch:
    def __init__(
        self,
        program: Program,
        graph: Graph,
        seconds: SecondsOf,
        uneven: SecondsOf,
        spares: bool,
    ) -> None:
        self.spares, self.uneven = spares, uneven
        self.plans = _plans(program)
        self.graph = graph
        # A stream that hides nothing may still even out what is `uneven`.
        self.is_uneven = any(uneven(node.stmt) for node in graph)
        self.contracts = [has_contraction(node.stmt) for node in graph]
        self.serial = [mark for mark in program.marks if isinstance(mark, SerialMark)]
        self.mesh = dict(program.mesh.shape)
        self.seconds = [seconds(node.stmt) for node in self.graph]
        self.around = around_in(self.graph, self.seconds)

    def every(self) -> Iterator[FoundStream]:
        """One stream for each dim along which some communication could be hidden."""
        reached: set[tuple[str, int]] = set()
        for number, node in enumerate(self.graph):
            stay = (
                rows_that_stay(number, self.graph, self.seconds, self.around)
                if self.spares
                else ()
            )
            moves = self.seconds[number] or self.is_uneven
            dims = *(_dims_that_move(node, self.mesh) if moves else ()), *stay
            for buffer, dim in dims:
                if (buffer.name, dim) in reached:
                    continue
                parts = self.parts(buffer, dim)
                reached |= {(buffer.name, dim), *_places(self.graph, parts)}
                if (stream := self.stream(parts)) is not None:
                    yield stream

    def parts(self, buffer: Buffer, dim: int) -> Parts:
        """The nodes that would be in the stream of a mark on that dim."""
        if (known := self.plans.get((buffer.name, dim))) is not None:
            return known
        spec = PipelineSpec(pipeline=None, chunks=None)
        mark = StreamChoice(
            buffer=buffer.name, dim=dim, spec=spec, lines=(), found=True
        )
        plan = plan_streams(self.graph, [mark], self.serial, self.mesh)
        self.plans[buffer.name, dim] = plan.participations
        return plan.participations

    def stream(self, parts: Parts) -> FoundStream | None:
        """What the stream with these parts could hide, if it can hide anything."""
        moves = [n for n, part in parts.items() if self.moves(n, part)]
        ways = {n: self.works_for(n, parts) for n in moves}
        works = {n: set().union(*each) for n, each in ways.items()}
        led_to = set().union(*works.values())
        every = led_to | {n for n in parts if self.is_product_in(n, parts)}
        if not every:
            return None
        hidden = {n: self.hidden(n, each) for n, each in ways.items()}
        evened = {n: self.uneven(self.graph[n].stmt) for n in led_to}
        first = next((n for n in hidden if hidden[n]), min(every))
        place = self.place(parts, first)
        spared: dict[int, float] = {}
        if self.spares and place >= 0:
            spared = {
                n: self.seconds[n] for n in spared_by(parts, self.graph, self.around)
            }
        hidden |= spared
        gain = sum(hidden.values()) + sum(evened.values())
        if not gain:
            return None
        moved = [
            n for n in hidden if hidden[n] or any(map(evened.get, works.get(n, ())))
        ]
        work = self.sum([n for n in parts if self.contracts[n]])
        # Rows are cut in all products where their weights stay, and elsewhere from a
        # transfer on.
        marked = sorted(every if spared else led_to)
        marks = marks_of(marked, parts, self.graph, bool(spared))
        blocks = self.blocks(marks, parts)
        return FoundStream(
            marks=grouped(marks, self.graph, self.seconds),
            moved=frozenset(map(self.name, moved)),
            hidden=min(work, gain),
            evened=sum(evened.values()),
            work=work,
            beside=self.sum([*every]),
            place=place,
            nodes={mark.buffer: n for n, mark in marks.items()},
            blocks={mark.buffer: blocks[n] for n, mark in marks.items()},
        )

    def blocks(self, works: Iterable[int], parts: Parts) -> Mapping[int, int]:
        """For each node, the first of the works that no transfer parts from it."""
        block: dict[int, int] = {}
        for work in works:
            waiting = [] if work in block else [work]
            block.setdefault(work, work)
            for each in waiting:
                new = {
                    n
                    for forward in (True, False)
                    for n in self.graph.next_to(each, forward)
                    if n in parts and n not in block and not self.is_transfer(n)
                }
                block |= dict.fromkeys(new, work)
                waiting += new
        return block

    def is_transfer(self, number: int) -> bool:
        return isinstance(self.graph[number].stmt, Communicate)

    def place(self, parts: Parts, number: int) -> int:
        """The position of the dim in an operand of a node; -1 for the last."""
        position, access = next(iter(parts[number].reads.items()))
        last = len(self.graph[number].reads[position].shape) - 1
        return -1 if access.dim == last else access.dim

    def works_for(self, number: int, parts: Parts) -> list[set[int]]:
        """What a loop could hide a communication behind, one way or both.

        Works read a value that is gathered in chunks, and make one that is reduced.
        """
        stmt = self.graph[number].stmt
        assert isinstance(stmt, Communicate)
        ways = {"AllGather": (True,), "ReduceScatter": (False,)}
        both = ways.get(stmt.kind, (True, False))
        return [self.led_to(number, parts, forward) for forward in both]

    def hidden(self, number: int, works: Sequence[Set[int]]) -> float:
        """The seconds of a communication that a loop could hide behind works."""
        return self.seconds[number] * sum(map(bool, works)) / len(works)

    def led_to(self, number: int, parts: Parts, forward: bool) -> set[int]:
        """The first works in the stream on the paths from a communication.

        No path goes through another communication: the works behind it hide that one.
        """
        found, seen, waiting = set[int](), {number}, [number]
        for each in waiting:
            if self.is_product_in(each, parts) or self.is_cut_by_loops(each, parts):
                found.add(each)
                continue
            if each != number and self.is_transfer(each):
                continue
            new = [
                n
                for n in self.graph.next_to(each, forward)
                if n in parts and n not in seen
            ]
            seen.update(new)
            waiting += new
        return found

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
        if not isinstance(stmt, Communicate):
            return False
        if part.ratio != 1:
            return True
        dim = part.reads[0].dim
        return stmt.kind == "AllReduce" and _divides(stmt, dim, self.mesh)

    def is_product_in(self, number: int, parts: Parts) -> bool:
        """Whether it is a product with one operand, and the result, cut by a stream."""
        if not self.contracts[number]:
            return False
        part = parts[number]
        cut = len(part.reads) == 1 and bool(part.writes)
        return cut and is_product(self.graph[number].stmt)

    def is_cut_by_loops(self, number: int, parts: Parts) -> bool:
        """Whether a stream cuts what no mesh axis may: the keys of attention.

        They are gathered whole wherever no loop brings them in chunks.
        """
        rule = rule_of(self.graph[number])
        return rule is not None and parts[number].factor in rule.unsharded


@derived
def _plans(program: Program) -> dict[tuple[str, int], Parts]:
    """The parts of streams by value and dim: a search with `spares` takes them over."""
    return {}


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
