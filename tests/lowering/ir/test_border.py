"""What crosses the border of control flow, and what the verifier refuses there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from jhost.errors import VerifyError
from jhost.lowering.ir.border import (
    Crossing,
    scan_border,
    scan_ins,
    scan_outs,
    split,
    while_border,
    while_ins,
    with_scan_border,
    with_values,
)
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Cond, ControlFlow, Scan, Set, While
from jhost.lowering.verify.program import verify
from tests.lowering.hand_built import buffer, mesh_of, program

W, C, X = map(buffer, ["w: f32[4]", "c: f32[2]", "x: f32[5, 3]"])
END, Y = map(buffer, ["end: f32[2]", "y: f32[5, 4]"])
w, c, x = map(buffer, ["w_in: f32[4]", "c_in: f32[2]", "x_in: f32[3]"])
next_c, y = map(buffer, ["c_next: f32[2]", "y_in: f32[4]"])
INDEX, YES, LIMIT = map(buffer, ["i: i32[]", "yes: bool[]", "limit: bool[]"])


def body(params: Sequence[Buffer], results: Sequence[Buffer], *stmts: Set) -> Program:
    return program(mesh_of(tp=2), params, results, *stmts, name="body")


def copy(out: Buffer, source: Buffer) -> Set:
    return Set(out=out, source=source)


SCAN = Scan(
    body=body([w, c, x], [next_c, y], copy(next_c, c), copy(y, w)),
    consts=(W,),
    carry=(C,),
    xs=(X,),
    carried=(END,),
    ys=(Y,),
    length=5,
)
WHILE = While(
    condition=body([LIMIT, c], [YES], copy(YES, LIMIT)),
    body=body([w, c], [next_c], copy(next_c, c)),
    condition_consts=(LIMIT,),
    consts=(W,),
    carry=(C,),
    carried=(END,),
)
COND = Cond(
    index=INDEX,
    branches=tuple(body([c], [next_c], copy(next_c, c)) for _ in range(2)),
    operands=(C,),
    outs=(END,),
)


def around(stmt: ControlFlow, *params: Buffer) -> Program:
    return program(mesh_of(tp=2), params, stmt.outs, stmt)


def test_a_scan_has_constants_carried_values_and_slices():
    border = scan_border(SCAN)
    assert border.consts == (Crossing(outside=W, inside=w),)
    assert border.carry == (Crossing(outside=C, inside=c),)
    assert border.xs == (Crossing(outside=X, inside=x),)
    assert border.carried == (Crossing(outside=END, inside=next_c),)
    assert border.ys == (Crossing(outside=Y, inside=y),)


def test_both_bodies_of_a_while_see_what_is_carried():
    border = while_border(WHILE)
    assert border.condition_consts == (Crossing(outside=LIMIT, inside=LIMIT),)
    assert border.asked == border.carry == (Crossing(outside=C, inside=c),)
    assert border.consts == (Crossing(outside=W, inside=w),)
    assert border.carried == (Crossing(outside=END, inside=next_c),)


def test_a_scan_with_its_own_border_is_itself():
    assert with_scan_border(SCAN, SCAN.body, scan_border(SCAN)) == SCAN


def test_one_more_constant_is_one_more_param_before_what_is_carried():
    more = Crossing(outside=Y, inside=y)
    border = scan_border(SCAN)
    border = dataclasses.replace(border, consts=(*border.consts, more))
    scan = with_scan_border(SCAN, SCAN.body, border)
    assert scan.ins == (W, Y, C, X)
    assert scan.body.params == (w, y, c, x)


@pytest.mark.parametrize(
    ("stmt", "ins"),
    [
        (SCAN, [SCAN.ins]),
        (WHILE, [(LIMIT, C), (W, C)]),
        (COND, [(INDEX, C), (INDEX, C)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_control_flow_on_its_own_values_is_itself(
    stmt: ControlFlow, ins: Sequence[Sequence[Buffer]]
):
    assert with_values(stmt, ins, stmt.outs) == stmt


def test_rows_are_in_the_order_of_operands_and_results():
    assert scan_ins(SCAN, "wcx") == (("w",), ("c",), ("x",))
    assert scan_outs(SCAN, "cy") == (("c",), ("y",))
    assert while_ins(WHILE, "lwc") == (("l",), ("w",), ("c",))


def test_the_last_part_of_a_row_is_the_rest():
    assert split([1, 2, 3, 4], 0, 1) == ((), (1,), (2, 3, 4))


@pytest.mark.parametrize(
    ("stmt", "params"), [(SCAN, [W, C, X]), (WHILE, [LIMIT, W, C]), (COND, [INDEX, C])]
)
def test_the_verifier_takes_what_fits(stmt: ControlFlow, params: Sequence[Buffer]):
    verify(around(stmt, *params))


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"length": 4}, "an operand has one type inside and outside of a body"),
        ({"xs": ()}, "an operand for each of a body"),
        ({"ys": (X,)}, "a result has one type inside and outside of a body"),
        (
            {"body": body([w, c, x], [c, w]), "carried": (END, Y), "ys": ()},
            "a result has one type inside and outside of a body",
        ),
    ],
)
def test_the_verifier_refuses_a_scan_whose_body_is_of_others(
    changes: dict[str, object], fragment: str
):
    with pytest.raises(VerifyError, match=fragment):
        verify(around(dataclasses.replace(SCAN, **changes), W, C, X))


def test_the_verifier_refuses_a_carry_that_changes_its_type():
    scan = dataclasses.replace(
        SCAN, body=body([w, c, x], [w, w]), carried=(buffer("end: f32[4]"),)
    )
    with pytest.raises(VerifyError, match="a carry has one type"):
        verify(around(scan, W, C, X))
