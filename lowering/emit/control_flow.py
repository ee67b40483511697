"""`lax.scan`, `lax.while_loop` and `lax.switch` of bodies that are programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
from jax import lax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.border import scan_ins, scan_outs, while_ins
from jhost.lowering.ir.program import Program


class RunBody(Protocol):
    """Gives the results of a body for the values of its params."""

    def __call__(self, body: Program, /, *args: Any) -> Sequence[Any]: ...


def first_read(stmt: ir.ControlFlow) -> Sequence[ir.Buffer]:
    """The operands that `stmt` needs before anything of it can run."""
    return (stmt.index,) if isinstance(stmt, ir.Cond) else stmt.carry


def call_control_flow(
    stmt: ir.ControlFlow, ins: Sequence[Any], run: RunBody
) -> Sequence[Any]:
    """The results of `stmt` for the values of its `ins`."""
    match stmt:
        case ir.Scan():
            return _scan(stmt, ins, run)
        case ir.While():
            return _while(stmt, ins, run)
        case ir.Cond():
            index, *operands = ins
            branches = [
                partial(_branch, stmt.outs, run, each) for each in stmt.branches
            ]
            return lax.switch(
                lax.convert_element_type(index, "int32"), branches, *operands
            )


def _branch(
    outs: Sequence[ir.Buffer], run: RunBody, body: Program, *args: Any
) -> Sequence[Any]:
    """The results of a branch, in the memories that `outs` are in.

    JAX 0.12 may call a result the host's in one branch and the device's in another, if
    a policy of `jax.checkpoint` offloads, but `lax.switch` wants them alike.
    """
    return [
        value
        if jax.typeof(value).memory_space == out.memory_space
        else jax.device_put(value, out.memory_space)
        for out, value in zip(outs, run(body, *args), strict=True)
    ]


def _scan(stmt: ir.Scan, ins: Sequence[Any], run: RunBody) -> Sequence[Any]:
    consts, carry, xs = scan_ins(stmt, ins)

    def body(carry: Any, xs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return scan_outs(stmt, run(stmt.body, *consts, *carry, *xs))

    carried, ys = lax.scan(
        body,
        carry,
        xs,
        length=stmt.length,
        reverse=stmt.reverse,
        unroll=stmt.unroll,
    )
    return *carried, *ys


def _while(stmt: ir.While, ins: Sequence[Any], run: RunBody) -> Sequence[Any]:
    condition_consts, consts, carry = while_ins(stmt, ins)

    def condition(carry: Any) -> Any:
        (result,) = run(stmt.condition, *condition_consts, *carry)
        return result

    def body(carry: Any) -> tuple[Any, ...]:
        return tuple(run(stmt.body, *consts, *carry))

    return lax.while_loop(condition, body, carry)
