"""`lax.scan`, `lax.while_loop` and `lax.switch` of bodies that are programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from jax import lax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.program import Program


class RunBody(Protocol):
    """Gives the results of a body for the values of its params."""

    def __call__(self, body: Program, /, *args: Any) -> Sequence[Any]: ...


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
            branches = [partial(run, branch) for branch in stmt.branches]
            return lax.switch(
                lax.convert_element_type(index, "int32"), branches, *operands
            )


def _scan(stmt: ir.Scan, ins: Sequence[Any], run: RunBody) -> Sequence[Any]:
    first, last = len(stmt.consts), len(stmt.consts) + len(stmt.carry)
    consts, carry, xs = ins[:first], ins[first:last], ins[last:]

    def body(carry: Any, xs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        results = tuple(run(stmt.body, *consts, *carry, *xs))
        return results[: len(carry)], results[len(carry) :]

    carried, ys = lax.scan(
        body,
        tuple(carry),
        tuple(xs),
        length=stmt.length,
        reverse=stmt.reverse,
        unroll=stmt.unroll,
    )
    return *carried, *ys


def _while(stmt: ir.While, ins: Sequence[Any], run: RunBody) -> Sequence[Any]:
    first = len(stmt.condition_consts)
    last = first + len(stmt.consts)
    condition_consts, consts, carry = ins[:first], ins[first:last], ins[last:]

    def condition(carry: Any) -> Any:
        (result,) = run(stmt.condition, *condition_consts, *carry)
        return result

    def body(carry: Any) -> tuple[Any, ...]:
        return tuple(run(stmt.body, *consts, *carry))

    return lax.while_loop(condition, body, tuple(carry))
