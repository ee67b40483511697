"""Which work is cheap enough to move with a transfer, or to wait.

Blocks of statements (`blocks.py`) and groups of nodes (`shards_ahead.py`) ask alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.layout import bytes_in
from jhost.lowering.rules.properties import VIEWS

_PARTS = VIEWS | {"dynamic_slice", "slice"}
"""Primitives that take parts of a value, or see it in another shape."""


def is_cheap(eqn: ir.UnitEqn) -> bool:
    """Whether an equation works on one element at a time, and has no effects."""
    rule = eqn.rule
    if rule.contracts or rule.reduces or rule.is_closed or eqn.eqn.effects:
        return False
    if eqn.eqn.primitive.name in _PARTS:
        return True
    # A sort, a cumulative sum or a lookup of rows needs some dim as a whole.
    whole = any(None in dims for dims in rule.results)
    return not (whole or rule.picked or rule.updates)


def is_in_place(eqn: ir.UnitEqn) -> bool:
    """Whether an equation writes a part of a value, as XLA does without a copy."""
    return eqn.eqn.primitive.name == "dynamic_update_slice"


def makers_and_along(
    names: Iterable[str],
    maker: Mapping[str, int],
    goes_along: Callable[[int], bool],
    reads: Callable[[int], Iterable[str]],
) -> tuple[set[int], list[int]]:
    """What some values are made of: the first work, and the cheap work behind it.

    Both are numbers in the order of a program, of whatever `maker` has by value.
    """
    behind, along = set[int](), set[int]()
    waiting = [*names]
    while waiting:
        number = maker.get(waiting.pop())
        if number is None or number in along:
            continue
        if goes_along(number):
            along.add(number)
            waiting += reads(number)
        else:
            behind.add(number)
    # Cheap work before the last maker stands before the transfer in any case.
    return behind, sorted(n for n in along if n > max(behind, default=-1))


def can_wait(stmt: ir.Stmt) -> bool:
    """Whether a statement can run later without any effect but on values."""
    if isinstance(stmt, ir.Set):
        return True
    return (
        isinstance(stmt, ir.Compute)
        and not stmt.reducer
        and not any(eqn.eqn.effects for eqn in stmt.unit.eqns)
    )


def may_go_along(stmt: ir.Stmt) -> bool:
    """Whether a statement is cheap, and makes no more bytes than it reads."""
    if not isinstance(stmt, ir.Compute):
        return isinstance(stmt, ir.Set)
    if stmt.reducer or not all(map(is_cheap, stmt.unit.eqns)):
        return False
    numbers = not any(out.shape for out in stmt.outs)  # scalars, such as an index
    return is_view(stmt) or numbers or bytes_in(stmt.outs) <= bytes_in(stmt.ins)


def is_view(stmt: ir.Stmt) -> bool:
    """Whether a statement only sees its operands in other shapes."""
    return isinstance(stmt, ir.Compute) and all(
        eqn.eqn.primitive.name in VIEWS for eqn in stmt.unit.eqns
    )
