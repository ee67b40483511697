"""Turn streams into loops: a statement in a loop works on one chunk at a time.

Statements of one stream share a loop wherever the dependency graph lets them.  Two
things split a loop in two: a statement outside of the stream, on a path between two of
its statements; and a value that one statement makes in chunks and another needs whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jhost.lowering.ir.bodies import EachProgram, is_alike
from jhost.lowering.ir.derived import Shared
from jhost.lowering.ir.graph import Graph, Group, merge_groups
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute
from jhost.lowering.loops.builder import Built, LoopBuilder
from jhost.lowering.loops.pipelining import Pipelining
from jhost.lowering.loops.planned import check_no_mark_is_lost, planned
from jhost.lowering.schedule.recompute.gathers import with_gathers_again
from jhost.lowering.streams.plan import with_plan_of


@dataclasses.dataclass(frozen=True, slots=True)
class _LoopGroups:
    """Which nodes of a program share loops, if its streams get what `made` says.

    `built` has the programs with these loops.  Its key says, for each group, whether
    marks ask for no loop there.
    """

    program: Program
    graph: Graph
    made: Mapping[str, Pipelining]
    extents: Mapping[str, int]
    groups: Sequence[Group]
    built: dict[tuple[bool, ...], Built] = dataclasses.field(
        default_factory=dict[tuple[bool, ...], Built]
    )

    def are_of(
        self,
        program: Program,
        made: Mapping[str, Pipelining],
        extents: Mapping[str, int],
    ) -> bool:
        """Whether these groups hold for a program with such streams."""
        alike = is_alike(self.program, program)
        return alike and self.made == made and self.extents == extents


@dataclasses.dataclass(frozen=True, slots=True)
class LowerStreams(EachProgram):
    """Straight-line statements with stream marks -> statements and loops.

    `streams` is the number of queues that a loop's iterations take turns on.  A strict
    program refuses a stream that cannot get a loop; any other leaves it unpipelined.
    """

    name: ClassVar[str] = "lower_streams"

    streams: int = 4
    strict: bool = True
    known: Shared[_LoopGroups] = dataclasses.field(
        default_factory=Shared[_LoopGroups], compare=False, repr=False
    )

    def change(self, program: Program) -> Program:
        if self.strict:
            check_no_mark_is_lost(program)
        # Without marks nothing can have a stream: the program is as it was.
        if not program.marks:
            return program
        streams = planned(program, self.strict)
        program, graph = streams.program, streams.graph
        again = with_gathers_again(program, graph, streams.pipelined)
        # The graph has new nodes, which may join streams, so all is planned anew.
        if again is not program:
            return self.change(with_plan_of(program, again))
        built = self.built(program, graph, streams.made, streams.plan.extents)
        return dataclasses.replace(
            program,
            body=built.body,
            results=built.results,
            marks=(),
            remarks=(*program.remarks, *streams.remarks(), *built.notes),
        )

    def built(
        self,
        program: Program,
        graph: Graph,
        made: Mapping[str, Pipelining],
        extents: Mapping[str, int],
    ) -> Built:
        """The loops of a program, which an earlier candidate may have had already."""
        made = {s: _as_built(each, graph) for s, each in made.items()}
        known = self.known.of(program)
        loops = next((e for e in known if e.are_of(program, made, extents)), None)
        if loops is None:
            builder = LoopBuilder(program, graph, made, extents, self.streams)
            groups = merge_groups(
                graph, builder.order(), builder.should_merge, builder.kind_of
            )
            loops = _LoopGroups(program, graph, made, extents, groups)
            known.append(loops)
        builder = LoopBuilder(program, loops.graph, loops.made, extents, self.streams)
        unpipelined = tuple(map(builder.is_unpipelined, loops.groups))
        if unpipelined not in loops.built:
            loops.built[unpipelined] = builder.built(loops.groups)
        return loops.built[unpipelined]


def _as_built(choice: Pipelining, graph: Graph) -> Pipelining:
    """A choice without what makes no difference to loops, so that equal ones compare.

    Zigzag order matters only where a window hides keys.  The place of sums is in the
    participations already.
    """
    stmts = (graph[number].stmt for number in choice.participations)
    computes = (stmt for stmt in stmts if isinstance(stmt, Compute))
    windows = any(each.rule.window for stmt in computes for each in stmt.unit.eqns)
    zigzag = choice.spec.zigzag or not windows
    spec = dataclasses.replace(choice.spec, zigzag=zigzag, sums="in chunks")
    return dataclasses.replace(choice, reason="", spec=spec)
