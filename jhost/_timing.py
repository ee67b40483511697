"""Times of several functions that take turns, so that drift hits all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def take_turns(
    functions: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    calls: int = 1,
    warmups: int = 1,
    before_round: Callable[[int], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds a call of each function, for each round, after `warmups` calls of each.

    In a round each function has its turn: `calls` calls that nobody waits for, then the
    wait for all devices.
    """
    # A first call compiles or loads a program.
    for function in functions.values():
        for _ in range(warmups):
            jax.block_until_ready(function())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds):
        before_round(number)
        for name, function in functions.items():
            times[name].append(_turn(function, calls))
    return times


def _turn(function: Callable[[], Any], calls: int) -> float:
    result, start = None, time.perf_counter()
    # One behind the other, as a training loop calls: a wait after each would count the
    # host's launches, which the devices' work hides.
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls
