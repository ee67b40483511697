"""All-reduces in a p2p pipeline, in pieces: each total goes back beside the next piece.

By now an all-reduce is a reduce-scatter and an all-gather.  If one loop took all pieces
and a second loop gathered them, nothing would run beside the second.  So the loop over
pieces is the outer one.  An iteration takes one piece of every shard through the steps
of the p2p pipeline, adds up the terms, and sends the total to all devices.  Meanwhile
the next iteration computes.  Only the gather of the last piece has nothing beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.graph import Graph, Node
from jhost.lowering.ir.index import Constant, Index, LoopIndex
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.queues import MAIN, OWN, on_stream
from jhost.lowering.loops.chunk import LoopSpec
from jhost.lowering.loops.collective import INDEX
from jhost.lowering.loops.p2p import P2PLoop
from jhost.lowering.loops.pipelining import Pipelining
from jhost.lowering.streams.participation import Access

PIECE = LoopIndex("p")


class AllReduceLoop(P2PLoop):
    """A loop over pieces; `back` has the gathers of its group that return totals."""

    def __init__(self, spec: LoopSpec, back: Set[int]) -> None:
        rest = tuple(node for node in spec.nodes if id(node) not in back)
        super().__init__(spec.of(rest))
        self.back = tuple(node for node in spec.nodes if id(node) in back)
        self.others = self.devices - 1
        # Gathers of totals get streams behind these, so that no step waits for one.
        self.used = min(self.streams, self.others * self.pieces)

    @property
    def ends_alone(self) -> bool:
        return False  # the last totals are still sent back

    def statements(self) -> list[ir.Stmt]:
        head, tail = self.split(pieces=1)
        own: dict[tuple[str, Access], ir.Buffer] = {}
        first = self.segment(head, Constant(0), PIECE, own)
        steps = self.segment(self.group, INDEX + 1, PIECE, {})
        last = self.segment(tail, Constant(0), PIECE, own)
        work = (
            *self.on_own_stream(first),
            self.work_with_others(steps),
            *self.on_own_stream(last),
            # The device's own term is the first of each total.
            ir.Synchronize(stream=OWN),
            *self.totals(),
            *self.segment(self.back, Constant(0), PIECE, {}),
            self.send_back(),
        )
        return [
            *self.before,
            ir.GetCurrentStream(stream=MAIN),
            self.start(),
            *self.on_own_stream([ir.Synchronize(stream=MAIN)]),
            ir.For(index=PIECE.name, extent=self.pieces, body=work),
            ir.For(
                index=INDEX.name,
                extent=self.others,
                body=(ir.Synchronize(stream=self.way_back),),
            ),
            *self.after,
        ]

    # --- Streams -------------------------------------------------------------- #

    def start(self) -> ir.For:
        """The streams of the steps wait for everything before the loop."""
        body = on_stream(ir.Stream(index=INDEX), [ir.Synchronize(stream=MAIN)])
        return ir.For(index=INDEX.name, extent=self.used, body=body)

    def work_with_others(self, body: list[ir.Stmt]) -> ir.For:
        """The steps of a piece, which take turns on queues, and are waited for."""
        # Counted through all pieces: a piece's first step takes the next stream in
        # turn, and need not wait for the first step of the piece before.
        number: Index = PIECE * self.others + INDEX
        stream = ir.Stream(index=number % self.used)
        step = (*on_stream(stream, body), ir.Synchronize(stream=stream))
        return ir.For(index=INDEX.name, extent=self.others, body=step)

    def send_back(self) -> ir.For:
        """Send a piece's total to the others, on streams without computations."""
        body = self.segment(self.back, INDEX + 1, PIECE, {})
        sent = on_stream(self.way_back, [ir.Synchronize(stream=MAIN), *body])
        return ir.For(index=INDEX.name, extent=self.others, body=sent)

    @property
    def way_back(self) -> ir.Stream:
        """The stream for the gather to one other device, behind the steps' streams."""
        return ir.Stream(index=INDEX + self.used)

    # --- Totals --------------------------------------------------------------- #

    def total(self, stmt: ir.Communicate) -> None:
        """Append the sum of the terms of the current piece."""
        assert stmt.dim is not None
        self.allocate(stmt.out)
        terms = self.terms[stmt.out.name]
        steps = [self.slot(terms, Constant(k)) for k in range(self.devices)]
        ins = tuple(self.piece_of(term, stmt) for term in steps)
        window, unit = self.window(1), self.unit_of_total(stmt)
        compute = ir.Compute(
            unit=dataclasses.replace(
                unit, eqns=tuple(_along(eqn, stmt.dim) for eqn in unit.eqns)
            ),
            ins=ins,
            outs=(self.piece_of(stmt.out, stmt),),
            chunk=ir.Chunk(start=window.start, size=window.size, extent=window.extent),
        )
        self.body.append(compute)


def _along(unit_eqn: ir.UnitEqn, dim: int) -> ir.UnitEqn:
    """An elementwise equation that works on chunks of `dim`."""
    (result,) = unit_eqn.rule.results
    mapped = result[dim]
    assert mapped is not None
    return dataclasses.replace(unit_eqn, stream=mapped.factor)


# --- Which gathers ---------------------------------------------------------------- #


def ways_back(
    graph: Graph, choice: Pipelining, mesh: Mapping[str, int]
) -> dict[int, Node]:
    """For each gather of a sum that the loop does not contract, by identity, the sum.

    A gather that the loop contracts has that contraction to run beside.
    """
    # A single piece has no next one whose steps could hide its way back.
    single = choice.chunks == choice.owners(mesh)
    if choice.pipeline != "p2p" or choice.across or single:
        return {}
    parts = choice.participations
    nodes = [(graph[number], part) for number, part in parts.items()]
    sums = {node.writes[0].name: node for node, part in nodes if part.ratio < 1}
    return {
        id(node): sums[node.reads[0].name]
        for node, part in nodes
        if part.ratio > 1
        and node.reads[0].name in sums
        and not _is_contracted(node, graph, parts.keys())
    }


def _is_contracted(gather: Node, graph: Graph, members: Set[int]) -> bool:
    """Whether the gathered value reaches a contraction among the `members`."""
    waiting, seen = [gather], set[int]()
    while waiting:
        made = waiting.pop().writes
        readers = {n for b in made for n in graph.readers.get(b.name, ())} & members
        waiting += [graph[number] for number in sorted(readers - seen)]
        seen |= readers
        if any(has_contraction(graph[number].stmt) for number in readers):
            return True
    return False
