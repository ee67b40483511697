"""When transfers outside of chunked loops are issued, and when they are waited for.

A collective that is waited for where it is issued runs alone: nothing is computed until
it has ended.  So each transfer gets an interval.  One walk over a program's statements
finds all intervals.  It counts works and bytes and knows no seconds, because all
processes have to write the same program.

- *Work* takes long enough to hide a transfer: contractions, and for sums loops as well.
  It keeps its order here; `moved_work.py` changes it before.  Works that all transfers
  stand beside need none, see `one_run.py`.
- A gather makes more bytes.  It is issued before the first work behind its source, but
  at most a few works ahead of its reader.  Gathers that nothing has read yet share a
  window of bytes, and it waits until the window has room.  In a program with a scan it
  comes later where it would add to the most that the program holds.
- A permute or an all-to-all brings bytes as a gather does, and has such an interval.
- A sum over devices makes no more bytes, and frees its terms.  It is issued before the
  next work.  Outside of bodies, permutes that would add to the most that the program
  holds come before the work after that, if some later work has room for them.  Beside
  a scan they would take memory in all iterations.  A sum is waited for when the
  window has no room for the next terms.  Behind the last work little hides it.  The
  window is smaller there, and has to have room for any large value that is made.
  Permutes end soon, and hold what they bring beside the terms.  So they are also waited
  for where they would add to the most that the program holds.
- A transfer is waited for before the first work that reads it.  Cheap readers wait with
  it.  Earlier collectives over the same devices are waited for at the same place: they
  run in order, so they have ended by then.
- Cheap statements between a source and a transfer are issued with the transfer.  So a
  weight that is cast where it is used is cast and gathered early.

Permutes within a process are copies, which run beside work from the moment they are
issued.  A collective's kernel starts when the running work has ended.  It runs beside
the work after that, if nothing waits for it there.

Four layers of Llama 8B with weights sharded over two H100s, forward and backward, take
45.0 ms with permutes in this order, and 48.9 ms with collectives where they are read.
Data parallel, they take 41.9 ms in this order, 44.2 ms with collectives, and 38.4 ms
without any communication.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.queues import MAIN, TRANSFERS, on_own, on_stream
from jhost.lowering.schedule.behind_waits import behind_waits
from jhost.lowering.schedule.blocks import (
    StatementBlock,
    blocks_of,
    communication_of,
    has_moved,
)
from jhost.lowering.schedule.held import holds_bodies
from jhost.lowering.schedule.intervals import (
    GATHERING,
    SUMS,
    IsOpen,
    intervals,
)
from jhost.lowering.schedule.one_run import in_one_run
from jhost.lowering.schedule.permutes import Permutes
from jhost.lowering.schedule.room import Room
from jhost.lowering.schedule.scheduled_transfer import (
    ScheduledTransfer,
    TransferForm,
    ends_of,
    rounds_of,
    sends_of,
    waits_of,
)


def beside_work(program: Program, is_open: IsOpen) -> list[ir.Communicate]:
    """The open gathers and sums that have work to stand beside."""
    kinds = (*GATHERING, *SUMS)
    moved = (stmt for stmt in program.body if isinstance(stmt, ir.Communicate))
    # Most programs have none, and blocks and intervals take long to make.
    if not any(stmt.kind in kinds and is_open(stmt) for stmt in moved):
        return []
    return [each.stmt for each in intervals(program, is_open)]


def in_order(program: Program, ways: Mapping[str, TransferForm]) -> Program:
    """`program` with the transfers that have a form in `ways` moved beside work."""
    if not ways:
        return program
    walk = _Walk(program, ways)
    body = in_one_run(walk.statements(), walk.works, walk.blocks.results)
    # Not with permutes: a step of 8B over dp=4 in one process would then send its sums
    # so, because 97 ms are predicted for it.  With collectives 92.5 were measured.
    if {*ways.values()} == {"collective"}:
        body = behind_waits(body, {param.name for param in program.params})
    body = walk.blocks.barriers.together(body)
    return dataclasses.replace(program, body=tuple(body))


# --- The walk --------------------------------------------------------------------- #


class _Walk:
    """A walk through a program, with the transfers to come and those under way.

    A block that can wait, and reads a value that is not there yet, is `put_off` until
    the value is there.
    """

    def __init__(self, program: Program, ways: Mapping[str, TransferForm]) -> None:
        self.blocks = blocks_of(program)
        permutes = Permutes(program)
        self.transfers = {
            each.stmt.out.name: ScheduledTransfer(
                each, ways[each.stmt.name], rounds_of(each.stmt, ways, permutes)
            )
            for each in intervals(program, lambda stmt: stmt.name in ways)
        }
        """The transfers that have not ended, by the names of their results."""
        self.moved = {each.interval.stmt.name for each in self.transfers.values()}
        self.to_come = [*self.transfers.values()]
        self.room = Room(program, self.to_come)
        # A body holds most where the program around it does, or a body inside.
        self.knows_most = not program.is_body or holds_bodies(self.blocks)
        self.sums: list[list[ScheduledTransfer]] = []
        """Sums under way: those issued at one time are one list."""
        self.again: list[ScheduledTransfer] = []
        """Sums whose next round began after the last list of sums was issued."""
        self.queue: list[ScheduledTransfer] = []
        """Collectives under way, in the order in which they were issued."""
        self.unread = False
        """Whether a transfer has ended that no block since has been put behind."""
        self.seen: set[int] = set()
        self.put_off: list[StatementBlock] = []
        self.body: list[ir.Stmt] = []
        self.works: list[range] = []
        """Where the body has work that stands on a stream."""

    def statements(self) -> list[ir.Stmt]:
        for number, block in enumerate(self.blocks.all):
            if number in self.seen or communication_of(block.stmt) in self.moved:
                continue
            self.seen.add(number)
            self.block(number, block)
        self.end([*self.transfers.values()])
        return self.body

    def block(self, number: int, block: StatementBlock) -> None:
        """Append a block or put it off; issue before it, and wait for what it reads."""
        if not block.reads.isdisjoint(self.missing()):
            if block.can_wait:
                self.put_off.append(block)
                return
            self.require(block.reads)
        waited = self.make_room(number)
        if block.works:
            self.issue(self.due(number))
        # While transfers are under way, work stands on a stream too.  Tokens then tell
        # XLA before which work to issue one, and behind which to wait for it.
        beside = waited or self.is_under_way() or self.holds_back(number)
        if self.unread and isinstance(block.stmt, CONTROL_FLOW):
            # Nothing else says so, and XLA would keep the terms of a sum for the loop.
            self.unread = False
            self.body += _behind_transfers(on_own(block.stmts), 2)
            return
        ordered = block.contracts or (waited and self.stays_behind(number))
        if has_moved(block) and self.is_under_way():
            self.body += _behind_transfers(block.stmts)
        elif beside and ordered:
            start = len(self.body)
            self.body += _on_own(block)
            self.works.append(range(start, len(self.body)))
        else:
            self.body += block.stmts

    def is_under_way(self) -> bool:
        """Whether any transfer is under way: it is not to come, and has not ended."""
        return len(self.transfers) > len(self.to_come)

    def missing(self) -> set[str]:
        """The values that are not there yet, and those that are made of them."""
        made = (block.writes for block in self.put_off)
        return set(self.transfers).union(*made)

    # --- Issue ---------------------------------------------------------------- #

    def due(self, number: int) -> list[ScheduledTransfer]:
        """The transfers to issue before a work."""
        return [
            each
            for each in self.to_come
            if each.interval.issue <= number and not self.waits_for_room(number, each)
        ]

    def holds_back(self, number: int) -> bool:
        """Whether some transfer comes behind a work, before the next one."""
        return any(each.interval.issue <= number for each in self.to_come)

    def waits_for_room(self, number: int, transfer: ScheduledTransfer) -> bool:
        """Whether a transfer comes behind a work, before the next one.

        Outside of bodies a sum that would add to the most that is held does so, if its
        reader leaves it a work with room.  Beside a scan XLA would put the work first
        anyway, as that frees more.  Then the next gathers wait in the queue behind the
        sum: the step of 8B over four devices stood still for 2.2 of 82 ms.
        """
        if not (
            self.knows_most and transfer.sums and self.room.is_full(number, transfer)
        ):
            return False
        later = range(number + 1, transfer.interval.reader)
        has_room = any(
            self.blocks.all[n].works and not self.room.is_full(n, transfer)
            for n in later
        )
        return has_room and not self.is_sent_on(transfer)

    def is_sent_on(self, transfer: ScheduledTransfer) -> bool:
        """Whether another transfer, which may be issued early, is made of this one."""
        number = self.blocks.maker[transfer.interval.stmt.out.name]
        for each in self.to_come:
            behind, along = self.blocks.before(each.interval.stmt)
            if number in behind | self.blocks.waited_for((*behind, *along)):
                return True
        return False

    def issue(self, transfers: Sequence[ScheduledTransfer]) -> None:
        """Issue transfers, gathers before sums."""
        for transfer in transfers:
            self.along(transfer)
        self.to_come = [each for each in self.to_come if each not in transfers]
        gathers = [each for each in transfers if not each.sums]
        sums = [each for each in transfers if each.sums]
        sends = sends_of(gathers)
        self.body += _on_transfers(sends) if sends else []
        if sums:
            self.sums.append([*sums, *self.again])
            self.again = []
            self.moves(*sends_of(sums))
        self.queue += [each for each in (*gathers, *sums) if each.way == "collective"]

    def along(self, transfer: ScheduledTransfer) -> None:
        """Append the blocks along with a transfer that were not appended yet."""
        numbers = [n for n in transfer.interval.along if n not in self.seen]
        reads = {transfer.interval.stmt.source.name}
        self.require(reads.union(*(self.blocks.all[n].reads for n in numbers)))
        for number in numbers:
            self.seen.add(number)
            self.body += self.blocks.all[number].stmts

    def stays_behind(self, number: int) -> bool:
        """Whether a block that needs room, and is no product, comes once it has it."""
        is_body = isinstance(self.blocks.all[number].stmt, CONTROL_FLOW)
        return is_body or number > self.room.last_work

    def make_room(self, number: int) -> bool:
        """Wait for the first sums, as long as there is no room for what a block makes.

        The next round of a sum begins before the last work, which stands beside it.

        Returns:
            Whether it waited.
        """
        waited = not self.has_room(number)
        if waited:
            self.round()
        while self.sums and (self.adds_to_most(number) or self.is_last_turn(number)):
            self.round()
            waited = True
        return waited

    def is_last_turn(self, number: int) -> bool:
        """Whether no work but a block is left for the next round of a sum."""
        under_way = itertools.chain(*self.sums)
        return number == self.room.last_work and any(
            len(t.rounds) > 1 for t in under_way
        )

    def has_room(self, number: int) -> bool:
        """Whether the window of sums has room for what a block makes."""
        # Only for the first sums: the sums issued last have had no work beside them.
        if not self.sums:
            return True
        terms = (t for t in self.to_come if t.interval.ready == number and t.sums)
        under_way = itertools.chain(*self.sums)
        return self.room.has(number, terms, {t.way for t in under_way}, self.held)

    def adds_to_most(self, number: int) -> bool:
        """Whether permutes under way add to the most that the program holds."""
        return self.room.is_full(number, *itertools.chain(*self.sums), *self.again)

    @property
    def held(self) -> int:
        return sum(each.held for sums in (*self.sums, self.again) for each in sums)

    def round(self) -> None:
        """Wait for the first sums under way, and issue their next round."""
        first = self.sums.pop(0)
        self.end([*self.ended_before(first)])
        self.moves(*waits_of(first), *ends_of(first))
        if left := self.round_over(first):
            self.moves(*sends_of(left))
            self.again += left
        self.resume()

    # --- Wait ----------------------------------------------------------------- #

    def require(self, names: Iterable[str]) -> None:
        """End the transfers that values of these names are made of."""
        wanted = set(names)
        for block in reversed(self.put_off):
            if not wanted.isdisjoint(block.writes):
                wanted |= block.reads
        self.end([t for name, t in self.transfers.items() if name in wanted])

    def end(self, transfers: Sequence[ScheduledTransfer]) -> None:
        """Make and wait for all rounds that transfers have left."""
        if not transfers:
            return
        assert not any(each in self.to_come for each in transfers)
        unread = [*self.ended_before(transfers)]
        self.unread |= bool(unread)
        transfers = self.in_turn([*transfers, *unread])
        rest = ([t for t in sums if t not in transfers] for sums in self.sums)
        self.sums = [sums for sums in rest if sums]
        self.again = [each for each in self.again if each not in transfers]
        left = [*transfers]
        while left:
            waits = waits_of(left)
            self.body += _on_transfers(waits)
            self.body += [ir.Synchronize(stream=TRANSFERS), *ends_of(left)]
            left = self.round_over(left)
            if left:
                self.moves(*sends_of(left))
        self.resume()

    def ended_before(
        self, transfers: Sequence[ScheduledTransfer]
    ) -> Iterator[ScheduledTransfer]:
        """Earlier collectives over the same axes, which run in order and end first."""
        axes = set[tuple[str, ...]]()
        for each in reversed(self.queue):
            if each in transfers:
                axes.add(each.interval.stmt.axes)
            elif each.interval.stmt.axes in axes:
                yield each

    def in_turn(
        self, transfers: Sequence[ScheduledTransfer]
    ) -> list[ScheduledTransfer]:
        """Transfers, with those that run in order in the order of their issue."""
        copied = [each for each in transfers if each not in self.queue]
        return [*copied, *(each for each in self.queue if each in transfers)]

    def round_over(
        self, transfers: Sequence[ScheduledTransfer]
    ) -> list[ScheduledTransfer]:
        """The transfers that have another round; the others are marked as ended."""
        for transfer in transfers:
            transfer.rounds.pop(0)
            if not transfer.rounds:
                del self.transfers[transfer.interval.stmt.out.name]
                self.queue = [each for each in self.queue if each is not transfer]
        return [transfer for transfer in transfers if transfer.rounds]

    def resume(self) -> None:
        """Append the blocks that were put off and whose operands are there now."""
        waiting, self.put_off = self.put_off, []
        for block in waiting:
            if block.reads.isdisjoint(self.missing()):
                self.body += block.stmts
            else:
                self.put_off.append(block)

    def moves(self, *stmts: ir.Stmt) -> None:
        """Append statements on the queue of transfers; the main one waits for them."""
        self.body += [*_on_transfers(stmts), ir.Synchronize(stream=TRANSFERS)]


# --- Statements ------------------------------------------------------------------- #


def _on_transfers(stmts: Sequence[ir.Stmt]) -> list[ir.Stmt]:
    """Statements on the queue of transfers, behind all that is computed so far."""
    moved = on_stream(TRANSFERS, [ir.Synchronize(stream=MAIN), *stmts])
    return [ir.GetCurrentStream(stream=MAIN), *moved]


def _on_own(block: StatementBlock) -> Sequence[ir.Stmt]:
    """A block of the main stream, on the stream for work that has an order."""
    if not isinstance(block.stmt, (ir.Compute, *CONTROL_FLOW)):
        return block.stmts  # loops have streams already
    return on_own(block.stmts)


def _behind_transfers(stmts: Sequence[ir.Stmt], at: int = 1) -> list[ir.Stmt]:
    """Work on a stream that waits for the transfers before it as well.

    They are issued before work that has moved, which XLA would otherwise compute before
    what they send is there.  Or they have ended.
    """
    return [*stmts[:at], ir.Synchronize(stream=TRANSFERS), *stmts[at:]]
