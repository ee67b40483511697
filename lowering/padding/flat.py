"""A program and its bodies as one row of operands, so that padding crosses borders.

A carried value is one thing on both sides of its border: what enters the body, what an
iteration hands to the next, and what leaves have one size.  So there are operands for
each value that crosses, beside those of each statement.  As where layouts are solved,
the name of a value in a body begins with the path to that body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jhost.lowering.ir.bodies import CONTROL_FLOW
from jhost.lowering.ir.border import Crossing, scan_border, while_border
from jhost.lowering.ir.names import path_into
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Cond, ControlFlow, Scan, While
from jhost.lowering.padding.operands import Operands, operands_of
from jhost.lowering.rules.dim_rule import Dims, FactorDim


class CrossingValue(NamedTuple):
    """A value on one side of a border, by its name there.

    It crosses by the operands of that `number`, and `dims` follow them.
    """

    buffer: Buffer
    number: int
    dims: Dims


@dataclasses.dataclass(frozen=True, slots=True)
class OperandsOfBody:
    """One of the programs, with the operands of its statements by their numbers.

    `enters` are the values that control flow hands to it, and `params` and `results`
    what it calls those that it takes and gives.
    """

    program: Program
    prefix: str
    params: tuple[CrossingValue, ...]
    results: tuple[CrossingValue, ...]
    enters: tuple[CrossingValue, ...] = ()
    steps: tuple[OperandsOfStep, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class OperandsOfBorder:
    """The bodies of a control flow statement, and what leaves it."""

    bodies: tuple[OperandsOfBody, ...]
    outs: tuple[CrossingValue, ...]


OperandsOfStep: TypeAlias = int | OperandsOfBorder
"""The operands of a statement, or its border."""


def flat_operands(
    program: Program,
) -> tuple[tuple[Operands | None, ...], OperandsOfBody]:
    """The operands of all statements and crossings, and which are whose."""
    found = _AllOperands(dict(program.mesh.shape))
    params, results = map(_of_caller, (program.params, program.results))
    flat = found.body(OperandsOfBody(program, "", params=params, results=results))
    return tuple(found.operands), flat


def _of_caller(buffers: Sequence[Buffer]) -> tuple[CrossingValue, ...]:
    """Values that keep their sizes: no operands tie them to others."""
    return tuple(CrossingValue(each, -1, (None,) * len(each.shape)) for each in buffers)


def with_paths(program: Program, prefix: str = "") -> Iterator[tuple[str, Program]]:
    """A program and all bodies in it, each with the path to it."""
    yield prefix, program
    for number, stmt in enumerate(program.body):
        for place, body in enumerate(
            stmt.bodies if isinstance(stmt, CONTROL_FLOW) else ()
        ):
            yield from with_paths(body, path_into(prefix, number, place))


class _AllOperands:
    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = mesh
        self.operands: list[Operands | None] = []

    def body(self, flat: OperandsOfBody) -> OperandsOfBody:
        steps = tuple(
            self.border(stmt, flat.prefix, number)
            if isinstance(stmt, CONTROL_FLOW)
            else self.add(operands_of(stmt, self.mesh), flat.prefix)
            for number, stmt in enumerate(flat.program.body)
        )
        return dataclasses.replace(flat, steps=steps)

    def add(self, op: Operands | None, prefix: str = "") -> int:
        if op is not None and prefix:
            op = dataclasses.replace(
                op,
                reads=tuple(_named(prefix, each) for each in op.reads),
                writes=tuple(_named(prefix, each) for each in op.writes),
            )
        self.operands.append(op)
        return len(self.operands) - 1

    # --- Control flow ----------------------------------------------------------- #

    def border(self, stmt: ControlFlow, prefix: str, number: int) -> OperandsOfBorder:
        ways = [path_into(prefix, number, place) for place in range(len(stmt.bodies))]
        match stmt:
            case Scan():
                return self.scan(stmt, prefix, *ways)
            case While():
                return self.while_loop(stmt, prefix, *ways)
            case Cond():
                return self.cond(stmt, prefix, ways)

    def scan(self, stmt: Scan, prefix: str, way: str) -> OperandsOfBorder:
        border = scan_border(stmt)
        consts = [self.enter(prefix, way, each) for each in border.consts]
        carry = [
            self.carry(prefix, [way], [start.inside], way, start.outside, end)
            for start, end in zip(border.carry, border.carried, strict=True)
        ]
        xs = [self.enter(prefix, way, each, stacked=1) for each in border.xs]
        ys = [self.leave(prefix, way, each) for each in border.ys]
        body = OperandsOfBody(
            stmt.body,
            way,
            enters=(*_firsts(consts), *(c.before for c in carry), *_firsts(xs)),
            params=(*_seconds(consts), *(c.inside[0] for c in carry), *_seconds(xs)),
            results=(*(c.end for c in carry), *_firsts(ys)),
        )
        outs = *(c.behind for c in carry), *_seconds(ys)
        return OperandsOfBorder((self.body(body),), outs)

    def while_loop(
        self, stmt: While, prefix: str, to_condition: str, way: str
    ) -> OperandsOfBorder:
        border = while_border(stmt)
        asking = [
            self.enter(prefix, to_condition, each) for each in border.condition_consts
        ]
        consts = [self.enter(prefix, way, each) for each in border.consts]
        carry = [
            self.carry(
                prefix,
                [to_condition, way],
                [asked.inside, start.inside],
                way,
                start.outside,
                end,
            )
            for asked, start, end in zip(
                border.asked, border.carry, border.carried, strict=True
            )
        ]
        before = tuple(c.before for c in carry)
        condition = OperandsOfBody(
            stmt.condition,
            to_condition,
            enters=(*_firsts(asking), *before),
            params=(*_seconds(asking), *(c.inside[0] for c in carry)),
            results=tuple(
                self.tied([(to_condition, each)])[0] for each in stmt.condition.results
            ),
        )
        body = OperandsOfBody(
            stmt.body,
            way,
            enters=(*_firsts(consts), *before),
            params=(*_seconds(consts), *(c.inside[1] for c in carry)),
            results=tuple(c.end for c in carry),
        )
        outs = tuple(c.behind for c in carry)
        return OperandsOfBorder((self.body(condition), self.body(body)), outs)

    def cond(self, stmt: Cond, prefix: str, ways: Sequence[str]) -> OperandsOfBorder:
        # A scalar has nothing to pad, but `enters` has a value for each operand.
        (index,) = self.tied([(prefix, stmt.index)])
        operands = [
            self.tied(
                [(prefix, buffer)],
                [
                    (way, branch.params[n])
                    for way, branch in zip(ways, stmt.branches, strict=True)
                ],
            )
            for n, buffer in enumerate(stmt.operands)
        ]
        results = [
            self.tied(
                [
                    (way, branch.results[n])
                    for way, branch in zip(ways, stmt.branches, strict=True)
                ],
                [(prefix, out)],
            )
            for n, out in enumerate(stmt.outs)
        ]
        bodies = [
            OperandsOfBody(
                branch,
                way,
                enters=(index, *(each[0] for each in operands)),
                params=tuple(each[1 + n] for each in operands),
                results=tuple(each[n] for each in results),
            )
            for n, (way, branch) in enumerate(zip(ways, stmt.branches, strict=True))
        ]
        return OperandsOfBorder(
            tuple(map(self.body, bodies)), tuple(each[-1] for each in results)
        )

    # --- One value ------------------------------------------------------------------ #

    def enter(
        self, prefix: str, way: str, each: Crossing, stacked: int = 0
    ) -> tuple[CrossingValue, ...]:
        return self.tied(
            [(prefix, each.outside)], [(way, each.inside)], stacked_in=stacked
        )

    def leave(self, prefix: str, way: str, each: Crossing) -> tuple[CrossingValue, ...]:
        return self.tied([(way, each.inside)], [(prefix, each.outside)], stacked_out=1)

    def carry(
        self,
        prefix: str,
        ways: Sequence[str],
        inside: Sequence[Buffer],
        way: str,
        before: Buffer,
        end: Crossing,
    ) -> _Carry:
        """What enters as `before`, and leaves each iteration as `end`."""
        first, last, *begins, behind = self.tied(
            [(prefix, before), (way, end.inside)],
            [*zip(ways, inside, strict=True), (prefix, end.outside)],
        )
        return _Carry(first, last, begins, behind)

    def tied(
        self,
        reads: Sequence[tuple[str, Buffer]],
        writes: Sequence[tuple[str, Buffer]] = (),
        stacked_in: int = 0,
        stacked_out: int = 0,
    ) -> tuple[CrossingValue, ...]:
        """Operands by which a value has one size on both sides of a border."""
        # All sides have one factor for each dim, so one of them pads all.  A stack's
        # leading dim counts the iterations: it is in no factor.
        shape = reads[0][1].shape[stacked_in:]
        dims = tuple(FactorDim(factor) for factor in range(len(shape)))
        read, written = (None,) * stacked_in + dims, (None,) * stacked_out + dims
        number = self.add(
            Operands(
                reads=tuple(_named(*each) for each in reads),
                writes=tuple(_named(*each) for each in writes),
                operands=(read,) * len(reads),
                results=(written,) * len(writes),
                steps=tuple(shape),
                reducers=(None,) * len(shape),
                counted=frozenset(),
            )
        )
        return (
            *(CrossingValue(buffer, number, read) for _, buffer in reads),
            *(CrossingValue(buffer, number, written) for _, buffer in writes),
        )


class _Carry(NamedTuple):
    before: CrossingValue
    end: CrossingValue
    inside: Sequence[CrossingValue]
    behind: CrossingValue


def _firsts(pairs: Sequence[tuple[CrossingValue, ...]]) -> Iterator[CrossingValue]:
    return (pair[0] for pair in pairs)


def _seconds(pairs: Sequence[tuple[CrossingValue, ...]]) -> Iterator[CrossingValue]:
    return (pair[1] for pair in pairs)


def _named(prefix: str, buffer: Buffer) -> Buffer:
    return dataclasses.replace(buffer, name=prefix + buffer.name)
