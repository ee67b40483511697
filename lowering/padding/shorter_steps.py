"""Gradients of maxima in windows, with steps that come in equal parts.

In 36 rows there are 18 stretches between windows that begin two rows apart, and four
devices do not divide these.  They do divide the rows, so a step is one row then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from typing import ClassVar

from jhost.lowering.ir.bodies import statements, with_each_body
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute, Stmt
from jhost.lowering.padding.reached import ReachedAxes, reached_axes
from jhost.lowering.rules.pooling import longest_steps, scattered_by


@dataclasses.dataclass(frozen=True, slots=True)
class ShorterSteps:
    """Steps that axes which may reach their dim do not divide -> ones that they do."""

    name: ClassVar[str] = "shorter_steps"

    def apply(self, program: Program) -> Program:
        """`program`, and the bodies in it, with other rules of such gradients."""
        if not any(map(_is_scattered, statements(program))):
            return program
        return _shortened(program, reached_axes(program))


def _is_scattered(stmt: Stmt) -> bool:
    if not isinstance(stmt, Compute):
        return False
    return stmt.unit.eqns[0].eqn.primitive.name == "select_and_scatter_add"


def _shortened(program: Program, reached: ReachedAxes) -> Program:
    way = id(program)  # from before its bodies change
    program = with_each_body(program, functools.partial(_shortened, reached=reached))
    mesh = dict(program.mesh.shape)
    body = tuple(
        _with_steps(stmt, way, reached, mesh)
        if isinstance(stmt, Compute) and _is_scattered(stmt)
        else stmt
        for stmt in program.body
    )
    return dataclasses.replace(program, body=body)


def _with_steps(
    stmt: Compute, way: int, reached: ReachedAxes, mesh: Mapping[str, int]
) -> Compute:
    (unit_eqn,), (out,) = stmt.unit.eqns, stmt.outs
    longest = longest_steps(unit_eqn.eqn)
    steps: list[int] = []
    for dim, (size, step) in enumerate(zip(out.shape, longest, strict=True)):
        axes = reached.get((way, out.name, dim), ())
        steps.append(_step(size, step, {axes_size(each, mesh) for each in axes}))
    if steps == longest:
        return stmt
    rule = scattered_by(unit_eqn.eqn, steps)
    made = dataclasses.replace(unit_eqn, rule=rule, axes=((),) * len(rule.sizes))
    unit = dataclasses.replace(stmt.unit, eqns=(made,))
    return dataclasses.replace(stmt, unit=unit)


def _step(size: int, longest: int, devices: Collection[int]) -> int:
    """The longest step that comes in equal parts wherever single elements do."""
    count = math.lcm(*(n for n in devices if size % n == 0))
    return math.gcd(longest, size // count)
