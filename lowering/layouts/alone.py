"""A body as a program of its own, for what is chosen in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.marks import Mark, ShardMark
from jhost.lowering.ir.program import Program
from jhost.lowering.layouts.levels import Crossing, Level
from jhost.lowering.layouts.propagate import solve_program
from jhost.lowering.layouts.solve import Solution


def borders(program: Program) -> list[tuple[Mark, ...]]:
    """For each of `programs`, the shardings of what crosses its border.

    They are those of the whole, so that a body can be lowered by itself.
    """
    if not program.mesh.shape:
        return []
    solution = solve_program(program)
    return list(_borders(solution, solution.level, ()))


def _borders(
    solution: Solution, level: Level, leaves: Sequence[int]
) -> Iterator[tuple[Mark, ...]]:
    layouts = {
        param.name: solution.layouts[level.prefix + param.name]
        for param in level.program.params
    }
    for result, number in zip(level.program.results, leaves, strict=False):
        layouts[result.name] = solution.wanted(number)
    yield tuple(_marks(level.program, layouts))
    for step in level.steps:
        if isinstance(step, Crossing):
            for inner, leaving in zip(step.levels, step.leaves, strict=True):
                yield from _borders(solution, inner, leaving)


def _marks(program: Program, layouts: dict[str, Layout]) -> Iterator[Mark]:
    given = {mark.buffer for mark in program.marks if isinstance(mark, ShardMark)}
    for name, layout in layouts.items():
        if name not in given:
            yield ShardMark(buffer=name, spec=layout, where="")


def alone(program: Program, border: Sequence[Mark]) -> Program:
    """A body with its border laid out so."""
    return dataclasses.replace(program, marks=(*program.marks, *border))
