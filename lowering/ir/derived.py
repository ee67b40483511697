"""What is found out about a program once, and kept as long as the program lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from jhost.lowering.ir.program import Program

_R = TypeVar("_R")


def derived(find: Callable[[Program], _R]) -> Callable[[Program], _R]:
    """`find`, which is called once for each program.

    What it finds lives in the program, which is frozen, and goes with it.
    """

    @functools.wraps(find)
    def found(program: Program) -> _R:
        if find not in program.derived:
            program.derived[find] = find(program)
        return program.derived[find]

    return found
