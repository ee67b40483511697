"""Products that are computed an iteration late, beside exposed transfers.

Only the optimizer reads the gradient of a layer's weight, or the sum over iterations
that it is added to.  No iteration of a scan waits for it, so it may be computed while
the next layer waits for a transfer.  Such a transfer depends on the iteration before,
and cannot move to another iteration.  Transfers of activations over tp are an example.
This is the idea of zero bubbles inside a scan (Qi, Wan, Huang and Lin 2023, "Zero
Bubble Pipeline Parallelism").

A late product takes the statements along that read it, such as its sum over devices.
The body carries its operands.  It reads slices of the scan's own operands again.
If a layer reads a weight twice, two products are added up before the sum leaves the
body.  Such products are late together, and are added in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.layout import bytes_in
from jhost.lowering.ir.transfers import larger_side
from jhost.lowering.schedule.blocks import work_of
from jhost.lowering.schedule.cycle import Late
from jhost.lowering.schedule.intervals import GATHERING, SUMS, hides, ready_at
from jhost.lowering.schedule.movable_transfers import MovableTransfers
from jhost.lowering.schedule.moved_work import with_work_moved

_CARRIED = 2
"""Carried operands take at most so many times the largest exposed transfer's bytes."""

_TOGETHER = 4
"""So many products at most are late together."""


def late_work(found: MovableTransfers) -> list[Late]:
    """Products for the transfers of a body that have nothing beside them."""
    return [*_FreeProducts(found).late()]


@dataclasses.dataclass(frozen=True, slots=True)
class _Together:
    """Products that are late together, and the blocks that are made of them."""

    products: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def every(self) -> set[int]:
        return {*self.products, *self.behind}


class _FreeProducts:
    """The products of a body that nothing in it waits for."""

    def __init__(self, found: MovableTransfers) -> None:
        self.found, self.blocks = found, found.blocks
        sums = (stmt.name for each in found.late() for stmt in each.transfers)
        self.movable = {*(each.stmt.name for each in found.early()), *sums}
        _, moved = with_work_moved(found.body, self.is_bound)
        self.hidden = {each.beside.name for each in moved}
        """The transfers that work of their own iteration moves beside."""
        self.sums = {s.name for _, s in found.blocks.transfers if s.kind in SUMS}
        gone = [each.product for each in moved]
        self.products = {
            number
            for number in range(len(self.blocks.all))
            if (product := self.blocks.product(number)) is not None
            and all(product is not each for each in gone)
        }
        groups = filter(None, map(self.together, sorted(self.products)))
        self.groups = [*{each.products: each for each in groups}.values()]
        self.free = set[int]().union(*(group.every for group in self.groups))

    def late(self) -> Iterator[Late]:
        """A product beside each exposed transfer: the largest left that has room."""
        exposed = [*self.exposed()]
        room = _CARRIED * max((larger_side(stmt) for stmt, _ in exposed), default=0)
        left = sorted(self.groups, key=self.work, reverse=True)
        carried, gone = set[str](), set[int]()
        for stmt, readers in exposed:
            for group in left:
                gone_then = {*gone, *group.products}
                place = next((r for r in readers if r not in gone_then), None)
                # An operand that two products have in common is handed on once.
                more = [t for t in self.terms(group) if t.name not in carried]
                # Products that are added up have room for each of them.
                size = bytes_in(more) // len(group.products)
                if place is not None and size <= room:
                    room -= size
                    carried |= {term.name for term in more}
                    gone = gone_then
                    # What a product stands before stays in its iteration.
                    taken = {*group.products, place}
                    left = [each for each in left if taken.isdisjoint(each.products)]
                    yield self.made_late(group, stmt, place)
                    break

    def made_late(self, group: _Together, beside: ir.Communicate, reader: int) -> Late:
        stmts = self.found.stmts_of(sorted(group.every))
        before = self.blocks.all[reader].stmt
        return Late(tuple(stmts), self.terms(group), beside=beside, before=before)

    def work(self, group: _Together) -> tuple[int, int]:
        """How much products compute, and the number of the first."""
        computes = (self.blocks.all[number].compute for number in group.products)
        return sum(map(work_of, computes)), group.products[0]

    def terms(self, group: _Together) -> tuple[ir.Buffer, ...]:
        """The operands of products that their iteration has to hand on."""
        # The next iteration has constants anyway, and can take the same slices.
        known = self.found.constant | self.found.sliced
        ins = (b for n in group.products for b in self.blocks.all[n].compute.ins)
        each = {buffer.name: buffer for buffer in ins if buffer.name not in known}
        return tuple(each.values())

    def together(self, number: int) -> _Together | None:
        """A product with those that it is added to; None if some of them must stay."""
        products = {number}
        while len(products) <= _TOGETHER:
            first, made = min(products), self.written(products)
            behind = self.found.made_of(first, made, self.sums)
            if behind is not None:
                return _Together(tuple(sorted(products)), tuple(behind))
            more = self.added_to(first, made) - products
            if not more:
                return None
            products |= more
        return None

    def added_to(self, first: int, made: Set[str]) -> set[int]:
        """The products read with what is `made`, directly or through cheap values."""
        later = range(first + 1, len(self.blocks.all))
        waiting = {
            name
            for number, before in self.blocks.made_of(made, later)
            for name in self.blocks.all[number].reads - before
        }
        found = set[int]()
        while waiting:
            number = self.blocks.maker.get(waiting.pop())
            if number in self.products:
                found.add(number)
            elif number is not None and self.blocks.all[number].can_wait:
                waiting |= self.blocks.all[number].reads
        return found

    def written(self, numbers: Set[int]) -> set[str]:
        return set[str]().union(*(self.blocks.all[n].writes for n in numbers))

    def exposed(self) -> Iterator[tuple[ir.Communicate, list[int]]]:
        """The transfers that nothing but free products can hide, each with its readers.

        A product that stands beside one of them as it is stays there.
        """
        for number, stmt in self.blocks.transfers:
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
        before = (
            n for n in left if n < reader and hides(self.blocks.all[n], stmt.kind)
        )
        if (work := next(before, None)) is not None:
            self.stays(work)
            return []
        while reader in stays:
            found.append(reader)
            if all(reader not in group.products for group in self.groups):
                return found
            left.remove(reader)
            reader = self.blocks.first_reader(stmt, left)
        return []

    def stays(self, number: int) -> None:
        """A block that hides a transfer already is not late."""
        self.groups = [each for each in self.groups if number not in each.products]
