"""The border of a body: what crosses it has one type inside and outside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.border import body_ins, scan_ins, scan_outs, stacked
from jhost.lowering.ir.layout import layout_of
from jhost.lowering.ir.unit_printer import type_text
from jhost.lowering.verify.state import State


def check_control_flow(state: State, stmt: ir.ControlFlow) -> None:
    """Operands and results fit the bodies, which are programs of the same mesh."""
    if state.loops:
        state.fail(
            "control flow outside of loops",
            type(stmt).__name__,
            "no stream goes through a body",
        )
    # A body is verified as a program of its own, and only its border here.
    for body in stmt.bodies:
        if body.mesh != state.program.mesh:
            state.fail(
                f"a body on {state.program.mesh}",
                f"one on {body.mesh}",
                "the bodies of a program are on its mesh",
            )
    for buffer in stmt.ins:
        state.read(buffer)
    match stmt:
        case ir.Scan():
            _check_scan(state, stmt)
        case ir.While():
            _check_while(state, stmt)
        case ir.Cond():
            _check_cond(state, stmt)
    for buffer in stmt.outs:
        state.write(buffer, buffer.shape)


def _check_scan(state: State, stmt: ir.Scan) -> None:
    consts, carry, slices = scan_ins(stmt, stmt.body.params)
    carried, parts = scan_outs(stmt, stmt.body.results)
    xs = [stacked(param, stmt.length) for param in slices]
    ys = [stacked(result, stmt.length) for result in parts]
    _check_same(state, (*consts, *carry, *xs), stmt.ins, "an operand")
    _check_same(state, (*carried, *ys), stmt.outs, "a result")
    _check_same(state, carry, carried, "a carry")


def _check_while(state: State, stmt: ir.While) -> None:
    asked = (*stmt.condition_consts, *stmt.carry)
    _check_same(state, stmt.condition.params, asked, "an operand")
    _check_same(state, stmt.body.params, (*stmt.consts, *stmt.carry), "an operand")
    _check_same(state, stmt.body.results, stmt.carried, "a result")
    _, carry = body_ins(stmt, stmt.body.params)
    _check_same(state, carry, stmt.body.results, "a carry")
    answers = [(b.shape, b.dtype) for b in stmt.condition.results]
    if answers != [((), np.dtype(bool))]:
        state.fail("one truth value", f"{answers}", "a condition says yes or no")


def _check_cond(state: State, stmt: ir.Cond) -> None:
    if stmt.index.shape != ():
        state.fail("a scalar", type_text(stmt.index), "an index is one value")
    for branch in stmt.branches:
        _check_same(state, branch.params, stmt.operands, "an operand")
        _check_same(state, branch.results, stmt.outs, "a result")


def _check_same(
    state: State, inside: Sequence[ir.Buffer], outside: Sequence[ir.Buffer], what: str
) -> None:
    if len(inside) != len(outside):
        state.fail(f"{len(inside)}", f"{len(outside)}", f"{what} for each of a body")
    for one, other in zip(inside, outside, strict=True):
        if _type(one) != _type(other):
            state.fail(
                f"{one.name}: {type_text(one)}",
                f"{other.name}: {type_text(other)}",
                f"{what} has one type inside and outside of a body",
            )


def _type(buffer: ir.Buffer) -> tuple[object, ...]:
    # Each side has names of its own, and streams end at the border.  So may a memory:
    # JAX 0.12 gives values of the device to a `remat` whose operands are the host's.
    return buffer.shape, buffer.dtype, layout_of(buffer), buffer.partial
