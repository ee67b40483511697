"""A jhost function lowered and compiled: JAX's ahead-of-time words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jhost.lowering.explain import Explanation, explain_program
from jhost.lowering.ir import Program
from jhost.runtime.options import explained_refusals


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A function lowered for some types; `host_ir` is its program."""

    host_ir: Program
    _lowered: jax.stages.Lowered
    _options: Mapping[str, Any]

    def as_text(self, dialect: str = "host_ir") -> str:
        """The program as text.

        Args:
            dialect: `"host_ir"`, or what `jax.stages.Lowered.as_text` takes
                (`"stablehlo"`, `"hlo"`).
        """
        if dialect == "host_ir":
            return str(self.host_ir)
        return self._lowered.as_text(dialect)

    def explain(self) -> Explanation:
        """What was pipelined, how and why; `jhost.explain` says more of it."""
        return explain_program(self.host_ir)

    def compile(self) -> Compiled:
        """Compiles the program for its devices."""
        with explained_refusals(self.host_ir.name, self._options):
            compiled = self._lowered.compile()
        return Compiled(host_ir=self.host_ir, _compiled=compiled)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled function; call it with arrays of the types it was lowered for."""

    host_ir: Program
    _compiled: jax.stages.Compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the executable."""
        return self._compiled(*args, **kwargs)

    def as_text(self) -> str:
        """XLA's scheduled module (HLO)."""
        return self._compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """As `jax.stages.Compiled.memory_analysis`."""
        return self._compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """As `jax.stages.Compiled.cost_analysis`."""
        return self._compiled.cost_analysis()

    def explain(self) -> Explanation:
        """What was pipelined, how and why."""
        return explain_program(self.host_ir)
