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


@contextmanager
def set_aside(names: dict[Any, Any], own: dict[Any, Any]) -> Generator[None]:
    """Moves an iteration's `own` to `names` for a while, and new ones back.

    The stages of an iteration are apart, and other iterations use the same names.
    """
    outside = set(names)
    names.update(own)
    own.clear()
    yield
    own.update((name, names.pop(name)) for name in names.keys() - outside)
