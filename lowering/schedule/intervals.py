"""From where on a transfer may be under way, and which work reads what it brings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.transfers import larger_side
from jhost.lowering.schedule.blocks import StatementBlocks

IsOpen: TypeAlias = Callable[[ir.Communicate], bool]
"""Whether a transfer may stand elsewhere than it does."""

GATHERING = ("AllGather", "CollectivePermute")
"""What brings bytes that a device has not had, and adds nothing up."""

_WINDOW = 2
"""How many times the largest gather those are that have come and were not read yet."""

_AHEAD = 8
"""How many works a gather is ahead of its reader at most.

What comes earlier takes memory for longer, and is hidden no better.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class TransferInterval:
    """A transfer with work between the block that it is issued before and its reader.

    `ready` is the last block that makes what it is made of, -1 if that is given, and
    `reader` the first one that reads what comes and cannot wait.  The blocks `along`
    are issued with it.
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
        """Of the larger side, which is what a gather brings and a sum is made of."""
        return larger_side(self.stmt)


def intervals(blocks: StatementBlocks, is_open: IsOpen) -> list[TransferInterval]:
    """Those of gathers and sums, by reader: who is needed first comes first."""
    found: dict[int, TransferInterval] = {}
    for number, stmt, reader, working in sorted(
        (*_gathers(blocks, is_open), *_sums(blocks, is_open)), key=lambda each: each[0]
    ):
        behind, along = blocks.before(stmt)
        # What is made of another transfer stays where that one is waited for.
        if not found.keys().isdisjoint(behind):
            continue
        # What can wait is made once the transfers are there that it is made of.
        made_of = found.keys() & blocks.waited_for(behind)
        ready = max([*behind, *(found[number].issue for number in made_of)], default=-1)
        issue = next((work for work in working if work > ready), reader)
        if issue < reader:
            found[number] = TransferInterval(stmt, ready, issue, reader, tuple(along))
    return sorted(found.values(), key=lambda each: each.reader)


_Movable: TypeAlias = tuple[int, ir.Communicate, int, list[int]]
"""Its block, itself, its reader's block, and the work that it may be issued before."""


def _sums(blocks: StatementBlocks, is_open: IsOpen) -> Iterator[_Movable]:
    # A sum keeps its source, which is there in any case, so loops count as well.
    working = [number for number, block in enumerate(blocks.all) if block.works]
    for number, stmt in blocks.transfers():
        if stmt.kind in ("ReduceScatter", "AllReduce") and is_open(stmt):
            yield number, stmt, blocks.reader(number, stmt), working


def _gathers(blocks: StatementBlocks, is_open: IsOpen) -> Iterator[_Movable]:
    # A loop would keep the whole for all of its iterations.
    working = [number for number, block in enumerate(blocks.all) if block.contracts]
    found = [
        (number, stmt, blocks.reader(number, stmt))
        for number, stmt in blocks.transfers()
        if stmt.kind in GATHERING and is_open(stmt)
    ]
    window = _WINDOW * max((larger_side(stmt) for _, stmt, _ in found), default=0)
    unread: list[tuple[int, int]] = []
    turn = 0
    # In the order of their readers: on one lane what comes first is needed first.
    for number, stmt, reader in sorted(found, key=lambda each: each[2]):
        # There is room again where the reader of the oldest one has run.
        while sum(size for _, size in unread) + larger_side(stmt) > window:
            turn, _ = unread.pop(0)
        unread.append((reader, larger_side(stmt)))
        ahead = [work for work in working if work < reader][-_AHEAD:]
        yield number, stmt, reader, [work for work in ahead if work >= turn]
