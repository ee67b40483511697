"""Where mesh axes may lie: where users put them, and along factors from there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, programs
from jhost.lowering.ir.border import (
    ScanBorder,
    WhileBorder,
    scan_border,
    while_border,
)
from jhost.lowering.ir.derived import derived
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import followed_dims
from jhost.lowering.ir.program import Program

DimOfValue: TypeAlias = tuple[int, str, int]
"""A dim of a value: the program by its id, the value's name, and which dim it is."""

_MarkAxes: TypeAlias = tuple[str, ...]

ReachedAxes: TypeAlias = Mapping[DimOfValue, set[_MarkAxes]]
"""For each dim, the axes that may shard it.  A mark of one dim names them together."""


@derived
def reached_axes(program: Program) -> ReachedAxes:
    """The axes that may shard each dim: the user's own, and those along factors."""
    beside: dict[DimOfValue, set[DimOfValue]] = {}
    reached: dict[DimOfValue, set[_MarkAxes]] = {}
    queue: deque[tuple[DimOfValue, _MarkAxes]] = deque()
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


def _alike(program: Program) -> Iterator[list[DimOfValue]]:
    """Groups of dims that an axis may lie on together."""
    for stmt in program.body:
        if isinstance(stmt, ir.Compute):
            yield from _by_factor(program, stmt)
        elif isinstance(stmt, ir.Set):
            yield from _pairs(program, stmt.source, program, stmt.out)
        elif isinstance(stmt, CONTROL_FLOW):
            yield from _across(program, stmt)


def _by_factor(program: Program, stmt: ir.Compute) -> Iterator[list[DimOfValue]]:
    found: dict[int, list[DimOfValue]] = {}
    for buffer, dim, mapped in followed_dims(stmt):
        key = id(program), buffer.name, dim
        found.setdefault(mapped.factor, []).append(key)
    yield from found.values()


def _across(program: Program, stmt: ir.ControlFlow) -> Iterator[list[DimOfValue]]:
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
) -> Iterator[list[DimOfValue]]:
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
) -> Iterator[list[DimOfValue]]:
    for dim in range(len(other.shape)):
        yield [
            (id(outside), buffer.name, dim + stacked),
            (id(inside), other.name, dim),
        ]
