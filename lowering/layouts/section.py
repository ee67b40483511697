"""A part of a program as a program of its own, in which a choice can be weighed.

The part is a body, or some statements in a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set

from jhost.lowering.ir.effects import read_and_made, reads_writes
from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Stmt
from jhost.lowering.layouts.flat_bodies import FlatBody, FlatBorder
from jhost.lowering.layouts.propagate_layouts import solve_program
from jhost.lowering.layouts.solve import Solution


def layouts_in_whole(program: Program) -> list[Mapping[str, Layout]]:
    """For each of `programs`, the layouts of its values in the whole, by name.

    Results of bodies have the layouts in which they leave the bodies.
    """
    solution = solve_program(program)
    return list(_layouts(solution, solution.flat, ()))


def _layouts(
    solution: Solution, flat: FlatBody, leaves: Sequence[int]
) -> Iterator[Mapping[str, Layout]]:
    values = [*flat.program.params, *flat.program.results]
    for stmt in flat.program.body:
        values += reads_writes(stmt)[1]
    layouts = {b.name: solution.layouts[flat.prefix + b.name] for b in values}
    # The outermost program has no `leaves`, so its results rest where they are.
    for result, number in zip(flat.program.results, leaves, strict=False):
        layouts[result.name] = solution.wanted(number)
    yield layouts
    for step in flat.steps:
        if isinstance(step, FlatBorder):
            for inner, leaving in zip(step.bodies, step.leaves, strict=True):
                yield from _layouts(solution, inner, leaving)


@dataclasses.dataclass(frozen=True, slots=True)
class CutOut:
    """Some statements of a program in a row; values that they share cross its border.

    It is made once for programs that differ in marks.  Passes know what they have made
    before by its statements, which are then the same objects.
    """

    numbers: range
    body: tuple[Stmt, ...]
    params: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    made: Set[str]

    @classmethod
    def of(cls, program: Program, numbers: range) -> CutOut:
        body = program.body[numbers.start : numbers.stop]
        params, made = read_and_made(body)
        later, _ = read_and_made(program.body[numbers.stop :])
        wanted = later.keys() | {result.name for result in program.results}
        results = (buffer for name, buffer in made.items() if name in wanted)
        return cls(numbers, body, tuple(params.values()), tuple(results), made.keys())

    def out_of(self, program: Program) -> Program:
        """The statements as a program of its own, with the marks of `program`."""
        return dataclasses.replace(
            program,
            params=self.params,
            results=self.results,
            body=self.body,
            marks=tuple(mark for mark in program.marks if mark.buffer in self.made),
            remarks=(),
        )


def with_fixed_border(program: Program, layouts: Mapping[str, Layout]) -> Program:
    """A part of a program with its border laid out as in the whole."""
    given = {mark.buffer for mark in program.marks if isinstance(mark, ShardMark)}
    border = {buffer.name for buffer in (*program.params, *program.results)}
    # By itself, the part might choose other layouts at its border than the whole has.
    marks = (
        ShardMark(buffer=name, spec=layouts[name], where="")
        for name in sorted(border - given)
    )
    return dataclasses.replace(program, marks=(*program.marks, *marks))
