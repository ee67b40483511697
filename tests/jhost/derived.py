"""The programs that JAX derives from a jhost function, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from jhost._program import derived_program
from jhost.lowering.explain import Explanation, explain_program
from jhost.lowering.ir import Program


def vjp(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a result's cotangent and the arguments: result, cotangents."""

    def both(cotangent: Any, *args: Any) -> Any:
        result, pullback = jax.vjp(fun, *args)
        return result, pullback(cotangent)

    return both


def programs(fun: Callable[..., Any], *args: Any) -> list[Program]:
    """The Host IR of every call of a jhost function in what JAX makes of `fun`."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return [
        derived_program(eqn.params["call_jaxpr"], eqn.params["config"])
        for eqn in _calls(jaxpr)
    ]


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


def _calls(jaxpr: Any) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if "jhost" in eqn.primitive.name and eqn.outvars:
            yield eqn
        elif "jhost" not in eqn.primitive.name:
            for inner in jaxprs_in_params(eqn.params):
                yield from _calls(getattr(inner, "jaxpr", inner))
