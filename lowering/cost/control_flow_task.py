"""The task of a statement of control flow: all that its bodies do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jhost.lowering.cost.as_loop import as_loop
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.task import Task
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import ITERATIONS, statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Prediction

Predict: TypeAlias = Callable[[Program], Prediction]
"""How long a body takes."""


def control_flow_task(
    stmt: ir.ControlFlow, after: frozenset[int], rates: Rates, predict: Predict
) -> Task:
    """The task of all iterations; nothing outside of the body overlaps with it."""
    match stmt:
        case ir.Scan(length=length):
            inside = predict(as_loop(stmt)) * length
        case ir.While():
            inside = sum(map(predict, stmt.bodies), Prediction()) * ITERATIONS
        case ir.Cond():
            # Nobody knows before which branch will run, so the slowest counts.
            inside = max(map(predict, stmt.bodies), key=lambda each: each.total)
    return Task(
        seconds=inside.total,
        host=inside.host,
        after=after,
        meet=max(_meeting(body, rates) for body in stmt.bodies),
        inside=inside,
    )


def _meeting(body: Program, rates: Rates) -> float:
    """The seconds that the first transfer of a body takes more than the others."""
    links = (
        rates.link(stmt.kind, stmt.axes)
        for stmt in statements(body)
        if isinstance(stmt, ir.Communicate)
    )
    return max((link.meet for link in links), default=0.0)
