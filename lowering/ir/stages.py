"""The stages of a loop's iterations, in the order in which they are issued.

Whoever walks through a program asks here: emission, interpretation, prediction and the
verifier.  The order itself stands in the program (see `schedule/stages.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from jhost.lowering.ir import statements as ir


@dataclasses.dataclass(frozen=True, slots=True)
class StageRun:
    """A stage of one iteration, the `last` of it or not."""

    iteration: int
    body: tuple[ir.Stmt, ...]
    last: bool


def stages_of(loop: ir.For) -> list[tuple[ir.Stmt, ...]]:
    """The body of `loop`, cut into its stages."""
    borders = [n for n, stmt in enumerate(loop.body) if isinstance(stmt, ir.NextStage)]
    starts, ends = [0, *(n + 1 for n in borders)], [*borders, len(loop.body)]
    return [loop.body[a:b] for a, b in zip(starts, ends, strict=True)]


def stage_runs(loop: ir.For) -> Iterator[StageRun]:
    """The stages of all iterations of `loop`, in the order to issue them in."""
    stages = stages_of(loop)
    for iteration, stage in loop.order or _one_by_one(loop.extent, len(stages)):
        yield StageRun(iteration, stages[stage], stage == len(stages) - 1)


def _one_by_one(extent: int, stages: int) -> Iterator[tuple[int, int]]:
    return ((i, stage) for i in range(extent) for stage in range(stages))


class OwnNames:
    """Tables of names in which each iteration of a loop has entries of its own.

    The stages of an iteration are apart, and other iterations use the same names.
    """

    def __init__(self, loop: ir.For, *tables: dict[Any, Any]) -> None:
        self.tables = tables
        self.own = [self._empty() for _ in range(loop.extent)]

    @contextmanager
    def of(self, iteration: int) -> Generator[None]:
        """The tables have an iteration's entries for a while, and it gets new ones."""
        outside = [set(table) for table in self.tables]
        for table, own in zip(self.tables, self.own[iteration], strict=True):
            table.update(own)
            own.clear()
        yield
        every = zip(self.tables, outside, self.own[iteration], strict=True)
        for table, names, own in every:
            own.update((name, table.pop(name)) for name in table.keys() - names)

    def end(self, iteration: int) -> tuple[dict[Any, Any], ...]:
        """The entries of an iteration, which ends."""
        ended, self.own[iteration] = self.own[iteration], self._empty()
        return ended

    def _empty(self) -> tuple[dict[Any, Any], ...]:
        return tuple(dict[Any, Any]() for _ in self.tables)
