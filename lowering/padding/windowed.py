"""Which dims to pad so that dims read in windows have equal parts.

`x[1:] - x[:-1]` of 256 rows has 255, which no mesh divides.  With one row of padding
each device has its part of them, and needs one row of a neighbour's.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from jhost._jax import NO_LINE, source_line
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, programs
from jhost.lowering.ir.border import (
    ScanBorder,
    WhileBorder,
    scan_border,
    while_border,
)
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import operand_maps
from jhost.lowering.ir.program import Program
from jhost.lowering.padding.flat import with_paths
from jhost.lowering.padding.region import PadRequest

_DimOfValue: TypeAlias = tuple[int, str, int]
"""A dim of a value: the program by its id, the value's name, and which dim it is."""

_MarkAxes: TypeAlias = tuple[str, ...]

# Over 16 devices four elements are padded, and three are not.
_MOST_TIMES = 4
"""How many times as long padding may make a dim."""

ReachedAxes: TypeAlias = Mapping[_DimOfValue, set[_MarkAxes]]
"""By dim, the axes that may come to lie on it, each as a mark has them."""


def windowed_requests(program: Program) -> list[PadRequest]:
    """The dims that windows of a program, and of its bodies, want to be padded."""
    wanted = [
        wish
        for each in programs(program)
        for stmt in each.body
        if isinstance(stmt, ir.Compute)
        for wish in _windowed(each, stmt)
    ]
    mesh = dict(program.mesh.shape)
    # By all devices, before it is known which axes come: more than enough.
    uneven = [wish for wish in wanted if wish.size % math.prod(mesh.values())]
    if not uneven:  # as in most programs
        return []
    reached = reached_axes(program)
    # Two statements may have one body: it is built once for each jaxpr.
    paths: dict[int, list[str]] = {}
    for path, each in with_paths(program):
        paths.setdefault(id(each), []).append(path)
    requests: list[PadRequest] = []
    for wish in uneven:
        # Sorted, because all processes have to write the same program.
        for axes in sorted(reached.get(wish.dim, ())):
            devices = axes_size(axes, mesh)
            # One element has no parts.  Of few elements, many more would be padding.
            few = wish.size == 1 or _MOST_TIMES * wish.size < devices
            if wish.size % devices and not few:
                requests += [
                    PadRequest(
                        buffer=path + wish.dim[1],
                        dim=wish.dim[2],
                        size=wish.size,
                        axes=axes,
                        devices=devices,
                        where=wish.where,
                    )
                    for path in paths[wish.dim[0]]
                ]
    return requests


@dataclasses.dataclass(frozen=True, slots=True)
class _WindowedDim:
    dim: _DimOfValue
    size: int
    where: str


def _windowed(program: Program, stmt: ir.Compute) -> Iterator[_WindowedDim]:
    """The dims that a computation reads in windows, and those that they make."""
    (unit_eqn,) = stmt.unit.eqns
    rule = unit_eqn.rule
    if not rule.windowed:
        return
    line = source_line(unit_eqn.eqn)
    where = "" if line == NO_LINE else line
    maps = (*operand_maps(stmt), *rule.results)
    for buffer, dims in zip((*stmt.ins, *stmt.outs), maps, strict=True):
        for dim, mapped in enumerate(dims):
            if mapped is not None and mapped.factor in rule.windowed:
                key = id(program), buffer.name, dim
                yield _WindowedDim(key, buffer.shape[dim], where)


# --- Where axes may come ------------------------------------------------------------ #


def reached_axes(program: Program) -> ReachedAxes:
    """The axes that users put on some dim and that follow factors to others."""
    beside: dict[_DimOfValue, set[_DimOfValue]] = {}
    reached: dict[_DimOfValue, set[_MarkAxes]] = {}
    queue: deque[tuple[_DimOfValue, _MarkAxes]] = deque()
    for each in programs(program):
        for dims in _alike(each):
            first, *others = dims
            for other in others:
                beside.setdefault(first, set()).add(other)
                beside.setdefault(other, set()).add(first)
        for mark in each.marks:
            if isinstance(mark, ShardMark):
                queue += [
                    ((id(each), mark.buffer, dim), axes)
                    for dim, axes in enumerate(mark.spec)
                    if axes
                ]
    while queue:
        dim, axes = queue.popleft()
        if axes not in reached.setdefault(dim, set()):
            reached[dim].add(axes)
            queue += [(other, axes) for other in beside.get(dim, ())]
    return reached


def _alike(program: Program) -> Iterator[list[_DimOfValue]]:
    """Groups of dims that an axis may lie on together."""
    for stmt in program.body:
        if isinstance(stmt, ir.Compute):
            yield from _by_factor(program, stmt)
        elif isinstance(stmt, ir.Set):
            yield from _pairs(program, stmt.source, program, stmt.out)
        elif isinstance(stmt, CONTROL_FLOW):
            yield from _across(program, stmt)


def _by_factor(program: Program, stmt: ir.Compute) -> Iterator[list[_DimOfValue]]:
    (unit_eqn,) = stmt.unit.eqns
    found: dict[int, list[_DimOfValue]] = {}
    maps = (*operand_maps(stmt), *unit_eqn.rule.results)
    for buffer, dims in zip((*stmt.ins, *stmt.outs), maps, strict=True):
        for dim, mapped in enumerate(dims):
            if mapped is not None:
                key = id(program), buffer.name, dim
                found.setdefault(mapped.factor, []).append(key)
    yield from found.values()


def _across(program: Program, stmt: ir.ControlFlow) -> Iterator[list[_DimOfValue]]:
    """Dims inside of bodies and outside of them; stacked values have one more there."""
    match stmt:
        case ir.Scan(body=body):
            border = scan_border(stmt)
            yield from _of_iterations(program, body, border)
            for outside, inside in (*border.xs, *border.ys):
                yield from _pairs(program, outside, body, inside, stacked=1)
        case ir.While(body=body):
            yield from _of_iterations(program, body, while_border(stmt))
        case ir.Cond():
            for branch in stmt.branches:
                for buffer, param in zip(stmt.operands, branch.params, strict=True):
                    yield from _pairs(program, buffer, branch, param)
                for buffer, made in zip(stmt.outs, branch.results, strict=True):
                    yield from _pairs(program, buffer, branch, made)


def _of_iterations(
    program: Program, body: Program, border: ScanBorder | WhileBorder
) -> Iterator[list[_DimOfValue]]:
    """The dims of values that all iterations read, or that each hands to the next."""
    for outside, inside in (*border.consts, *border.carry, *border.carried):
        yield from _pairs(program, outside, body, inside)
    # A value that leaves an iteration enters the next one.
    for start, end in zip(border.carry, border.carried, strict=True):
        yield from _pairs(body, start.inside, body, end.inside)


def _pairs(
    outside: Program,
    buffer: ir.Buffer,
    inside: Program,
    other: ir.Buffer,
    stacked: int = 0,
) -> Iterator[list[_DimOfValue]]:
    for dim in range(len(other.shape)):
        yield [
            (id(outside), buffer.name, dim + stacked),
            (id(inside), other.name, dim),
        ]
