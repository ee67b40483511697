"""The task of a statement of control flow: all that its bodies do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jhost.lowering.cost.kernels import Kernel
from jhost.lowering.cost.rates import Rates
from jhost.lowering.cost.task import Task
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import ITERATIONS, statements
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Prediction

Predict: TypeAlias = Callable[[Program], Prediction]
"""How long a body takes."""


def control_flow_task(
    stmt: ir.ControlFlow, after: frozenset[int], rates: Rates, predict: Predict
) -> Task:
    """The task of all iterations; nothing outside of the body overlaps with it."""
    predicted = [predict(body) for body in stmt.bodies]
    match stmt:
        case ir.Scan(length=length):
            inside = (predicted[0] + _slices_sent(stmt, rates)) * length
        case ir.While():
            inside = sum(predicted, Prediction()) * ITERATIONS
        case ir.Cond():
            # Nobody knows before which branch will run, so the slowest counts.
            inside = max(predicted, key=lambda each: each.total)
    return Task(
        seconds=inside.total,
        host=inside.host,
        after=after,
        meet=max(_meeting(body, rates) for body in stmt.bodies),
        inside=inside,
    )


def _slices_sent(scan: ir.Scan, rates: Rates) -> Prediction:
    """What cutting the slices takes that an iteration sends as they are.

    Others are read in place, or as what is made of them.
    """
    sent = {
        stmt.source.name
        for stmt in statements(scan.body)
        if isinstance(stmt, ir.Communicate)
    }
    slices = scan.body.params[len(scan.ins) - len(scan.xs) :]
    cut = [Kernel(2 * bytes_of(each)) for each in slices if each.name in sent]
    seconds = sum(kernel.seconds(rates) for kernel in cut)
    host = len(cut) * rates.host
    return Prediction(total=seconds, compute=seconds, host=host)


def _meeting(body: Program, rates: Rates) -> float:
    """The seconds that the first transfer of a body takes more than the others."""
    links = (
        rates.link(stmt.kind, stmt.axes)
        for stmt in statements(body)
        if isinstance(stmt, ir.Communicate)
    )
    return max((link.meet for link in links), default=0.0)
