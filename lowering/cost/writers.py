"""Which task wrote what: whole buffers, and the parts that aliases name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from jhost.lowering.ir import statements as ir

PartPath: TypeAlias = tuple[object, ...]
"""A buffer's name, then the aliases that lead to a part of it."""


class Writers:
    """The path of each alias, and the tasks that wrote to the paths of each buffer."""

    def __init__(self) -> None:
        self.aliases: dict[str, tuple[PartPath, ir.Select]] = {}
        self.by_buffer: dict[object, dict[PartPath, int]] = {}

    def allocate(self, name: str) -> None:
        """Forget who wrote to the buffer of that name, which is a new one now."""
        self.by_buffer[name] = {}

    def select(self, stmt: ir.Select, index: int) -> None:
        """Give part `index` of a buffer the name of its alias."""
        # By the number and not the expression: two expressions may name one part.
        path = (*self.of(stmt.source.name), (stmt.dim, index))
        self.aliases[stmt.out.name] = path, stmt

    def write(self, buffers: Iterable[ir.Buffer], task: int) -> None:
        """The task of that number writes the buffers."""
        for buffer in buffers:
            root, *_ = path = self.of(buffer.name)
            # The whole buffer is new, so earlier writers of its parts are forgotten.
            if len(path) == 1:
                self.by_buffer[root] = {}
            self.by_buffer.setdefault(root, {})[path] = task

    def carry(self, results: Mapping[str, str]) -> None:
        """Each param now holds the pieces that were written to its result."""
        for param, result in results.items():
            path = self.of(result)
            made = self.written(path).items()
            self.by_buffer[param] = {(param, *p[len(path) :]): task for p, task in made}

    def of(self, name: str) -> PartPath:
        found = self.aliases.get(name)
        return found[0] if found else (name,)

    def makers(self, buffer: ir.Buffer) -> frozenset[int]:
        """The tasks that wrote what `buffer` holds, or a part of it."""
        return frozenset(self.written(self.of(buffer.name)).values())

    def written(self, path: PartPath) -> dict[PartPath, int]:
        """The tasks that wrote to a place, to its parts, or to what it is a part of."""
        known = self.by_buffer.get(path[0], {})
        if len(path) == 1:  # a whole buffer, as most are
            return known
        return {
            part: task
            for part, task in known.items()
            if all(a == b for a, b in zip(part, path, strict=False))
        }
