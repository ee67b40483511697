"""The order in which the iterations of a loop are issued, one stage at a time.

Iterations that take turns on streams have no order between them, but a GPU has one
queue for computations.  If each iteration were issued whole, what it computes before a
communication would wait for all that the iteration before computes after its own.  Then
nothing would be left to run beside either communication.

So a loop is cut into stages.  A cut is where a communication is waited for that has no
work beside it in its own iteration.  Iterations are staggered: one is a stage ahead of
the next, whose work hides the communication between two stages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import Aliases, reads_writes
from jhost.lowering.ir.index import LoopIndex, evaluate, leaves
from jhost.lowering.schedule.blocks import contracts


def in_stages(loop: ir.For, memory: Mapping[str, Hashable]) -> ir.For:
    """`loop` cut into stages, with their order, where that hides something.

    `memory` has what each name stands for that is there before the loop.
    """
    stages = _stages(loop, memory)
    order = [*_staggered(loop, len(stages))]
    # As it stands it is issued like that, and its text stays a plain loop.
    if order == sorted(order):
        return loop
    body = [stmt for stage in stages for stmt in (ir.NextStage(), *stage)][1:]
    return dataclasses.replace(loop, body=tuple(body), order=tuple(order))


def _staggered(loop: ir.For, stages: int) -> Iterator[tuple[int, int]]:
    """Each iteration a stage ahead of the next, on one stream one after another."""
    starts: list[int] = []
    free: dict[int, int] = {}
    for iteration in range(loop.extent):
        stream = _stream(loop, iteration) if stages > 1 else 0
        begin = max(free.get(stream, 0), starts[-1] + 1 if starts else 0)
        starts.append(begin)
        free[stream] = begin + stages
    places = [
        (starts[iteration] + stage, stage, iteration)
        for iteration in range(loop.extent)
        for stage in range(stages)
    ]
    # Early stages first: what they send then runs beside the late ones of others.
    for _, stage, iteration in sorted(places):
        yield iteration, stage


# --- Stages ----------------------------------------------------------------------- #


def _stages(loop: ir.For, memory: Mapping[str, Hashable]) -> list[tuple[ir.Stmt, ...]]:
    """The body, cut where iterations can be staggered."""
    if not _takes_turns(loop):
        return [loop.body]
    enter, *work, leave, join = loop.body
    touches = _Touches(loop, memory)
    cuts = [cut for cut in _cuts(work) if touches.independent(work[:cut], work[cut:])]
    parts = [work[a:b] for a, b in zip([0, *cuts], [*cuts, len(work)], strict=True)]
    # Each goes to its stream by itself: other iterations have their turn in between.
    stages = [(enter, *part, leave) for part in parts]
    return [*stages[:-1], (*stages[-1], join)]


def _takes_turns(loop: ir.For) -> bool:
    """Whether each iteration is all on one stream, which is then waited for."""
    match loop.body:
        case (
            ir.SetCurrentStream(stream=stream),
            *work,
            ir.SetCurrentStream(),
            ir.Synchronize(stream=joined),
        ):
            others = ir.SetCurrentStream | ir.Synchronize | ir.For
            known = leaves(stream.index) <= {LoopIndex(loop.index)}
            plain = not any(isinstance(stmt, others) for stmt in work)
            # Its stream has to follow from the index alone: the order is made before it
            # runs.
            return not stream.name and stream == joined and known and plain
        case _:
            return False


def _stream(loop: ir.For, iteration: int) -> int:
    first = loop.body[0]
    assert isinstance(first, ir.SetCurrentStream)
    return evaluate(first.stream.index, {LoopIndex(loop.index): iteration})


def _cuts(work: Sequence[ir.Stmt]) -> list[int]:
    """Before waits for what has no work beside it, between two computations."""
    # Behind the last computation nothing is left that a cut could hide.
    last = max(
        (i for i, stmt in enumerate(work) if isinstance(stmt, ir.Compute)), default=0
    )
    cuts: list[int] = []
    sent: set[str] = set()
    computed = False
    for number, stmt in enumerate(work[:last]):
        match stmt:
            case ir.Compute():
                sent = set() if contracts([stmt]) else sent
                computed = True
            case ir.Communicate(name=name):
                sent.add(name)
            case ir.Wait(communication=name) if name in sent and computed:
                cuts.append(number)
                computed = False
            case _:
                pass
    return cuts


# --- What iterations share -------------------------------------------------------- #


class _Touches:
    """The memory from outside that the statements of a loop's body touch."""

    def __init__(self, loop: ir.For, memory: Mapping[str, Hashable]) -> None:
        self.loop = loop
        self.memory = memory
        self.aliases = Aliases(loop.body)

    def independent(self, before: Sequence[ir.Stmt], after: Sequence[ir.Stmt]) -> bool:
        """Whether an iteration may do `before` ahead of another's `after`.

        What both touch, and one writes, must be another part in each iteration.
        """
        early, early_written = self.of(before)
        late, late_written = self.of(after)
        shared = (early.keys() & late_written) | (late.keys() & early_written)
        return all(self.differs(early[m] | late[m]) for m in shared)

    def of(
        self, body: Sequence[ir.Stmt]
    ) -> tuple[dict[Hashable, set[ir.Select | None]], set[Hashable]]:
        """The aliases by which each memory is touched, and the written memories."""
        by: dict[Hashable, set[ir.Select | None]] = {}
        written: set[Hashable] = set()
        for stmt in body:
            reads, writes = (
                ([], []) if isinstance(stmt, ir.Select) else reads_writes(stmt)
            )
            for buffer in (*reads, *writes):
                memory, alias = self.place(buffer.name)
                if memory is not None:
                    by.setdefault(memory, set()).add(alias)
                    written |= {memory} if buffer in writes else set()
        return by, written

    def place(self, name: str) -> tuple[Hashable | None, ir.Select | None]:
        """The memory from outside that a name reaches, and the alias right of it."""
        alias = None
        for alias in self.aliases.through(name):
            name = alias.source.name
        return self.memory.get(name), alias

    def differs(self, aliases: set[ir.Select | None]) -> bool:
        """Whether all is touched in one place, which moves on with the loop."""
        places = {
            a and (a.source.name, a.dim, a.index, a.size, a.groups) for a in aliases
        }
        (alias, *_), one = aliases, len(places) == 1
        here = LoopIndex(self.loop.index)
        if (
            alias is None
            or not one
            or not leaves(alias.index) | leaves(alias.size) <= {here}
        ):
            return False
        # Parts that move on and never overlap need no order between iterations.
        spans = [
            (evaluate(alias.index, {here: i}), evaluate(alias.size, {here: i}))
            for i in range(self.loop.extent)
        ]
        return all(
            start + size <= following
            for (start, size), (following, _) in itertools.pairwise(spans)
        )
