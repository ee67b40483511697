"""Which task wrote what: whole buffers, and the parts that aliases show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from jhost.lowering.ir import statements as ir

PartPath: TypeAlias = tuple[object, ...]
"""A buffer's name, then the aliases that lead to a part of it."""


class Writers:
    """The aliases by name, each with its place, and for each buffer who wrote where."""

    def __init__(self) -> None:
        self.aliases: dict[str, tuple[PartPath, ir.Select]] = {}
        self.by_buffer: dict[object, dict[PartPath, int]] = {}

    def allocate(self, name: str) -> None:
        """Nothing has been written to that buffer."""
        self.by_buffer[name] = {}

    def select(self, stmt: ir.Select, index: int) -> None:
        """The part with that index has the name that the alias gives it."""
        # By the number that the index has here, so equal parts are one place.
        path = (*self.of(stmt.source.name), (stmt.dim, index))
        self.aliases[stmt.out.name] = path, stmt

    def write(self, buffers: Iterable[ir.Buffer], task: int) -> None:
        """The task of that number writes them."""
        for buffer in buffers:
            root, *_ = path = self.of(buffer.name)
            # All of it is new: earlier writers of parts do not matter any more.
            if len(path) == 1:
                self.by_buffer[root] = {}
            self.by_buffer.setdefault(root, {})[path] = task

    def carry(self, results: Mapping[str, str]) -> None:
        """Params hold what has been written to results, piece by piece."""
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
        return {
            part: task
            for part, task in self.by_buffer.get(path[0], {}).items()
            if all(a == b for a, b in zip(part, path, strict=False))
        }
