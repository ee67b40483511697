"""Decides which statements share a loop, and writes each group of them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.graph import Graph, Group, Node, written_by
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.requests import stream_choices, unpipelined_values
from jhost.lowering.ir.rewrite import replace_buffers
from jhost.lowering.ir.statements import Buffer, Communicate, Compute, Stmt
from jhost.lowering.loops.all_reduce import AllReduceLoop, ways_back
from jhost.lowering.loops.chunk import ChunkLoop, LoopSpec
from jhost.lowering.loops.collective import CollectiveLoop
from jhost.lowering.loops.edges import halos_in, whole_windows
from jhost.lowering.loops.p2p import P2PLoop
from jhost.lowering.loops.pipelining import Pipelining
from jhost.lowering.loops.skewed import SkewedLoop
from jhost.lowering.loops.whole_shard_loop import WholeShardLoop
from jhost.lowering.loops.windowed import WindowedLoop
from jhost.lowering.loops.zigzag import (
    ZigzagLoop,
    dims_in_zigzag_order,
    is_causal,
    share_of_work,
)
from jhost.lowering.schedule.beside_last_sends import beside_last_sends
from jhost.lowering.schedule.recompute.gathers import gathers_again
from jhost.lowering.schedule.shards_ahead import IssuedAhead, WorkAhead
from jhost.lowering.schedule.waiting_contractions import WaitingContractions
from jhost.lowering.streams.participation import Participation, rule_of
from jhost.lowering.units.make import barrier_of, type_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The statements and the results of a program with loops, and notes on them."""

    body: tuple[Stmt, ...]
    results: tuple[Buffer, ...]
    notes: tuple[Note, ...]


class LoopBuilder:
    """Decides which nodes share a loop, and lowers each group."""

    def __init__(
        self,
        program: Program,
        graph: Graph,
        choices: Mapping[str, Pipelining],
        extents: Mapping[str, int],
        streams: int,
    ) -> None:
        self.program = program
        self.unpipelined = unpipelined_values(program)
        self.marked = {
            mark.buffer for mark in stream_choices(program)
        } - self.unpipelined
        self.graph = graph
        self.mesh = dict(program.mesh.shape)
        self.choices = choices
        self.extents = extents
        self.streams = streams
        self.participations = {
            id(graph[number]): part
            for choice in choices.values()
            for number, part in choice.participations.items()
        }
        self.halos = halos_in(graph, lambda node: self.participations.get(id(node)))
        self.back = {
            gather: of_sum
            for choice in choices.values()
            for gather, of_sum in ways_back(graph, choice, self.mesh).items()
        }
        self.contractions = WaitingContractions(
            graph,
            (n for choice in choices.values() for n in choice.beside),
            self.participations,
        )
        self.adding: list[Group] = []
        self.beside: dict[int, list[Group]] = {}
        """By a loop's first node, the groups beside its last sends."""
        self.loops: dict[int, ChunkLoop | WholeShardLoop | None] = {}
        """The loops that were made, by the identity of the first node."""
        self.streamed: dict[str, Buffer] = {}
        self.ordered: dict[str, Buffer] = {}
        self.out_of_order: dict[str, list[Stmt]] = {}
        self.notes: list[Note] = []

    @functools.cached_property
    def names(self) -> FreshNames:
        return FreshNames.of(self.program)

    # --- Which nodes ---------------------------------------------------------- #

    def order(self) -> Sequence[Set[int]]:
        """The nodes that each node must follow; in a stream, its barrier's too."""
        makers, before = self.graph.makers, [*self.graph.before]
        # `jax.checkpoint` needs the barrier's other operands: a value that is computed
        # again has to wait for its cotangent, or XLA would keep it from the forward on.
        for number, node in enumerate(self.graph):
            if id(node) in self.participations:
                found = {makers.get(name, number) for name in node.barrier}
                before[number] = before[number] | {n for n in found if n < number}
        return before

    def should_merge(self, group: Group, joining: Group) -> bool:
        """Whether two groups share a loop; outside of loops, pieces of a barrier do.

        Their nodes are of one kind: see `kind_of`.
        """
        return id(group[0]) not in self.participations or self.should_share_loop(
            group, joining
        )

    def kind_of(self, node: Node) -> str | tuple[str, ...] | None:
        """The stream that a node joins; outside of streams its barrier, or None."""
        part = self.participations.get(id(node))
        return part.stream if part else node.barrier or None

    def should_share_loop(self, group: Group, joining: Group) -> bool:
        """Whether values pass from one group to the other chunk by chunk."""
        members = {id(node) for node in (*group, *joining)}
        sums = (self.back.get(id(node), node) for node in joining)
        if any(id(of_sum) not in members for of_sum in sums):
            return False  # a total is gathered in the loop that makes its sum
        # A second gather of a value is for work behind the first gather's work, so it
        # needs a loop of its own.
        if gathers_again(joining, group):
            return False
        if not all(
            self.aligned(maker, user)
            for user in joining
            for maker in self.makers(user)
            if id(maker) in members
        ):
            return False
        # Attention may have its sequence in another order than windows need.
        nodes = (*group, *joining)
        return not (
            any(id(node) in self.halos for node in nodes)
            and any(rule.window for rule in filter(None, map(rule_of, nodes)))
        )

    def makers(self, user: Node) -> Iterator[Node]:
        """The nodes that make what `user` reads or, for a barrier, waits for."""
        names = dict.fromkeys((*(buffer.name for buffer in user.reads), *user.barrier))
        makers = self.graph.makers
        return (self.graph[makers[name]] for name in names if name in makers)

    def aligned(self, maker: Node, user: Node) -> bool:
        """Whether `user` reads what `maker` writes in the same chunks."""
        made, used = self.participation(maker), self.participation(user)
        # `late`: a total is complete only behind the loop, when the last device's term
        # is there, and a gathered total comes while the loop already goes on.
        sums = self.choices[made.stream].pipeline == "p2p" and made.ratio < 1
        late = id(maker) in self.back or (sums and id(user) not in self.back)
        if late and any(written.name in user.barrier for written in maker.writes):
            return False
        return all(
            not late and made.writes.get(position) == used.reads.get(index) is not None
            for position, written in enumerate(maker.writes)
            for index, read in enumerate(user.reads)
            if written.name == read.name
        )

    # --- Lowering ------------------------------------------------------------- #

    def body(self, groups: Sequence[Group]) -> Iterator[Stmt]:
        """The statements of all groups and, between them, waiting contractions."""
        if not self.participations:  # most often: nothing is pipelined, nothing waits
            return itertools.chain(*map(self.statements, groups))
        return self.with_loops(groups)

    def with_loops(self, groups: Sequence[Group]) -> Iterator[Stmt]:
        streamed = [g for g in groups if id(g[0]) in self.participations]
        self.adding = self.contractions.made_last(streamed)
        ahead = [*self.issued_ahead(groups)]
        groups = _without(groups, (group for each in ahead for group in each.along))
        self.find_beside(groups)
        groups = _without(groups, itertools.chain(*self.beside.values()))
        for group in self.contractions.in_order(groups):
            for each in ahead:
                if each.work is group:
                    yield from self.ahead(each)
            yield from self.lower(group)

    def find_beside(self, groups: Sequence[Group]) -> None:
        """Find the groups that stand beside the last sends of each loop."""
        order = WorkAhead(groups, self.contractions)
        given = {param.name for param in self.program.params}
        for group in groups:
            if id(group[0]) in self.participations:
                found = beside_last_sends(order, group, given)
                loop = self.loop(group) if found else None
                if isinstance(loop, P2PLoop) and loop.ends_alone:
                    self.beside[id(group[0])] = found

    def issued_ahead(self, groups: Sequence[Group]) -> Iterator[IssuedAhead]:
        """The transfers that are issued in front of their loops."""
        order = WorkAhead(groups, self.contractions)
        for group in self.adding:
            if isinstance(loop := self.loop(group), WholeShardLoop):
                yield from order.ahead(group, *loop.turns[0])

    def ahead(self, ahead: IssuedAhead) -> Iterator[Stmt]:
        for group in ahead.along:
            yield from self.lower(group)
            self.contractions.made(group)
        loop = self.loop(ahead.loop)
        assert isinstance(loop, WholeShardLoop)
        yield from loop.ahead(ahead.transfer, ahead.shards)

    def lower(self, group: Group) -> list[Stmt]:
        """The statements of `group`, behind the exchanges that its operands need."""
        statements = self.statements(group)
        read = {buffer.name for stmt in statements for buffer in reads_writes(stmt)[0]}
        return [*self.in_order(read), *statements]

    def statements(self, group: Group) -> list[Stmt]:
        """The statements of `group`, as a loop if it is of a stream."""
        streamed = id(group[0]) in self.participations
        # Only pieces of one barrier merge outside of loops: see `should_merge`.
        if len(group) > 1 and not streamed:
            return [self.barrier(group)]
        loop = self.loop(group) if streamed else None
        if loop is None:
            return [stmt for node in group for stmt in node.stmts]
        for beside in self.beside.get(id(group[0]), ()):
            assert isinstance(loop, P2PLoop)
            loop.beside += self.statements(beside)
            self.contractions.made(beside)
        statements = loop.statements()
        self.streamed |= loop.filled
        if isinstance(loop, ZigzagLoop):
            # Exchanged back later, and only if something reads it in order of position.
            self.out_of_order |= loop.exchanged_back()
        return statements

    def in_order(self, names: Set[str]) -> list[Stmt]:
        """The statements that exchange these values back into order of position."""
        wanted = self.out_of_order.keys() & names
        return [stmt for name in sorted(wanted) for stmt in self.out_of_order.pop(name)]

    def barrier(self, pieces: Group) -> Compute:
        """One barrier for all its pieces."""
        ins = tuple(buffer for node in pieces for buffer in node.reads)
        name = self.names.fresh("optimization_barrier")
        # One operation: a piece by itself would wait for its own operand only.
        unit = barrier_of(name, *map(type_of, ins))
        outs = tuple(buffer for node in pieces for buffer in node.writes)
        return Compute(unit=unit, ins=ins, outs=outs)

    def loop(self, group: Group) -> ChunkLoop | WholeShardLoop | None:
        """The loop of a group, made once; None if it needs no loop."""
        if id(group[0]) not in self.loops:
            self.loops[id(group[0])] = self.new_loop(group)
        return self.loops[id(group[0])]

    def new_loop(self, group: Group) -> ChunkLoop | WholeShardLoop | None:
        stream = self.participation(group[0]).stream
        choice = self.choices[stream]
        if choice.across:
            choice = self.along_fewest(choice, group)
        if self.is_unpipelined(group):
            return None
        spec = LoopSpec(
            nodes=group,
            participations=self.participations,
            leaving=self.leaving(group),
            stream=stream,
            extent=self.extents[stream],
            choice=choice,
            mesh=self.mesh,
            streams=self.streams,
            names=self.names,
        )
        if choice.pipeline == "collective":
            return CollectiveLoop(spec)
        if all(self.participation(node).ratio == 1 for node in group):
            self.notes += whole_windows(group, self.halos)
            return None  # no transfer moves a chunk
        if not (choice.by_name or self.works(group)):
            return None  # nothing would run beside what comes and goes
        if spec.choice.across:
            return SkewedLoop(spec)
        back = self.back.keys() & {id(node) for node in group}
        if back:
            return AllReduceLoop(spec, back)
        if is_causal(spec):
            return self.balanced(spec)
        # If more chunks than devices are asked for, they are made.
        if group in self.adding and choice.chunks == choice.owners(self.mesh):
            return WholeShardLoop(spec, self.contractions)
        if any(id(node) in self.halos for node in group):
            return WindowedLoop(spec)
        return P2PLoop(spec)

    def works(self, group: Group) -> bool:
        """Whether work stands beside a group's transfers: in it, or for it.

        XLA fuses other computations into their readers, and a loop would write them.
        """
        return group in self.adding or any(has_contraction(n.stmt) for n in group)

    def along_fewest(self, choice: Pipelining, group: Group) -> Pipelining:
        """A choice of two groups of axes; of one, for a loop that needs no other."""
        stmts = [n.stmt for n in group if self.participation(n).ratio != 1]
        moved = {stmt.axes for stmt in stmts if isinstance(stmt, Communicate)}
        one = next(iter(moved), ())
        # A shard of several chunks would come in several steps.
        if len(moved) > 1 or axes_size(one, self.mesh) != choice.owners(self.mesh):
            return choice
        return dataclasses.replace(choice, axes=one, across=())

    def leaving(self, group: Group) -> Set[str]:
        """The values of a group that other nodes, or the caller, read."""
        inside = {id(node) for node in group}
        results = {result.name for result in self.program.results}
        made = written_by(group)
        return {
            name
            for name in made
            if name in results
            or any(
                id(self.graph[n]) not in inside
                for n in self.graph.readers.get(name, ())
            )
        }

    def balanced(self, spec: LoopSpec) -> P2PLoop:
        """A loop over keys that not all queries see, in zigzag order if it can be."""
        dims = dims_in_zigzag_order(spec)
        self.notes.append(share_of_work(spec, dims))
        if isinstance(dims, str):
            return P2PLoop(spec)
        return ZigzagLoop(spec, dims, self.ordered)

    def is_unpipelined(self, group: Group) -> bool:
        """Whether marks ask for no loop here, and no mark asks for one."""
        made = written_by(group)
        return bool(made & self.unpipelined) and not made & self.marked

    def built(self, groups: Sequence[Group]) -> Built:
        """All groups lowered, with streamed buffers shown as streamed everywhere."""
        body = [*self.body(groups)]
        body += self.in_order({buffer.name for buffer in self.program.results})
        return Built(
            body=tuple(replace_buffers(stmt, self.streamed) for stmt in body),
            results=tuple(self.streamed.get(b.name, b) for b in self.program.results),
            notes=tuple(self.notes),
        )

    def participation(self, node: Node) -> Participation:
        return self.participations[id(node)]


def _without(groups: Sequence[Group], gone: Iterable[Group]) -> list[Group]:
    """The groups that are not `gone`; a group is known by its first node."""
    first = {id(group[0]) for group in gone}
    return [group for group in groups if id(group[0]) not in first]
