"""Products that are computed an iteration late, beside exposed transfers.

Only the optimizer reads the gradient of a layer's weight, or the sum over iterations
that it is added to.  No iteration of a scan waits for it, so it may be computed while
the next layer waits for a transfer.  Such a transfer depends on the iteration before,
as that of activations over tp does, and cannot move to another iteration.  This is the
idea of zero bubbles inside a scan (Qi, Wan, Huang and Lin 2023, "Zero Bubble Pipeline
Parallelism").

A late product takes the statements along that read it, such as its sum over devices.
The body carries its operands.  It reads slices of the scan's own operands again.
"""

from __future__ import annotations

from collections.abc import Iterator

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.transfers import larger_side
from jhost.lowering.schedule.blocks import work_of
from jhost.lowering.schedule.cycle import Late
from jhost.lowering.schedule.intervals import GATHERING, SUMS, hides, ready_at
from jhost.lowering.schedule.movable_transfers import MovableTransfers
from jhost.lowering.schedule.moved_work import with_work_moved

_CARRIED = 2
"""Carried operands take at most so many times the largest exposed transfer's bytes."""


def late_work(found: MovableTransfers) -> list[Late]:
    """Products for the transfers of a body that have nothing beside them."""
    return [*_FreeProducts(found).late()]


class _FreeProducts:
    """The products of a body that nothing in it waits for.

    `behind` has, by a product's number, the blocks that are made of it.
    """

    def __init__(self, found: MovableTransfers) -> None:
        self.found, self.blocks = found, found.blocks
        sums = (stmt.name for each in found.late() for stmt in each.transfers)
        self.movable = {*(each.stmt.name for each in found.early()), *sums}
        _, moved = with_work_moved(found.body, self.is_bound)
        self.hidden = {each.beside.name for each in moved}
        """The transfers that work of their own iteration moves beside."""
        sums = {s.name for _, s in found.blocks.transfers() if s.kind in SUMS}
        self.behind: dict[int, list[int]] = {}
        for number, block in enumerate(self.blocks.all):
            product = self.blocks.product(number)
            if product is not None and all(
                each.product is not product for each in moved
            ):
                behind = found.made_of(number, block.writes, sums)
                self.behind |= {} if behind is None else {number: behind}
        chains = ({number, *behind} for number, behind in self.behind.items())
        self.free = set[int]().union(*chains)

    def late(self) -> Iterator[Late]:
        """For each exposed transfer the largest product that is left and has room."""
        exposed = [*self.exposed()]
        room = _CARRIED * max((larger_side(stmt) for stmt, _ in exposed), default=0)
        left = sorted(self.behind, key=self.work, reverse=True)
        carried, gone = set[str](), set[int]()
        for stmt, readers in exposed:
            for number in left:
                gone_then = {*gone, number}
                place = next((r for r in readers if r not in gone_then), None)
                more = [t for t in self.terms(number) if t.name not in carried]
                if place is not None and sum(map(bytes_of, more)) <= room:
                    room -= sum(map(bytes_of, more))
                    carried |= {term.name for term in more}
                    gone = gone_then
                    # What a product stands before stays in its iteration.
                    left = [each for each in left if each not in (number, place)]
                    yield self.made_late(number, stmt, place)
                    break

    def made_late(self, number: int, beside: ir.Communicate, reader: int) -> Late:
        stmts = self.found.stmts_of([number, *self.behind[number]])
        before = self.blocks.all[reader].stmt
        return Late(tuple(stmts), self.terms(number), beside=beside, before=before)

    def work(self, number: int) -> tuple[int, int]:
        """How much a product computes, and its number."""
        return work_of(self.blocks.all[number].compute), number

    def terms(self, number: int) -> tuple[ir.Buffer, ...]:
        """The operands of a product that its iteration has to hand on."""
        known = self.found.constant | self.found.sliced
        ins = self.blocks.all[number].compute.ins
        each = {buffer.name: buffer for buffer in ins if buffer.name not in known}
        return tuple(each.values())

    def exposed(self) -> Iterator[tuple[ir.Communicate, list[int]]]:
        """The transfers that nothing but free products can hide, each with its readers.

        A product that stands beside one of them as it is stays there.
        """
        for number, stmt in self.blocks.transfers():
            exposed = self.is_bound(stmt) and stmt.name not in self.hidden
            if exposed and number not in self.free:
                if readers := self.readers(stmt):
                    yield stmt, readers

    def is_bound(self, stmt: ir.Communicate) -> bool:
        """Whether a transfer may be hidden, and no other iteration can make it."""
        if stmt.kind not in (*GATHERING, *SUMS) or stmt.name in self.movable:
            return False
        return self.found.is_open(stmt)

    def readers(self, stmt: ir.Communicate) -> list[int]:
        """The first block that reads what comes, unless work stands before it.

        If that is a product that may be late, the blocks that are then the first.
        """
        stays = range(len(self.blocks.all))
        left = [*stays[ready_at(self.blocks, stmt, {}, stays) + 1 :]]
        found = list[int]()
        reader = self.blocks.first_reader(stmt, left)
        before = (n for n in left if n < reader and hides(self.blocks.all[n], stmt))
        if (work := next(before, None)) is not None:
            self.behind.pop(work, None)
            return []
        while reader in stays:
            found.append(reader)
            if reader not in self.behind:
                return found
            left.remove(reader)
            reader = self.blocks.first_reader(stmt, left)
        return []
