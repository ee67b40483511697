"""What lies in another memory than the device's, as an offloading policy puts it."""

from __future__ import annotations

import jax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.program import Program


def results_off_device(program: Program) -> set[str]:
    """The results that lie in another memory, by name.

    A buffer has no memory of its own here: what `jax.device_put` makes does, and what
    is copied of it.  What leaves control flow counts if anything that leaves a body of
    it does.
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
    """Whether values of this type lie in another memory."""
    space = getattr(aval, "memory_space", jax.memory.Space.Device)
    return space == jax.memory.Space.Host
