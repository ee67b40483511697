"""How many bytes a program holds while each of its blocks runs.

It is an estimate: XLA decides what it keeps.  Values count from the block that makes
them to their last reader.  XLA fuses cheap values into their readers, so what these are
made of counts for them, until a contraction reads them.  XLA writes them for it, in
place of what they are made of if nothing else reads that, and later readers read what
it wrote.  Params and results do not count: they have memory outside.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from jhost.lowering.ir.bodies import CONTROL_FLOW
from jhost.lowering.ir.derived import derived
from jhost.lowering.ir.effects import reads_writes, written
from jhost.lowering.ir.layout import bytes_in, bytes_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Stmt, walk
from jhost.lowering.schedule.blocks import (
    StatementBlock,
    StatementBlocks,
    blocks_of,
)
from jhost.lowering.schedule.cheap import is_view


@derived
def held(program: Program) -> list[int]:
    """The bytes that a program holds at each of its blocks, bodies of these included.

    Transfers count from where they stand in the program.
    """
    blocks = blocks_of(program)
    lives = _Lives(set(_in_results(blocks)))
    for number, block in enumerate(blocks.all):
        lives.add(number, block, cheap=blocks.fuses(number))
    replaced = set(lives.replaced())
    changes = [0] * (len(blocks.all) + 1)
    for name, size in lives.sizes.items():
        changes[lives.first[name]] += size
        changes[lives.last[name] + (name not in replaced)] -= size
    there = itertools.accumulate(changes[:-1])
    inside = (_most_inside(block.stmts) for block in blocks.all)
    return [sum(both) for both in zip(there, inside, strict=True)]


def holds_bodies(blocks: StatementBlocks) -> bool:
    """Whether a program has control flow, whose bodies hold values of their own."""
    return any(isinstance(stmt, CONTROL_FLOW) for b in blocks.all for stmt in b.stmts)


def _most_held(program: Program) -> int:
    return max(held(program), default=0)


def _most_inside(stmts: Iterable[Stmt]) -> int:
    """The most that a body of some statement holds at a time."""
    bodies = [b for s in stmts if isinstance(s, CONTROL_FLOW) for b in s.bodies]
    return max(map(_most_held, bodies), default=0) if bodies else 0


def _in_results(blocks: StatementBlocks) -> Iterator[str]:
    """The results, and what only a result is a view of: XLA makes it there."""
    yield from blocks.results
    readers = Counter(name for block in blocks.all for name in block.reads)
    for block in blocks.all:
        (stmt, *more), stays = block.stmts, block.writes <= blocks.results
        if stays and not more and is_view(stmt):
            read, made = reads_writes(stmt)
            # A broadcast copies what it reads.
            if bytes_in(read) == bytes_in(made):
                yield from (b.name for b in read if readers[b.name] == 1)


class _Lives:
    """The values that take memory: their bytes, and their first and last blocks."""

    def __init__(self, results: set[str]) -> None:
        self.results = results
        self.sizes: dict[str, int] = {}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.made_of: dict[str, frozenset[str]] = {}
        """For each value, the values in memory that it is read from."""
        self.cheap: dict[str, int] = {}
        """The bytes of cheap values that are in no memory."""
        self.places: list[tuple[int, set[str]]] = []
        """For each cheap value that is written: the block, and whose place it may take.
        """

    def add(self, number: int, block: StatementBlock, cheap: bool) -> None:
        """Note what the next block reads and makes."""
        # XLA fuses cheap work into what reads it, but not into cuBLAS matmuls.
        if block.contracts:
            for name in sorted(block.reads & self.cheap.keys()):
                self.write(name, number, block)
        behind = self.behind(block.reads)
        for name in behind:
            self.last[name] = number
        sizes = _sizes(block.stmts)
        for name in block.writes:
            # Results have memory of their own from the start, which no order can save.
            size = 0 if name in self.results else sizes.get(name, 0)
            if cheap:
                self.cheap[name], self.made_of[name] = size, behind
            else:
                self.in_memory(name, number, size)

    def behind(self, names: Iterable[str]) -> frozenset[str]:
        """The values in memory that some values are read from."""
        return frozenset[str]().union(*(self.made_of.get(name, ()) for name in names))

    def write(self, name: str, number: int, block: StatementBlock) -> None:
        """Note that XLA writes a cheap value, because a contraction reads it."""
        size, behind = self.cheap.pop(name), self.made_of[name]
        for each in behind:
            self.last[each] = number
        # A fusion can write in place of an operand of as many bytes.
        others = self.behind(block.reads - {name})
        alike = {each for each in behind - others if self.sizes[each] == size}
        self.places.append((number, alike))
        self.in_memory(name, number, size)

    def replaced(self) -> Iterator[str]:
        """The values in whose place another is written where they are last read."""
        left = set(self.sizes)
        for number, alike in self.places:
            # Sorted, because all processes have to find the same order.
            ended = (n for n in sorted(alike & left) if self.last[n] == number)
            for name in itertools.islice(ended, 1):
                left.remove(name)
                yield name

    def in_memory(self, name: str, number: int, size: int) -> None:
        self.made_of[name] = frozenset([name])
        self.sizes[name] = size
        self.first.setdefault(name, number)
        self.last[name] = number


def _sizes(stmts: Iterable[Stmt]) -> dict[str, int]:
    """The bytes of what statements make, by name."""
    every = walk(tuple(stmts))
    return {buffer.name: bytes_of(buffer) for s in every for buffer in written(s)}
