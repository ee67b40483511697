"""Programs in programs: the bodies of control flow, and one way to walk them."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.marks import Mark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.queues import MAIN, OWN, TRANSFERS
from jhost.lowering.ir.remarks import Remark

CONTROL_FLOW = (ir.Scan, ir.While, ir.Cond)

_KINDS = frozenset(CONTROL_FLOW)

ITERATIONS = 8
"""The number of iterations that is assumed for a `while`, which does not say it."""


def programs(program: Program) -> Iterator[Program]:
    """A program and all bodies in it, each before those that it holds."""
    yield program
    for body in held_bodies(program):
        yield from programs(body)


def statements(program: Program) -> Iterable[ir.Stmt]:
    """Every statement of a program, loops and bodies before what they hold."""
    if not _has_bodies(program):
        return ir.walk(program.body)
    return (stmt for _, stmt in held_statements(program))


def held_statements(program: Program) -> Iterator[tuple[Program, ir.Stmt]]:
    """Each of `statements` with the program or body that it stands in."""
    for stmt in ir.walk(program.body):
        yield program, stmt
        for body in stmt.bodies if isinstance(stmt, CONTROL_FLOW) else ():
            yield from held_statements(body)


def is_pipelined(program: Program) -> bool:
    """Whether streams order anything: loops, or transfers and the sums beside them."""
    return ir.SetCurrentStream in map(type, statements(program))


def has_loops(program: Program) -> bool:
    """Whether loops over chunks have put work on streams of their own."""
    return any(
        isinstance(stmt, ir.SetCurrentStream)
        and stmt.stream not in (MAIN, OWN, TRANSFERS)
        for stmt in statements(program)
    )


def adds_up(program: Program) -> bool:
    """Whether a loop adds to a sum chunk by chunk."""
    stmts = statements(program)
    return any(isinstance(stmt, ir.Compute) and stmt.reducer for stmt in stmts)


def most_under_way(program: Program) -> int:
    """The most communications that are under way at a time outside of loops."""
    most = 0
    for each in programs(program):
        under_way: set[str] = set()
        for stmt in each.body:
            if isinstance(stmt, ir.Communicate):
                under_way.add(stmt.name)
            elif isinstance(stmt, ir.Wait):
                under_way.discard(stmt.communication)
            most = max(most, len(under_way))
    return most


def rebuilt(program: Program, change: Callable[[Program], Program]) -> Program:
    """`program` with each of its bodies, and then itself, changed."""
    return change(with_each_body(program, lambda body: rebuilt(body, change)))


def with_each_body(program: Program, change: Callable[[Program], Program]) -> Program:
    """`program` with the bodies that it holds changed; itself if none of them is."""
    if not _has_bodies(program):
        return program
    body = tuple(
        with_bodies(stmt, [change(inner) for inner in stmt.bodies])
        if isinstance(stmt, CONTROL_FLOW)
        else stmt
        for stmt in program.body
    )
    # The same object if nothing changed: facts about a program are remembered by its
    # identity (`ir/derived.py`, `cost/remembering.py`).
    if all(map(operator.is_, body, program.body)):
        return program
    return dataclasses.replace(program, body=body)


class EachProgram(abc.ABC):
    """A pass that sees one program at a time: bodies first, then what holds them."""

    __slots__ = ()

    def apply(self, program: Program) -> Program:
        """`program` after the pass, with all bodies in it."""
        return rebuilt(program, self.change)

    def sees(self, program: Program) -> object:
        """What the pass uses of stream marks, besides their values and dims.

        If programs differ only in their marks, and this is equal, the pass makes the
        same change in them, except for the marks themselves.
        """
        return [mark for mark in program.marks if isinstance(mark, StreamChoice)]

    @abc.abstractmethod
    def change(self, program: Program) -> Program:
        """One program after the pass, whatever its bodies hold."""


def with_bodies(stmt: ir.ControlFlow, bodies: Sequence[Program]) -> ir.ControlFlow:
    """`stmt` with other bodies; itself if they are its own."""
    if all(map(operator.is_, bodies, stmt.bodies)):
        return stmt
    match stmt:
        case ir.Scan():
            (body,) = bodies
            return dataclasses.replace(stmt, body=body)
        case ir.While():
            condition, body = bodies
            return dataclasses.replace(stmt, condition=condition, body=body)
        case ir.Cond():
            return dataclasses.replace(stmt, branches=tuple(bodies))


def held_bodies(program: Program) -> Iterator[Program]:
    """The bodies that a program holds itself."""
    # Chunk loops hold no control flow: it has no part in a stream.
    for stmt in program.body if _has_bodies(program) else ():
        if isinstance(stmt, CONTROL_FLOW):
            yield from stmt.bodies


def _has_bodies(program: Program) -> bool:
    """Whether a program holds control flow itself."""
    # One look at all types: most programs have none, and passes ask often.
    return not _KINDS.isdisjoint(map(type, program.body))


# --- What is said of values, wherever they are -------------------------------------- #


def all_marks(program: Program) -> list[Mark]:
    """The marks of a program and of all bodies in it."""
    return [mark for each in programs(program) for mark in each.marks]


def with_marks(program: Program, marks: Sequence[Mark]) -> Program:
    """`program` with others in the place of `all_marks`, one for each."""
    return _with_marks(program, iter(marks))


def _with_marks(program: Program, marks: Iterator[Mark]) -> Program:
    # Each program takes its own off one iterator, in the order of `all_marks`.
    own = tuple(next(marks) for _ in program.marks)
    program = with_each_body(program, lambda body: _with_marks(body, marks))
    if all(map(operator.is_, own, program.marks)):
        return program
    return dataclasses.replace(program, marks=own)


def is_alike(program: Program, other: Program) -> bool:
    """Whether two programs only differ in the fields of stream marks."""
    return (
        # By identity: facts about statements are cached by it, so an equal copy is new.
        program.body is other.body
        and program.params == other.params
        and program.results == other.results
        and program.is_body == other.is_body
        and program.staying == other.staying
        and program.display_names is other.display_names
        and len(program.marks) == len(other.marks)
        and all(map(_is_same_mark, program.marks, other.marks))
    )


def _is_same_mark(mark: Mark, other: Mark) -> bool:
    if not isinstance(mark, StreamChoice) or not isinstance(other, StreamChoice):
        return mark == other
    return (mark.buffer, mark.dim) == (other.buffer, other.dim)


def all_remarks(program: Program) -> list[Remark]:
    """The remarks on a program and on all bodies in it."""
    return [remark for each in programs(program) for remark in each.remarks]
