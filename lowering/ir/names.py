"""Unique names for buffers, units and communications."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Stmt, walk

_SEPARATOR = "/"
"""Ends each part of the path to a value in a body; no buffer's name has it."""


def path_into(path: str, *parts: int | str) -> str:
    """The path that goes on into a body from `path`."""
    return path + "".join(f"{part}{_SEPARATOR}" for part in parts)


def local_name(name: str) -> str:
    """The name that a value has in its own program."""
    return name.rpartition(_SEPARATOR)[2]


def path_of(name: str) -> str:
    """The path to the body that a value is in."""
    return name.rpartition(_SEPARATOR)[0]


class FreshNames:
    """Hands out names that nobody has yet, close to the one asked for."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._counts: Counter[str] = Counter()
        self.asked: list[tuple[str, str]] = []
        """Each name that was asked for, and the one that was given."""

    @classmethod
    def of(cls, program: Program) -> FreshNames:
        """Names that do not clash with the buffers of `program`."""
        return cls(buffer_names(program))

    def fresh(self, wanted: str) -> str:
        """`wanted` made an identifier, with a number where it is taken."""
        # Users' names come as `params['w']`; XLA's metadata and tests read them as one
        # word.
        base = re.sub(r"\W+", "_", wanted).strip("_") or "v"
        name, count = base, self._counts[base]  # up to there, all are taken
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        self._counts[base] = count
        self.asked.append((wanted, name))
        return name


def buffer_names(program: Program) -> set[str]:
    """Every name in `program` that a buffer or a communication bears."""
    names = {buffer.name for buffer in (*program.params, *program.results)}
    for stmt in walk(program.body):
        for field in _naming(type(stmt)):
            value = getattr(stmt, field)
            if isinstance(value, tuple):
                names |= {buffer.name for buffer in cast(tuple[Buffer, ...], value)}
            elif value is not None:
                names.add(value if isinstance(value, str) else value.name)
    return names


@functools.cache
def _naming(kind: type[Stmt]) -> Sequence[str]:
    """What a kind of statements has that may name something."""
    # By field, so that no node is forgotten: two of one name give wrong results.
    return [each for each in ("name", "out", "buffer", "outs") if hasattr(kind, each)]
