"""Split mesh axes where reshapes need a part of one.

Over an axis of 4, `[8, d]` becomes `[2, 4, d]` without a transfer if the first new dim
takes two of the devices, and the second the others.  No dim can take half of an axis,
so the axis becomes two, and all passes see these.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, TypeAlias

from jax.sharding import AbstractMesh

from jhost._jax import NO_LINE
from jhost.lowering.ir.axis_parts import given_axes, is_part, with_parts
from jhost.lowering.ir.bodies import all_marks, held_statements, rebuilt
from jhost.lowering.ir.layout import Layout, axes_size
from jhost.lowering.ir.marks import Mark, ShardMark, StreamRequest
from jhost.lowering.ir.operation import followed_dims
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from jhost.lowering.layouts.solve import Solution
from jhost.lowering.padding.reached import DimOfValue, reached_axes
from jhost.lowering.rules.dim_rule import DimRule, Dims

_PartSizes: TypeAlias = Mapping[str, Sequence[int]]
"""For each axis that is split, the sizes of its parts."""

_GAIN = 2
"""Whole axes have to move at least so many times the bytes that their parts move."""


@dataclasses.dataclass(frozen=True, slots=True)
class SplitAxes:
    """A program on the user's mesh -> one with axes in parts, if that moves less.

    Nothing outside of the program knows its parts.  So its parameters and results have
    layouts of the user's mesh.  Axes `between` processes stay whole.  All axes stay
    whole in a program with marks of streams, or with specs of its own.
    """

    name: ClassVar[str] = "split_axes"

    propagate: PropagateLayouts
    between: frozenset[str] = frozenset()

    def apply(self, program: Program) -> Program:
        """`program`, and the bodies in it, on a mesh with some axes split."""
        sizes = self.sizes(program)
        if not sizes:
            return program
        whole = self.propagate.solution(program)
        if not whole.price.moved.all:
            return program
        split = self.on_parts(
            program, whole, _MeshOfParts(*with_parts(program.mesh, sizes))
        )
        moved = self.propagate.solution(split).price.in_bytes.all
        return split if _GAIN * moved <= whole.price.in_bytes.all else program

    def on_parts(
        self, program: Program, whole: Solution, parts: _MeshOfParts
    ) -> Program:
        """`program` on parts; its ends have layouts of the user's mesh.

        An end that the solver lays out over some parts of an axis gets the layout that
        it has in `whole`, the solution without parts.
        """
        program = parts.program(program)
        layouts = self.propagate.solution(program).layouts
        ends = {b.name: layouts[b.name] for b in (*program.params, *program.results)}
        for name, layout in ends.items():
            if not parts.is_given(layout):
                ends[name] = tuple(map(parts.of, whole.layouts[name]))
        return _with_ends(program, ends)

    def sizes(self, program: Program) -> _PartSizes:
        """The parts that dims of reshapes could take."""
        mesh = dict(program.mesh.shape)
        rules = [rule for _, _, rule in _computed(program)]
        if any(rule.pinned is not None for rule in rules) or any(map(is_part, mesh)):
            return {}
        if any(isinstance(mark, StreamRequest) for mark in all_marks(program)):
            return {}
        steps = {n for rule in rules if rule.inner for n in _outer_steps(rule)}
        divisors = {
            axis: _divisors(size, steps, mesh)
            for axis, size in mesh.items()
            if axis not in self.between
        }
        if not any(divisors.values()):
            return {}
        short = _axes_without_room(program)
        found = {
            axis: _in_parts(mesh[axis], divisors[axis])
            for axis in divisors
            if axis in short
        }
        return {axis: parts for axis, parts in found.items() if len(parts) > 1}


def _computed(program: Program) -> Iterator[tuple[Program, Compute, DimRule]]:
    """Each computation in a program and its bodies, with where it is and its rule."""
    for each, stmt in held_statements(program):
        if isinstance(stmt, Compute):
            for unit_eqn in stmt.unit.eqns:
                yield each, stmt, unit_eqn.rule


def _outer_steps(rule: DimRule) -> Iterator[int]:
    """The steps of factors that have others inside of them."""
    every: Sequence[Dims] = (*rule.operands, *rule.results)
    for mapped in itertools.chain.from_iterable(every):
        while mapped is not None and mapped.inside is not None:
            yield rule.sizes[mapped.factor]
            mapped = mapped.inside


def _axes_without_room(program: Program) -> set[str]:
    """The axes that come to a merged dim whose outermost steps they do not divide.

    Only these can go on to the dims inside.  Devices that share a batch evenly leave
    none for what it is merged with.
    """
    reached, mesh = reached_axes(program), dict(program.mesh.shape)
    found = set[str]()
    for key, steps in _merged(program):
        axes = {axis for axes in reached.get(key, ()) for axis in axes}
        if steps % axes_size([*axes], mesh):
            found |= axes
    return found


def _merged(program: Program) -> Iterator[tuple[DimOfValue, int]]:
    """The merged dims in a program and its bodies, with their outermost steps."""
    for each, stmt, rule in _computed(program):
        for buffer, dim, mapped in followed_dims(stmt) if rule.inner else ():
            if mapped.inside is not None:
                yield (id(each), buffer.name, dim), rule.sizes[mapped.factor]


def _divisors(size: int, steps: set[int], mesh: Mapping[str, int]) -> list[int]:
    """How many devices of an axis of that size could share steps.

    Other axes may share them first.
    """
    others = {1, *mesh.values()}
    left = {n // other for n in steps for other in others if n % other == 0}
    found = {math.gcd(n, size) for n in left}
    return sorted(n for n in found if 1 < n < size)


def _in_parts(size: int, divisors: Sequence[int]) -> tuple[int, ...]:
    """Parts that have products of all `divisors`, of those that divide each other."""
    parts, taken = list[int](), 1
    for divisor in (*divisors, size):
        if divisor % taken == 0:
            parts.append(divisor // taken)
            taken = divisor
    return tuple(parts)


# --- The program on parts ----------------------------------------------------------- #


@dataclasses.dataclass(frozen=True, slots=True)
class _MeshOfParts:
    """A mesh of parts, and which of them an axis is."""

    mesh: AbstractMesh
    by_axis: Mapping[str, tuple[str, ...]]

    def program(self, program: Program) -> Program:
        """A program, with the bodies in it, on the mesh of parts."""

        def on_parts(each: Program) -> Program:
            marks = tuple(map(self.mark, each.marks))
            return dataclasses.replace(each, mesh=self.mesh, marks=marks)

        return rebuilt(program, on_parts)

    def mark(self, mark: Mark) -> Mark:
        if not isinstance(mark, ShardMark):
            return mark
        spec = tuple(axes and self.of(axes) for axes in mark.spec)
        return dataclasses.replace(mark, spec=spec)

    def of(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(part for a in axes for part in self.by_axis.get(a, (a,)))

    def is_given(self, layout: Layout) -> bool:
        """Whether the user's mesh has a layout."""
        names = self.mesh.axis_names
        return all(given_axes(axes, names) is not None for axes in layout)


def _with_ends(program: Program, layouts: Mapping[str, Layout]) -> Program:
    """`program` with those layouts of its parameters and results."""
    said = {m.buffer: m for m in program.marks if isinstance(m, ShardMark)}
    marks = [mark for mark in program.marks if mark not in said.values()]
    for name, layout in layouts.items():
        where = said[name].where if name in said else NO_LINE
        said[name] = ShardMark(buffer=name, spec=layout, where=where)
    return dataclasses.replace(program, marks=(*marks, *said.values()))
