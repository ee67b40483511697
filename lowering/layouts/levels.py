"""A program and the bodies in it as one list of operations, so one solver lays out all.

An operation stands wherever a value enters a body or leaves it.  So a layout outside
bears on the inside, and the other way round.  The name of a value in a body begins with
the way to that body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, ITERATIONS
from jhost.lowering.ir.operation import Operation, operation
from jhost.lowering.ir.program import Program
from jhost.lowering.rules.dim_rule import FactorDim

SEPARATOR = "/"
"""Ends each part of the way to a value in a body; no name of a buffer has it."""


def local_name(name: str) -> str:
    """The name that a value has in its own program."""
    return name.rpartition(SEPARATOR)[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Crossing:
    """The bodies of one statement.

    By body, the operations by which a value enters it for each of its params, and those
    by which each of its results leaves it.
    """

    levels: tuple[Level, ...]
    enters: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[int, ...], ...]


Step: TypeAlias = int | Crossing | None
"""The operation of a statement, or what it holds; a statement may be neither."""


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """One of the programs; it runs `repeats` times, and `steps` are its statements."""

    program: Program
    prefix: str
    repeats: int
    steps: tuple[Step, ...]

    def walk(self) -> Iterator[Level]:
        """This one and all below it."""
        yield self
        for step in self.steps:
            for level in step.levels if isinstance(step, Crossing) else ():
                yield from level.walk()


Flat: TypeAlias = tuple[tuple[Operation, ...], Level]
"""All operations of a program in order, and which of them are whose."""


def flattened(program: Program) -> Flat:
    """The operations of a program and of all bodies in it."""
    flattener = _Flattener()
    level = flattener.level(program, "", 1)
    return tuple(flattener.operations), level


class _Flattener:
    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def level(self, program: Program, prefix: str, repeats: int) -> Level:
        steps = [
            self.step(stmt, f"{prefix}{number}{SEPARATOR}", prefix, repeats)
            for number, stmt in enumerate(program.body)
        ]
        return Level(program, prefix, repeats, tuple(steps))

    def step(self, stmt: ir.Stmt, inner: str, prefix: str, repeats: int) -> Step:
        """One statement; `inner` is the way into it, and `prefix` the way to it."""
        if isinstance(stmt, ir.Compute | ir.Set):
            return self.add(operation(stmt, prefix))
        match stmt:
            case ir.Scan():
                return self.scan(stmt, inner, prefix, repeats)
            case ir.While():
                return self.while_loop(stmt, inner, prefix, repeats)
            case ir.Cond():
                return self.cond(stmt, inner, prefix, repeats)
            case _:
                return None

    def add(self, op: Operation) -> int:
        self.operations.append(op)
        return len(self.operations) - 1

    # --- Control flow ---------------------------------------------------------- #

    def scan(self, stmt: ir.Scan, inner: str, prefix: str, repeats: int) -> Crossing:
        """Constants and slices come as they are outside, so that no weight is whole.

        A carried value has one layout at the start of an iteration and at its end.
        """
        body, first = stmt.body, len(stmt.consts)
        last = first + len(stmt.carry)
        params = [inner + param.name for param in body.params]
        enters = [
            self.add(
                crossing(
                    stmt,
                    (prefix + buffer.name, buffer),
                    params[number],
                    stacked_in=number >= last,
                    # A carried value has a layout of its own, which the solver decides.
                    taking=not first <= number < last,
                )
            )
            for number, buffer in enumerate(stmt.ins)
        ]
        # A scan of length 0 is laid out, too.
        level = self.level(body, inner, repeats * max(1, stmt.length))
        leaves = [
            self.add(
                crossing(
                    stmt,
                    (inner + result.name, result),
                    prefix + out.name,
                    stacked_out=number >= len(stmt.carried),
                    like=params[first + number] if number < len(stmt.carried) else None,
                    taking=True,
                    hands_on=False,
                )
            )
            for number, (result, out) in enumerate(
                zip(body.results, stmt.outs, strict=True)
            )
        ]
        return Crossing((level,), (tuple(enters),), (tuple(leaves),))

    def while_loop(
        self, stmt: ir.While, inner: str, prefix: str, repeats: int
    ) -> Crossing:
        """The condition reads what is carried as the body does."""
        count, consts = len(stmt.condition_consts), len(stmt.consts)
        into_body = stmt.ins[count:]
        into_condition = (*stmt.condition_consts, *stmt.carry)
        body = inner + f"body{SEPARATOR}"
        condition = inner + f"condition{SEPARATOR}"
        params = [body + param.name for param in stmt.body.params]
        carried = params[consts:]
        entering_body = [
            self.add(
                crossing(
                    stmt,
                    (prefix + buffer.name, buffer),
                    params[number],
                    taking=number < consts,
                )
            )
            for number, buffer in enumerate(into_body)
        ]
        entering_condition = [
            self.add(
                crossing(
                    stmt,
                    (prefix + buffer.name, buffer),
                    condition + param.name,
                    taking=True,
                    like=carried[number - count] if number >= count else None,
                )
            )
            for number, (buffer, param) in enumerate(
                zip(into_condition, stmt.condition.params, strict=True)
            )
        ]
        # Nothing says how often a `while` goes round.
        repeats *= ITERATIONS
        asking = self.level(stmt.condition, condition, repeats)
        (asked,) = stmt.condition.results
        answer = self.add(crossing(stmt, (condition + asked.name, asked), None))
        level = self.level(stmt.body, body, repeats)
        leaves = [
            self.add(
                crossing(
                    stmt,
                    (body + result.name, result),
                    prefix + out.name,
                    like=param,
                    hands_on=False,
                )
            )
            for param, result, out in zip(
                carried, stmt.body.results, stmt.outs, strict=True
            )
        ]
        return Crossing(
            (asking, level),
            (tuple(entering_condition), tuple(entering_body)),
            ((answer,), tuple(leaves)),
        )

    def cond(self, stmt: ir.Cond, inner: str, prefix: str, repeats: int) -> Crossing:
        """The results of all branches lie as the first branch's do."""
        levels: list[Level] = []
        enters: list[tuple[int, ...]] = []
        leaves: list[tuple[int, ...]] = []
        # Every device takes the same branch, so each has to have the index.
        index = (prefix + stmt.index.name, stmt.index)
        chosen_by = self.add(crossing(stmt, index, None))
        for number, branch in enumerate(stmt.branches):
            way = f"{inner}{number}{SEPARATOR}"
            entering = [
                self.add(
                    crossing(
                        stmt,
                        (prefix + buffer.name, buffer),
                        way + param.name,
                        taking=True,
                    )
                )
                for buffer, param in zip(stmt.operands, branch.params, strict=True)
            ]
            levels.append(self.level(branch, way, repeats))
            leaving = [
                self.add(
                    crossing(
                        stmt,
                        (way + result.name, result),
                        None if number else prefix + out.name,
                        like=prefix + out.name if number else None,
                    )
                )
                for result, out in zip(branch.results, stmt.outs, strict=True)
            ]
            enters.append((chosen_by, *entering))
            leaves.append(tuple(leaving))
        return Crossing(tuple(levels), tuple(enters), tuple(leaves))


def crossing(
    stmt: ir.ControlFlow,
    source: tuple[str, ir.Buffer],
    out: str | None,
    *,
    stacked_in: bool = False,
    stacked_out: bool = False,
    taking: bool = False,
    like: str | None = None,
    hands_on: bool = True,
) -> Operation:
    """A value that enters a body or leaves it, under another name if it has one there.

    A value that is `stacked_in` loses its leading dim, and one that is `stacked_out`
    gains one.  That dim is whole on every device.
    """
    name, buffer = source
    shape = buffer.shape[1:] if stacked_in else buffer.shape
    dims = tuple(FactorDim(factor) for factor in range(len(shape)))
    results = () if out is None else (((None,) if stacked_out else ()) + dims,)
    return Operation(
        stmt=stmt,
        ins=(name,),
        outs=() if out is None else (out,),
        operands=(((None,) if stacked_in else ()) + dims,),
        results=results,
        sizes=tuple(shape),
        reducers=(None,) * len(shape),
        hands_on=hands_on and out is not None,
        taking=taking,
        like=like,
    )


def repeats_of(level: Level) -> dict[str, int]:
    """How often each value is made that is made more than once."""
    return {
        name: each.repeats
        for each in level.walk()
        if each.repeats > 1
        for name in _values(each)
    }


def buffers_of(level: Level) -> dict[str, ir.Buffer]:
    """Every value that has a layout of its own, by its name in the operations."""
    return {
        name: buffer for each in level.walk() for name, buffer in _values(each).items()
    }


def _values(level: Level) -> dict[str, ir.Buffer]:
    values: list[ir.Buffer] = [*level.program.params]
    for stmt in level.program.body:
        if isinstance(stmt, ir.Set):
            values.append(stmt.out)
        elif isinstance(stmt, (ir.Compute, *CONTROL_FLOW)):
            values += stmt.outs
    return {level.prefix + buffer.name: buffer for buffer in values}
