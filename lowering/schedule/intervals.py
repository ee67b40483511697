"""The interval of a transfer: where it may be issued, and which work reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.transfers import larger_side
from jhost.lowering.schedule.blocks import (
    StatementBlock,
    StatementBlocks,
    blocks_of,
)
from jhost.lowering.schedule.held import held, holds_bodies

IsOpen: TypeAlias = Callable[[ir.Communicate], bool]
"""Whether a transfer may be moved."""

GATHERING = ("AllGather", "AllToAll", "CollectivePermute")
"""Transfers that bring a device new bytes, and add nothing up."""

SUMS = ("ReduceScatter", "AllReduce")
"""Transfers that add up what devices have, and keep no more bytes."""

_WINDOW = 2
"""Gathers that are not read yet take at most so many times the largest one's bytes."""

_AHEAD = 8
"""The most works between a gather and its reader.

A gather that is issued earlier takes memory for longer, and is hidden no better.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class TransferInterval:
    """A transfer that has work between its issue and its reader.

    Attributes:
        stmt: the transfer.
        ready: the last block that makes its source, or -1 if the source is a param.
        issue: the block that it is issued before.
        reader: the first block that reads it and cannot wait.
        along: the cheap blocks that are issued with it.
    """

    stmt: ir.Communicate
    ready: int
    issue: int
    reader: int
    along: tuple[int, ...] = ()

    @property
    def gathers(self) -> bool:
        return self.stmt.kind in GATHERING

    @property
    def bytes(self) -> int:
        """The bytes of the larger side: a gather's result, or a sum's terms."""
        return larger_side(self.stmt)


def intervals(program: Program, is_open: IsOpen) -> list[TransferInterval]:
    """The intervals of gathers and sums, in the order of their readers."""
    blocks = blocks_of(program)
    found: list[TransferInterval] = []
    issued: dict[int, int] = {}
    stays = range(len(blocks.all))
    for number, stmt, reader, working in sorted(
        (*_gathers(program, is_open), *_sums(blocks, is_open)), key=lambda each: each[0]
    ):
        ready = ready_at(blocks, stmt, issued, stays)
        issue = next((work for work in working if work > ready), reader)
        if issue < reader:
            _, along = blocks.before(stmt)
            found.append(TransferInterval(stmt, ready, issue, reader, tuple(along)))
            issued[number] = issue
    return sorted(found, key=lambda each: each.reader)


def hides(block: StatementBlock, kind: ir.CommunicationKind) -> bool:
    """Whether a block is work that a transfer of a kind may stand beside.

    Beside a loop stand sums alone: their terms are there anyway.  A gathered value
    would take memory for all iterations.
    """
    return block.contracts if kind in GATHERING else block.works


def ready_at(
    blocks: StatementBlocks,
    stmt: ir.Communicate,
    issued: Mapping[int, int],
    place: Sequence[int],
) -> int:
    """The place of the last block that a transfer follows, or -1 if it follows none.

    `place` has the place of each block.  `issued` has the works that other transfers
    are issued before, by the blocks of these.
    """
    behind, _ = blocks.before(stmt)
    # It may be made of what another moved transfer brings, and what can wait is made
    # once that is there.  So it is issued behind the work beside the other.
    made_of = issued.keys() & (behind | blocks.waited_for(behind))
    works = (issued[number] for number in made_of)
    return max((place[number] for number in (*behind, *works)), default=-1)


_Movable: TypeAlias = tuple[int, ir.Communicate, int, list[int]]
"""Its block, the transfer, its reader's block, and the works to issue it before."""


def _sums(blocks: StatementBlocks, is_open: IsOpen) -> Iterator[_Movable]:
    working = _working(blocks, "AllReduce")  # and so for each kind of sum
    for number, stmt in blocks.transfers:
        if stmt.kind in SUMS and is_open(stmt):
            yield number, stmt, blocks.reader(number, stmt), working


def _gathers(program: Program, is_open: IsOpen) -> Iterator[_Movable]:
    blocks = blocks_of(program)
    working = _working(blocks, "AllGather")
    found = [
        (number, stmt, blocks.reader(number, stmt))
        for number, stmt in blocks.transfers
        if stmt.kind in GATHERING and is_open(stmt)
    ]
    window = _WINDOW * max((larger_side(stmt) for _, stmt, _ in found), default=0)
    # Beside a scan.  In a body nothing says what else is held around it.
    there = held(program) if found and holds_bodies(blocks) else []
    unread: list[tuple[int, int]] = []
    turn = 0
    # In the order of their readers: one queue moves all, so the first is needed first.
    for number, stmt, reader in sorted(found, key=lambda each: each[2]):
        # There is room again once the reader of the oldest one has run.
        while sum(size for _, size in unread) + larger_side(stmt) > window:
            turn, _ = unread.pop(0)
        unread.append((reader, larger_side(stmt)))
        ahead = [work for work in working if work < reader][-_AHEAD:]
        ahead = [work for work in ahead if work >= turn]
        full = _last_full(there, number, sum(size for _, size in unread))
        # One work ahead in any case: else nothing would hide it.
        yield number, stmt, reader, [w for w in ahead if w > full] or ahead[-1:]


def _working(blocks: StatementBlocks, kind: ir.CommunicationKind) -> list[int]:
    """The works that transfers of a kind may stand beside."""
    return [number for number, block in enumerate(blocks.all) if hides(block, kind)]


def _last_full(there: Sequence[int], before: int, gathered: int) -> int:
    """The last block at which the gathered value would add to the most that is held.

    It is looked for `before` a block; `there` has the bytes that each block holds.
    """
    room = max(there, default=0) - gathered
    full = (number for number, size in enumerate(there[:before]) if size > room)
    return max(full, default=-1)
