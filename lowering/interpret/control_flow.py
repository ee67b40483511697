"""The user's control flow, run in Python; its bodies are programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from jhost.lowering.interpret.arrays import OnDevices, undefined
from jhost.lowering.ir.border import scan_ins, scan_outs, while_ins
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Cond, ControlFlow, Scan, While

RunOnDevices: TypeAlias = Callable[[Program, Sequence[OnDevices]], list[OnDevices]]
"""Gives the results of a body, from each device's values of its params."""


def control_flow(
    stmt: ControlFlow, ins: Sequence[OnDevices], run: RunOnDevices, devices: int
) -> list[OnDevices]:
    """The results of `stmt`, from each device's values of its `ins`."""
    match stmt:
        case Scan():
            return _scan(stmt, ins, run, devices)
        case While():
            return _while_loop(stmt, ins, run)
        case Cond(branches=branches):
            # As `lax.switch`, which takes the nearest branch for an index out of range.
            number = np.clip(_agreed(ins[0]), 0, len(branches) - 1)
            return run(branches[number], ins[1:])


def _scan(
    stmt: Scan, ins: Sequence[OnDevices], run: RunOnDevices, devices: int
) -> list[OnDevices]:
    consts, carry, xs = scan_ins(stmt, ins)
    ys: dict[int, tuple[OnDevices, ...]] = {}
    numbers = range(stmt.length)
    for number in reversed(numbers) if stmt.reverse else numbers:
        rows = [[value[number] for value in values] for values in xs]
        results = run(stmt.body, [*consts, *carry, *rows])
        carry, ys[number] = scan_outs(stmt, results)
    # A scan of length 0 has no results to stack, so shapes come from the buffers.
    if not ys:
        empty = [undefined(buffer.shape, buffer.dtype) for buffer in stmt.ys]
        return [*carry, *([value] * devices for value in empty)]
    stacks = zip(*(ys[number] for number in numbers), strict=True)
    return [*carry, *map(_stacked, stacks)]


def _while_loop(
    stmt: While, ins: Sequence[OnDevices], run: RunOnDevices
) -> list[OnDevices]:
    condition_consts, consts, carry = while_ins(stmt, ins)
    while _agreed(*run(stmt.condition, [*condition_consts, *carry])):
        carry = tuple(run(stmt.body, [*consts, *carry]))
    return [*carry]


def _stacked(rows: Sequence[OnDevices]) -> OnDevices:
    return [np.stack(each) for each in zip(*rows, strict=True)]


def _agreed(values: OnDevices) -> int:
    """The number that decides where control goes; all devices must have the same."""
    # If devices took different branches, a collective in one would wait forever.
    (number,) = {int(value) for value in values}
    return number
