"""Leave a program to XLA where jhost has nothing to add to it.

Between processes permutes are NCCL's kernels, and no loop over chunks is chosen
unasked.  XLA orders the collectives of a program that it partitions itself at least as
well as those that jhost would write out, if it is told to begin them early and to have
several under way.  So such a program runs as in `jax.jit`, with these options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jhost._jax import is_own
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import is_pipelined, statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.reach import Reach, between_processes
from jhost.lowering.ir.remarks import LeftToXla


@dataclasses.dataclass(frozen=True, slots=True)
class LeaveToXla:
    """A finished program -> the same, with a remark if XLA is to partition it.

    `reach` says how far apart the GPUs along each axis lie; it is empty for others.
    """

    name: ClassVar[str] = "leave_to_xla"

    reach: Mapping[str, Reach]

    def apply(self, program: Program) -> Program:
        axes = self.between_processes(program)
        if not axes or is_pipelined(program) or _has_own_kernels(program):
            return program
        report = LeftToXla(axes=axes)
        return dataclasses.replace(program, remarks=(*program.remarks, report))

    def between_processes(self, program: Program) -> tuple[str, ...]:
        """The axes along which something moves between processes."""
        moved = (
            axis
            for stmt in statements(program)
            if isinstance(stmt, ir.Communicate)
            for axis in between_processes(stmt.axes, self.reach)
        )
        return tuple(dict.fromkeys(moved))


def _has_own_kernels(program: Program) -> bool:
    """Whether jhost's own computations are in it, which XLA would not split."""
    return any(
        is_own(eqn.eqn.primitive)
        for stmt in statements(program)
        if isinstance(stmt, ir.Compute)
        for eqn in stmt.unit.eqns
    )


def is_left_to_xla(program: Program) -> bool:
    """Whether XLA is to partition a finished program."""
    return any(isinstance(remark, LeftToXla) for remark in program.remarks)
