"""Facts about a program or a unit that are found once, and kept.

They are kept as long as that lives.  Facts that several programs share, such as
the candidates for one choice, are kept as long as the object that holds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Stmt, Unit

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Of = TypeVar("_Of", Program, Unit)


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
    find: Callable[Concatenate[_Of, _P], _R],
) -> Callable[Concatenate[_Of, _P], _R]:
    """`find`, which is called once for what it is about and its other arguments."""

    @functools.wraps(find)
    def found(about: _Of, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        known = about.derived.setdefault(find, [])
        # Compared, not hashed: the rates of devices hold a mapping.
        for given, result in known:
            if given == (args, kwargs):
                return result
        result = find(about, *args, **kwargs)
        known.append(((args, kwargs), result))
        return result

    return found


class Shared(Generic[_R]):
    """Facts about programs, kept for other programs that have the same statements.

    The statements must be the same objects, and not only equal.  All empty bodies are
    one tuple in Python, so users of a fact also compare the rest of the programs.
    """

    def __init__(self) -> None:
        # The statements are kept, so that no others get their identity.
        self.found: dict[int, tuple[tuple[Stmt, ...], list[_R]]] = {}

    def of(self, program: Program) -> list[_R]:
        """What there is for programs with these statements, to be added to."""
        body = program.body
        return self.found.setdefault(id(body), (body, []))[1]
