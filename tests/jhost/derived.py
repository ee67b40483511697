"""The programs that JAX derives from a jhost function, and what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jhost.lowering.explain import explain_program
from jhost.lowering.explanation import Explanation
from jhost.lowering.ir.program import Program
from jhost.testing import programs


def vjp(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a result's cotangent and the arguments: result, cotangents."""

    def both(cotangent: Any, *args: Any) -> Any:
        result, pullback = jax.vjp(fun, *args)
        return result, pullback(cotangent)

    return both


def backward(fun: Callable[..., Any], *args: Any) -> list[Program]:
    """The programs of `fun` differentiated by all arguments, the forward first."""
    return programs(vjp(fun), jax.eval_shape(fun, *args), *args)


def moves(program: Program) -> list[str]:
    """Each communication in short, in order of text: kind, mesh axes, bytes."""
    explanation: Explanation = explain_program(program)
    return sorted(
        f"{row.kind} {','.join(row.axes)} {row.bytes}"
        for row in explanation.communications
    )
