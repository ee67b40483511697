"""Where each transfer of a program stands among its work, in the user's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jhost.lowering.frontend.value_names import described
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW
from jhost.lowering.ir.display_names import display_name
from jhost.lowering.ir.program import Program

START, END = "the start", "the end"


class TransferPlace(NamedTuple):
    """The work around a transfer.

    It is issued `behind` one work, and waited for `before` another.  `between` has the
    works between the two, and `beside` is the number of matmuls in these.
    """

    behind: str
    before: str
    between: tuple[str, ...]
    beside: int


class _Work(NamedTuple):
    name: str
    matmuls: int


def places_of(program: Program) -> Mapping[str, TransferPlace]:
    """The places of the transfers outside of loops over chunks, by name."""
    works: list[_Work] = []
    issued: dict[str, int] = {}
    awaited: dict[str, int] = {}
    for stmt in program.body:
        match stmt:
            case ir.Communicate(name=name):
                issued[name] = len(works)
            case ir.Wait(communication=name) if name in issued:
                awaited[name] = len(works)
            case _:
                works += _work(program, stmt)
    return {name: _place(works, issued[name], last) for name, last in awaited.items()}


def _place(works: list[_Work], first: int, last: int) -> TransferPlace:
    between = works[first:last]
    return TransferPlace(
        behind=works[first - 1].name if first else START,
        before=works[last].name if last < len(works) else END,
        between=tuple(work.name for work in between),
        beside=sum(work.matmuls for work in between),
    )


def _work(program: Program, stmt: ir.Stmt) -> Iterator[_Work]:
    """The work in a statement: matmuls, loops and bodies."""
    match stmt:
        case ir.For():
            # Its own transfers are reported with their chunks: here it is one work.
            yield _Work("a loop over chunks", _matmuls(stmt))
        case ir.Compute():
            yield from _contractions(program, stmt)
        case _ if isinstance(stmt, CONTROL_FLOW):
            where = f" [{stmt.where}]" if stmt.where else ""
            # No matmuls: how often a body runs is not always known, and it has a report
            # of its own.
            yield _Work(f"a {type(stmt).__name__.lower()}{where}", 0)
        case _:
            pass


def _contractions(program: Program, stmt: ir.Compute) -> Iterator[_Work]:
    outs = dict(zip(stmt.unit.outvars, stmt.outs, strict=True))
    for each in stmt.unit.eqns:
        if each.rule.contracts:
            out = outs.get(each.eqn.outvars[0])
            name = display_name(program, out.name) if out else described(each.eqn)
            yield _Work(name, 1)


def _matmuls(stmt: ir.Stmt) -> int:
    """The contractions of a statement, all iterations of a loop counted."""
    if isinstance(stmt, ir.For):
        return stmt.extent * sum(map(_matmuls, stmt.body))
    if not isinstance(stmt, ir.Compute):
        return 0
    return sum(eqn.rule.contracts for eqn in stmt.unit.eqns)
