"""Products that move beside an exposed transfer of their own program or iteration.

`order.py` keeps the order of work.  So a transfer that is read at once has nothing
beside it there, even where some product neither makes its source nor waits for it.  For
example, JAX computes the gradient of a weight before the gradient of the activations,
and the next layer waits for the latter's sum over devices.

Such a product moves to the place before the reader of the transfer.  Cheap values and
sums over devices that are made of it before that place move along.  So do cheap
statements that make its operands.  No product moves that is the only work beside some
other transfer, or past more than a few works, because its operands take memory.  Nor
does one whose sum would have only a body beside it: 8B over dp x tp took 0.9 GB more.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.queues import on_own
from jhost.lowering.schedule.blocks import (
    blocks_of,
    work_of,
)
from jhost.lowering.schedule.intervals import (
    GATHERING,
    SUMS,
    IsOpen,
    hides,
    ready_at,
)

_PAST = 8
"""A product moves past at most so many works."""


@dataclasses.dataclass(frozen=True, slots=True)
class MovedWork:
    """A product and the exposed transfer that it moves beside."""

    product: ir.Compute
    beside: ir.Communicate


def with_work_moved(
    program: Program, is_open: IsOpen
) -> tuple[Program, list[MovedWork]]:
    """`program` with work moved beside its exposed transfers; itself if none is."""
    # Most programs have no such transfer, and blocks take long to make.
    if not any(isinstance(s, ir.Communicate) and is_open(s) for s in program.body):
        return program, []
    order = WorkOrder(program, is_open)
    moved = [*order.moved()] if order.has_exposed() else []
    if not moved:
        return program, []
    products = {id(each.product) for each in moved}
    every = enumerate(order.blocks.all)
    own = {number for number, block in every if id(block.stmts[0]) in products}
    return order.program(program, own), moved


@dataclasses.dataclass(frozen=True, slots=True)
class _BesideTransfer:
    """The works that stand beside a transfer as it is, from its issue to its reader.

    `reader` is a block, or the number of blocks if no block waits for the transfer.
    """

    stmt: ir.Communicate
    reader: int
    works: list[int]


class WorkOrder:
    """The blocks of a program in their new order; all blocks are numbers of the old.

    `place` has the position of each block, and at last the position of the end.
    """

    def __init__(self, program: Program, is_open: IsOpen) -> None:
        self.blocks = blocks_of(program)
        self.order = [*range(len(self.blocks.all))]
        self.place = [*self.order, len(self.order)]
        self.open = {
            number: stmt
            for number, stmt in self.blocks.transfers
            if stmt.kind in (*GATHERING, *SUMS) and is_open(stmt)
        }
        self.works: dict[ir.CommunicationKind, Set[int]] = {}
        self.windows: dict[int, _BesideTransfer] = {}
        """By a transfer's block, if the transfer has work beside it."""

    def has_exposed(self) -> bool:
        """Find the windows; whether some transfer has none."""
        for number in self.open:
            self.keep_window(number)
        return len(self.windows) < len(self.open)

    def moved(self) -> Iterator[MovedWork]:
        """Move a product beside each exposed transfer that has one."""
        # A list, because each move gives windows to transfers.
        for number in [n for n in self.open if n not in self.windows]:
            window = self.window(number)
            # A move before may have put work beside this transfer as well.
            product = None if window.works else self.moved_beside(number, window)
            if product is not None:
                yield MovedWork(product, window.stmt)
            self.keep_window(number)

    def program(self, program: Program, own: Set[int] = frozenset()) -> Program:
        """`program` in the new order, with its `own` blocks on the stream for work."""
        stmts = [
            stmt
            for number in self.order
            for block in [self.blocks.all[number].stmts]
            # XLA keeps only the order that streams have.
            for stmt in (on_own(block) if number in own else block)
        ]
        body = tuple(self.blocks.barriers.together(stmts))
        return dataclasses.replace(program, body=body)

    def keep_window(self, number: int) -> None:
        window = self.window(number)
        if window.works:
            self.windows[number] = window

    # --- Windows -------------------------------------------------------------- #

    def window(self, number: int) -> _BesideTransfer:
        """The window of a transfer as the order is."""
        stmt, blocks = self.open[number], self.blocks
        issued = {each: window.works[0] for each, window in self.windows.items()}
        ready, reader = ready_at(blocks, stmt, issued, self.place), self.reader(number)
        inside = self.order[ready + 1 : self.place[reader]]
        hiding = self.hiding(stmt.kind)
        works = [each for each in inside if each in hiding]
        return _BesideTransfer(stmt, reader, works)

    def hiding(self, kind: ir.CommunicationKind) -> Set[int]:
        """The works that a transfer of a kind may stand beside."""
        if kind not in self.works:
            every = enumerate(self.blocks.all)
            self.works[kind] = {n for n, block in every if hides(block, kind)}
        return self.works[kind]

    def reader(self, number: int) -> int:
        """The first block behind a transfer that reads it and cannot wait."""
        behind = self.order[self.place[number] + 1 :]
        return self.blocks.first_reader(self.open[number], behind)

    # --- Moves ---------------------------------------------------------------- #

    def moved_beside(self, number: int, window: _BesideTransfer) -> ir.Compute | None:
        """The largest product that there is, moved before the reader of a transfer."""
        place = self.place[window.reader]
        found = [*self.from_before(number, place), *self.from_behind(number, place)]
        if not found:
            return None
        moved = max(found, key=lambda each: work_of(self.blocks.all[each[0]].compute))
        self.move(set(moved), place)
        return self.blocks.all[moved[0]].compute

    def move(self, numbers: set[int], place: int) -> None:
        """Move blocks, in their order, to a place."""
        some = [n for n in self.order if n in numbers]
        before, behind = (
            [n for n in part if n not in numbers]
            for part in (self.order[:place], self.order[place:])
        )
        self.order = [*before, *some, *behind]
        for position, each in enumerate(self.order):
            self.place[each] = position
        for window in self.windows.values():
            window.works[:] = [n for n in window.works if n not in numbers]
        # A sum that moved has other work beside it now.
        for each in self.windows.keys() & numbers:
            self.keep_window(each)

    def near(self, numbers: Sequence[int]) -> Iterator[int]:
        """The products among the first works, but for those that have to stay."""
        every = (n for n in numbers if self.blocks.all[n].works)
        works = [*itertools.islice(every, _PAST)]
        # If its only work moved away, another transfer would be exposed instead.
        alone = {w.works[0] for w in self.windows.values() if len(w.works) == 1}
        for number in works:
            if number not in alone and self.blocks.product(number) is not None:
                yield number

    # --- From before it ------------------------------------------------------- #

    def from_before(self, number: int, place: int) -> Iterator[list[int]]:
        """Products before a transfer, each with what is made of it before a place."""
        for product in self.near(self.order[: self.place[number]][::-1]):
            between = self.order[self.place[product] + 1 : place]
            behind = self.made_of(product, between)
            if behind is None or number in behind:
                continue
            if all(self.stays_hidden(each, place) for each in behind):
                yield [product, *behind]

    def made_of(self, product: int, between: Sequence[int]) -> list[int] | None:
        """The blocks made of a product; None if one of them cannot move along."""
        names = self.blocks.all[product].writes
        behind = [number for number, _ in self.blocks.made_of(names, between)]
        if not all(self.blocks.all[n].can_wait or self.is_sum(n) for n in behind):
            return None
        return self.blocks.with_waits(behind, between)

    def is_sum(self, number: int) -> bool:
        return number in self.open and self.open[number].kind in SUMS

    def stays_hidden(self, number: int, place: int) -> bool:
        """Whether a block is no hidden sum, or has products beside it at a later place.

        Beside a body alone it would hold its terms, and what comes, for all iterations.
        """
        if number not in self.windows:
            return True
        behind = self.order[place : self.place[self.reader(number)]]
        return any(self.blocks.all[each].contracts for each in behind)

    # --- From behind it ------------------------------------------------------- #

    def from_behind(self, number: int, place: int) -> Iterator[list[int]]:
        """Products behind a transfer, each with the cheap blocks that it needs."""
        found = [
            [product, *needed]
            for product in self.near(self.order[place:])
            if (needed := self.needed(product, place)) is not None
        ]
        last = max((self.place[each] for some in found for each in some), default=place)
        made_of_it = self.all_made_of(number, last)
        return (some for some in found if made_of_it.isdisjoint(some))

    def all_made_of(self, number: int, last: int) -> set[int]:
        """The blocks up to the `last` place that a transfer has to come before."""
        behind = self.order[self.place[number] + 1 : last + 1]
        made_of = self.blocks.made_of([self.open[number].out.name], behind)
        return {each for each, _ in made_of}

    def needed(self, product: int, place: int) -> list[int] | None:
        """The cheap blocks behind a place that a product needs in front of it.

        None if it needs others, or reads a transfer that has work beside it so far.
        """
        found = list[int]()
        waiting = [product]
        while waiting:
            for name in self.blocks.all[waiting.pop()].reads:
                maker = self.blocks.maker.get(name)
                if maker is None or maker in found:
                    continue
                if maker in self.windows:
                    return None
                behind = self.place[maker] >= place
                if behind and not self.blocks.goes_along(maker):
                    return None
                if behind or self.blocks.all[maker].can_wait:
                    found.append(maker)
                    waiting.append(maker)
        return [each for each in found if self.place[each] >= place]
