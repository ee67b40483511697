"""The order in which the iterations of a loop are issued, one stage at a time.

Iterations on different streams have no order between them, but a GPU has one queue for
computations.  Suppose that each iteration were issued whole.  The work that iteration
i + 1 does before its communication would wait for the work that iteration i does after
its own.  No work would be left to run beside either communication.

So a loop is cut into stages.  A cut is before the wait for a communication that has no
work beside it in its own iteration.  Iterations are staggered: each is a stage ahead of
the next one, whose work hides the communication between two stages.
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

    `memory` has the memory behind each name from before the loop.
    """
    stages = _stages(loop, memory)
    order = [*_staggered(loop, len(stages))]
    # A loop without an order is issued like this anyway, and its text stays simple.
    if order == sorted(order):
        return loop
    body = [stmt for stage in stages for stmt in (ir.NextStage(), *stage)][1:]
    return dataclasses.replace(loop, body=tuple(body), order=tuple(order))


def _staggered(loop: ir.For, stages: int) -> Iterator[tuple[int, int]]:
    """The order of (iteration, stage): each iteration is a stage ahead of the next.

    Iterations on one stream come one after another.
    """
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
    # At one time early stages come first: what they send then moves beside the late
    # stages of other iterations.
    for _, stage, iteration in sorted(places):
        yield iteration, stage


# --- Stages ----------------------------------------------------------------------- #


def _stages(loop: ir.For, memory: Mapping[str, Hashable]) -> list[tuple[ir.Stmt, ...]]:
    """The body, cut where iterations can be staggered."""
    if not _is_round_robin(loop):
        return [loop.body]
    enter, *work, leave, join = loop.body
    accesses = _Accesses(loop, memory)
    cuts = [cut for cut in _cuts(work) if accesses.independent(work[:cut], work[cut:])]
    parts = [work[a:b] for a, b in zip([0, *cuts], [*cuts, len(work)], strict=True)]
    # Each stage switches to its stream by itself, because stages of other iterations
    # come in between.
    stages = [(enter, *part, leave) for part in parts]
    return [*stages[:-1], (*stages[-1], join)]


def _is_round_robin(loop: ir.For) -> bool:
    """Whether each iteration is on one stream, and ends with a wait for that stream."""
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
            # The order is made before the loop runs, so the stream has to follow from
            # the loop's index alone.
            return not stream.name and stream == joined and known and plain
        case _:
            return False


def _stream(loop: ir.For, iteration: int) -> int:
    first = loop.body[0]
    assert isinstance(first, ir.SetCurrentStream)
    return evaluate(first.stream.index, {LoopIndex(loop.index): iteration})


def _cuts(work: Sequence[ir.Stmt]) -> list[int]:
    """Places before waits for transfers that have no work beside them."""
    # Behind the last computation there is no work that a cut could put beside a
    # transfer.
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


class _Accesses:
    """Which memory from outside of a loop the statements of its body touch."""

    def __init__(self, loop: ir.For, memory: Mapping[str, Hashable]) -> None:
        self.loop = loop
        self.memory = memory
        self.aliases = Aliases(loop.body)

    def independent(self, before: Sequence[ir.Stmt], after: Sequence[ir.Stmt]) -> bool:
        """Whether an iteration may run `before` ahead of another iteration's `after`.

        Memory that both touch, and one writes, must be another part in each iteration.
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
        """The memory from outside behind a name, and the alias that reads from it."""
        alias = None
        for alias in self.aliases.through(name):
            name = alias.source.name
        return self.memory.get(name), alias

    def differs(self, aliases: set[ir.Select | None]) -> bool:
        """Whether all aliases are one part, which is another part in each iteration."""
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
        # Parts that move forward and never overlap need no order between iterations.
        spans = [
            (evaluate(alias.index, {here: i}), evaluate(alias.size, {here: i}))
            for i in range(self.loop.extent)
        ]
        return all(
            start + size <= following
            for (start, size), (following, _) in itertools.pairwise(spans)
        )
