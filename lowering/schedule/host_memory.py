"""Values in the host's memory, where an offloading policy puts them."""

from __future__ import annotations

import jax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.program import Program


def results_off_device(program: Program) -> set[str]:
    """The names of the results that are in the host's memory.

    A buffer of this IR does not say its memory.  Results of `jax.device_put` do, and a
    copy is in the memory of its operand.  All results of control flow count if any
    result of one of its bodies does.
    """
    found: set[str] = set()
    for stmt in program.body:
        reads, writes = reads_writes(stmt)
        match stmt:
            case ir.Compute(unit=unit, outs=outs):
                pairs = zip(unit.outvars, outs, strict=True)
                found |= {out.name for var, out in pairs if _is_off_device(var.aval)}
            case ir.Scan() | ir.While() | ir.Cond():
                if any(map(results_off_device, stmt.bodies)):
                    found |= {buffer.name for buffer in writes}
            case _:
                if not found.isdisjoint(buffer.name for buffer in reads):
                    found |= {buffer.name for buffer in writes}
    return found & {result.name for result in program.results}


def _is_off_device(aval: object) -> bool:
    """Whether values of this type are in the host's memory."""
    space = getattr(aval, "memory_space", jax.memory.Space.Device)
    return space == jax.memory.Space.Host
