"""Names by which XLA's instructions are traced back to the Host IR program.

Each statement that works is emitted under a `jax.named_scope`, which XLA keeps in the
metadata of the instructions that it makes of it, and profilers show.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import programs, statements
from jhost.lowering.ir.effects import written
from jhost.lowering.ir.names import buffer_names
from jhost.lowering.ir.printer import statement_text
from jhost.lowering.ir.program import Program

# XLA puts what encloses it in front, as `jit(f)/shard_map/host_ir.3.y`.
_SCOPE = re.compile(r"\bhost_ir\.(\d+)((?:\[\d+\])*)\.")


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """A statement, by its place in `statements`, in one iteration of chunk loops."""

    statement: int
    iterations: tuple[int, ...]


class Scopes:
    """The scopes of the statements of a program, and of the bodies in it."""

    def __init__(self, program: Program) -> None:
        # By identity: equal statements may stand at several places.
        self._places = {id(stmt): n for n, stmt in enumerate(statements(program))}
        self.results = f"host_ir.{len(list(statements(program)))}.return"

    def name(self, stmt: ir.Stmt, iterations: Sequence[int]) -> str:
        """What `stmt` is emitted under in these iterations; "" if it only orders."""
        if not isinstance(stmt, ir.Allocate | ir.Set | ir.Compute | ir.Communicate):
            return ""
        name = next((buffer.name for buffer in written(stmt)), "nothing")
        indices = "".join(f"[{i}]" for i in iterations)
        return f"host_ir.{self._places[id(stmt)]}{indices}.{name}"


def origin_of(op_name: str) -> Origin | None:
    """Where an instruction with that `op_name` comes from, if a scope says so."""
    match = _SCOPE.search(op_name)
    if match is None:
        return None
    iterations = tuple(map(int, re.findall(r"\d+", match[2])))
    return Origin(int(match[1]), iterations)


def statement_texts(program: Program) -> tuple[str, ...]:
    """Each of `statements` on one line, then the return of the results."""
    results = ", ".join(buffer.name for buffer in program.results)
    known = set[str]().union(*map(buffer_names, programs(program)))
    texts = (statement_text(stmt, known) for stmt in statements(program))
    return (*texts, f"return {results}")
