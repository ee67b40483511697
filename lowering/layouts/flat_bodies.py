"""A program and its bodies as one list of operations, so that one solver lays out all.

There is an operation wherever a value enters a body or leaves it.  So layouts outside
of a body influence those inside, and the other way round.  The name of a value in a
body begins with the path to that body.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, ITERATIONS
from jhost.lowering.ir.border import Crossing, scan_border, while_border
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.names import path_into
from jhost.lowering.ir.operation import Operation, operation
from jhost.lowering.ir.program import Program
from jhost.lowering.rules.dim_rule import FactorDim


@dataclasses.dataclass(frozen=True, slots=True)
class FlatBorder:
    """The border of one control flow statement, around each of its bodies.

    `enters` has, for each body, the operation for each of its params.  `leaves` has the
    operation for each of its results.  `outs` has those by which readers outside see
    the results.
    """

    bodies: tuple[FlatBody, ...]
    enters: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[int, ...], ...]
    outs: tuple[int, ...]


FlatStep: TypeAlias = int | FlatBorder | None
"""The operation of a statement, or its border; a statement may have neither."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlatBody:
    """One of the programs; it runs `repeats` times, and `steps` are its statements."""

    program: Program
    prefix: str
    repeats: int
    steps: tuple[FlatStep, ...]

    def walk(self) -> Iterator[FlatBody]:
        """This body and all bodies in it."""
        yield self
        for step in self.steps:
            for body in step.bodies if isinstance(step, FlatBorder) else ():
                yield from body.walk()


Flattened: TypeAlias = tuple[tuple[Operation, ...], FlatBody]
"""All operations of a program in order, and the bodies that say which are whose."""


def flattened(program: Program) -> Flattened:
    """The operations of a program and of all bodies in it."""
    flattener = _Flattener()
    flat = flattener.body(program, "", 1)
    return tuple(flattener.operations), flat


_NamedValues: TypeAlias = Sequence[tuple[str, ir.Buffer]]
"""Values with their names in the operations."""


class _Flattener:
    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def body(self, program: Program, prefix: str, repeats: int) -> FlatBody:
        steps = [
            self.step(stmt, path_into(prefix, number), prefix, repeats)
            for number, stmt in enumerate(program.body)
        ]
        return FlatBody(program, prefix, repeats, tuple(steps))

    def step(self, stmt: ir.Stmt, inner: str, prefix: str, repeats: int) -> FlatStep:
        """One statement; `inner` is the path into it, and `prefix` the path to it."""
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
    # The solver breaks ties by the order of operations, so the ones that enter a body
    # come before its own, and the ones that leave it come after.

    def cross(
        self,
        stmt: ir.ControlFlow,
        values: _NamedValues,
        outs: Sequence[str | None],
        likes: Sequence[str] | None = None,
        **how: bool,
    ) -> tuple[int, ...]:
        """The operations by which values cross a border.

        `outs` are the names behind it.  A value with an entry in `likes` gets the
        layout of that value.  `crossing` explains `how`.
        """
        rows = zip(values, outs, likes or [None] * len(values), strict=True)
        return tuple(
            self.add(crossing(stmt, value, out, like=like, **how))
            for value, out, like in rows
        )

    def enter(
        self,
        stmt: ir.ControlFlow,
        ways: tuple[str, str],
        crossings: Sequence[Crossing],
        likes: Sequence[str] | None = None,
        **how: bool,
    ) -> tuple[int, ...]:
        """Operations into a body; `ways` are the paths to the statement and into it."""
        prefix, inner = ways
        values = _named(prefix, [each.outside for each in crossings])
        return self.cross(stmt, values, _inside(inner, crossings), likes, **how)

    def leave(
        self,
        stmt: ir.ControlFlow,
        ways: tuple[str, str],
        crossings: Sequence[Crossing],
        likes: Sequence[str] | None = None,
        **how: bool,
    ) -> tuple[int, ...]:
        """Operations out of a body; reshards of these values come behind `stmt`."""
        prefix, inner = ways
        values = _named(inner, [each.inside for each in crossings])
        outs = _names(prefix, [each.outside for each in crossings])
        return self.cross(stmt, values, outs, likes, forwards=False, **how)

    def scan(self, stmt: ir.Scan, inner: str, prefix: str, repeats: int) -> FlatBorder:
        """Constants and slices keep their layouts from outside, so no weight is whole.

        A carried value has one layout at the start of an iteration and at its end.
        """
        border, ways = scan_border(stmt), (prefix, inner)
        enters = (
            *self.enter(stmt, ways, border.consts, taking=True),
            # A carried value has a layout of its own, which the solver decides.
            *self.enter(stmt, ways, border.carry),
            *self.enter(stmt, ways, border.xs, taking=True, stacked_in=True),
        )
        # A scan of length 0 is laid out too, as if it ran once.
        body = self.body(stmt.body, inner, repeats * max(1, stmt.length))
        carried = _inside(inner, border.carry)
        leaves = (
            *self.leave(stmt, ways, border.carried, carried, taking=True),
            *self.leave(stmt, ways, border.ys, taking=True, stacked_out=True),
        )
        return FlatBorder((body,), (enters,), (leaves,), leaves)

    def while_loop(
        self, stmt: ir.While, inner: str, prefix: str, repeats: int
    ) -> FlatBorder:
        """The condition reads carried values in the layouts that the body has."""
        way, to_condition = path_into(inner, "body"), path_into(inner, "condition")
        border, ways, asking = while_border(stmt), (prefix, way), (prefix, to_condition)
        carried = _inside(way, border.carry)
        into_body = (
            *self.enter(stmt, ways, border.consts, taking=True),
            *self.enter(stmt, ways, border.carry),
        )
        into_condition = (
            *self.enter(stmt, asking, border.condition_consts, taking=True),
            *self.enter(stmt, asking, border.asked, carried, taking=True),
        )
        # A `while` does not say how often it runs, so an assumed number counts.
        repeats *= ITERATIONS
        condition = self.body(stmt.condition, to_condition, repeats)
        answer = self.cross(stmt, _named(to_condition, stmt.condition.results), [None])
        body = self.body(stmt.body, way, repeats)
        leaves = self.leave(stmt, ways, border.carried, carried)
        return FlatBorder(
            (condition, body), (into_condition, into_body), (answer, leaves), leaves
        )

    def cond(self, stmt: ir.Cond, inner: str, prefix: str, repeats: int) -> FlatBorder:
        """All branches give a result in the layout of the first that works for it.

        The gradient of a branch gives constants for what only other branches need.
        """
        bodies: list[FlatBody] = []
        enters: list[tuple[int, ...]] = []
        # All devices take one branch, so each device needs the whole index.
        chosen_by = self.cross(stmt, _named(prefix, [stmt.index]), [None])
        operands, outs = _named(prefix, stmt.operands), _names(prefix, stmt.outs)
        ways = [path_into(inner, number) for number in range(len(stmt.branches))]
        for way, branch in zip(ways, stmt.branches, strict=True):
            entering = self.cross(
                stmt, operands, _names(way, branch.params), taking=True
            )
            enters.append((*chosen_by, *entering))
            bodies.append(self.body(branch, way, repeats))
        results = [
            _named(way, branch.results)
            for way, branch in zip(ways, stmt.branches, strict=True)
        ]
        deciding = _deciding(stmt.branches)
        # Readers outside see the layout of the branch that decides.
        decided = [
            self.add(crossing(stmt, results[number][place], outs[place]))
            for place, number in enumerate(deciding)
        ]
        leaves = [
            tuple(
                decided[place]
                if number == deciding[place]
                else self.add(crossing(stmt, value, None, like=outs[place]))
                for place, value in enumerate(values)
            )
            for number, values in enumerate(results)
        ]
        return FlatBorder(tuple(bodies), tuple(enters), tuple(leaves), tuple(decided))


def _deciding(branches: Sequence[Program]) -> list[int]:
    """For each result, the first branch that does not make it of single elements."""
    made = [_made_of_dims(branch) for branch in branches]
    return [
        next((n for n, value in enumerate(values) if value.name in made[n]), 0)
        for values in zip(*(branch.results for branch in branches), strict=True)
    ]


def _made_of_dims(program: Program) -> set[str]:
    """The values with dims that are made of others with dims."""
    made = {param.name for param in program.params if param.shape}
    for stmt in program.body:
        reads, writes = reads_writes(stmt)
        if any(buffer.name in made for buffer in reads):
            made.update(buffer.name for buffer in writes if buffer.shape)
    return made


def _named(prefix: str, buffers: Sequence[ir.Buffer]) -> _NamedValues:
    return [(prefix + buffer.name, buffer) for buffer in buffers]


def _names(prefix: str, buffers: Sequence[ir.Buffer]) -> list[str]:
    return [prefix + buffer.name for buffer in buffers]


def _inside(way: str, crossings: Sequence[Crossing]) -> list[str]:
    return [way + each.inside.name for each in crossings]


def crossing(
    stmt: ir.ControlFlow,
    source: tuple[str, ir.Buffer],
    out: str | None,
    *,
    stacked_in: bool = False,
    stacked_out: bool = False,
    taking: bool = False,
    like: str | None = None,
    forwards: bool = True,
) -> Operation:
    """The operation by which a value enters a body or leaves it.

    `out` is its name behind the border, if it has one.  A value that is `stacked_in`
    loses its leading dim, and a value that is `stacked_out` gains one.  That dim is
    whole on every device.
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
        forwards=forwards and out is not None,
        taking=taking,
        like=like,
    )


def repeats_of(flat: FlatBody) -> dict[str, int]:
    """For each value that is made more than once, how often."""
    return {
        name: each.repeats
        for each in flat.walk()
        if each.repeats > 1
        for name in _values(each)
    }


def buffers_of(flat: FlatBody) -> dict[str, ir.Buffer]:
    """Every value that has a layout of its own, by its name in the operations."""
    return {
        name: buffer for each in flat.walk() for name, buffer in _values(each).items()
    }


def _values(flat: FlatBody) -> dict[str, ir.Buffer]:
    values: list[ir.Buffer] = [*flat.program.params]
    for stmt in flat.program.body:
        if isinstance(stmt, ir.Set):
            values.append(stmt.out)
        elif isinstance(stmt, (ir.Compute, *CONTROL_FLOW)):
            values += stmt.outs
    return {flat.prefix + buffer.name: buffer for buffer in values}
