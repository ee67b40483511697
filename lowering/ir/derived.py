"""What is found out about a program once, and kept.

That is as long as the program lives, or, where other programs share it, as long as what
keeps it does: the candidates for one choice have most statements in common.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Stmt

_P = ParamSpec("_P")
_R = TypeVar("_R")


def derived(find: Callable[[Program], _R]) -> Callable[[Program], _R]:
    """`find`, which is called once for each program.

    What it finds lives in the program, which is frozen, and goes with it.
    """

    @functools.wraps(find)
    def found(program: Program) -> _R:
        # A cache by program, as `functools.cache`, would keep alive all the programs of
        # a lowering, and hash their statements.
        if find not in program.derived:
            program.derived[find] = find(program)
        return program.derived[find]

    return found


def derived_with(
    find: Callable[Concatenate[Program, _P], _R],
) -> Callable[Concatenate[Program, _P], _R]:
    """`find`, which is called once for each program and all else that it is given."""

    @functools.wraps(find)
    def found(program: Program, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        known = program.derived.setdefault(find, [])
        # Compared, not hashed: the rates of devices hold a mapping.
        for given, result in known:
            if given == (args, kwargs):
                return result
        result = find(program, *args, **kwargs)
        known.append(((args, kwargs), result))
        return result

    return found


class Shared(Generic[_R]):
    """What was found out about programs, for others that have the same statements.

    Those are the same objects: of equal ones nobody asks.  All empty bodies are one
    tuple in Python, so whoever finds something here compares the rest of the programs.
    """

    def __init__(self) -> None:
        # The statements are kept, so that no others get their identity.
        self.found: dict[int, tuple[tuple[Stmt, ...], list[_R]]] = {}

    def of(self, program: Program) -> list[_R]:
        """What there is for programs with these statements, to be added to."""
        body = program.body
        return self.found.setdefault(id(body), (body, []))[1]
