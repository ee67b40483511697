"""The border of control flow: what enters its bodies and leaves them, and how.

The operands of a `Scan` or a `While` stand in one row, and each of its bodies takes
some parts of it.  Which part is which is known here alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Cond, ControlFlow, Dim, Scan, While

_T = TypeVar("_T")


class Crossing(NamedTuple):
    """One value on both sides of a border."""

    outside: Buffer
    inside: Buffer


@dataclasses.dataclass(frozen=True, slots=True)
class ScanBorder:
    """What enters the body of a scan, and what leaves it.

    The body reads `consts` as they are, and slices of `xs`.  Its values `carry` are the
    values `carried` of the iteration before.  It makes slices of `ys`.
    """

    consts: tuple[Crossing, ...]
    carry: tuple[Crossing, ...]
    xs: tuple[Crossing, ...]
    carried: tuple[Crossing, ...]
    ys: tuple[Crossing, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WhileBorder:
    """What enters the condition and the body of a `while`, and what leaves the body.

    Both see what is carried: the condition as `asked`, the body as `carry`.
    """

    condition_consts: tuple[Crossing, ...]
    asked: tuple[Crossing, ...]
    consts: tuple[Crossing, ...]
    carry: tuple[Crossing, ...]
    carried: tuple[Crossing, ...]


def scan_border(scan: Scan) -> ScanBorder:
    consts, carry, xs = scan_ins(scan, scan.body.params)
    carried, ys = scan_outs(scan, scan.body.results)
    return ScanBorder(
        consts=_crossings(scan.consts, consts),
        carry=_crossings(scan.carry, carry),
        xs=_crossings(scan.xs, xs),
        carried=_crossings(scan.carried, carried),
        ys=_crossings(scan.ys, ys),
    )


def with_scan_border(scan: Scan, body: Program, border: ScanBorder) -> Scan:
    """`scan` with another body, and with the values of `border` outside and inside."""
    return dataclasses.replace(
        scan,
        body=dataclasses.replace(
            body,
            params=_inside(border.consts, border.carry, border.xs),
            results=_inside(border.carried, border.ys),
        ),
        consts=_outside(border.consts),
        carry=_outside(border.carry),
        xs=_outside(border.xs),
        carried=_outside(border.carried),
        ys=_outside(border.ys),
    )


def while_border(stmt: While) -> WhileBorder:
    condition_consts, asked = condition_ins(stmt, stmt.condition.params)
    consts, carry = body_ins(stmt, stmt.body.params)
    return WhileBorder(
        condition_consts=_crossings(stmt.condition_consts, condition_consts),
        asked=_crossings(stmt.carry, asked),
        consts=_crossings(stmt.consts, consts),
        carry=_crossings(stmt.carry, carry),
        carried=_crossings(stmt.carried, stmt.body.results),
    )


def with_values(
    stmt: ControlFlow, ins: Sequence[Sequence[Buffer]], outs: tuple[Buffer, ...]
) -> ControlFlow:
    """`stmt` on other operands, given for each of its bodies, and with other results.

    A `cond` gives the same operands to each branch; its index comes before them.
    """
    match stmt:
        case Scan():
            (consts, carry, xs), (carried, ys) = (
                scan_ins(stmt, ins[0]),
                scan_outs(stmt, outs),
            )
            return dataclasses.replace(
                stmt, consts=consts, carry=carry, xs=xs, carried=carried, ys=ys
            )
        case While():
            condition_consts, _ = condition_ins(stmt, ins[0])
            consts, carry = body_ins(stmt, ins[1])
            return dataclasses.replace(
                stmt,
                condition_consts=condition_consts,
                consts=consts,
                carry=carry,
                carried=outs,
            )
        case Cond():
            index, *operands = ins[0]
            return dataclasses.replace(
                stmt, index=index, operands=tuple(operands), outs=outs
            )


# --- Rows of anything --------------------------------------------------------------- #


def scan_ins(scan: Scan, row: Sequence[_T]) -> tuple[tuple[_T, ...], ...]:
    """The parts of a row with one thing for each operand: consts, carry, xs."""
    # In JAX's order, which its equations and the params of their bodies have.
    return split(row, len(scan.consts), len(scan.carry))


def scan_outs(scan: Scan, row: Sequence[_T]) -> tuple[tuple[_T, ...], tuple[_T, ...]]:
    """The parts of a row with one thing for each result: carried, ys."""
    carried, ys = split(row, len(scan.carried))
    return carried, ys


def stacked(part: Buffer, length: int) -> Buffer:
    """A buffer with a value of that type for each iteration of a scan, or of a loop."""
    # No axis shards the iterations: a device would not have the slice of each.
    dims = Dim(), *part.dims
    return dataclasses.replace(part, shape=(length, *part.shape), dims=dims)


def while_ins(stmt: While, row: Sequence[_T]) -> tuple[tuple[_T, ...], ...]:
    """The same of a `while`: the condition's consts, the body's, carry."""
    return split(row, len(stmt.condition_consts), len(stmt.consts))


def condition_ins(stmt: While, row: Sequence[_T]) -> tuple[tuple[_T, ...], ...]:
    """The parts of a row with one thing for each param of the condition."""
    return split(row, len(stmt.condition_consts))


def body_ins(stmt: While, row: Sequence[_T]) -> tuple[tuple[_T, ...], ...]:
    """The parts of a row with one thing for each param of the body: consts, carry."""
    return split(row, len(stmt.consts))


def split(row: Sequence[_T], *sizes: int) -> tuple[tuple[_T, ...], ...]:
    """Parts of a row of these sizes, and the rest of it."""
    parts: list[tuple[_T, ...]] = []
    for size in sizes:
        parts.append(tuple(row[:size]))
        row = row[size:]
    return *parts, tuple(row)


def _crossings(
    outside: Sequence[Buffer], inside: Sequence[Buffer]
) -> tuple[Crossing, ...]:
    return tuple(Crossing(*pair) for pair in zip(outside, inside, strict=True))


def _outside(*parts: Sequence[Crossing]) -> tuple[Buffer, ...]:
    return tuple(each.outside for part in parts for each in part)


def _inside(*parts: Sequence[Crossing]) -> tuple[Buffer, ...]:
    return tuple(each.inside for part in parts for each in part)
