"""Cheap work on params that waits for the transfers that its reader waits for."""

from __future__ import annotations

from collections.abc import Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.queues import TRANSFERS
from jhost.lowering.schedule.blocks import before_readers
from jhost.lowering.schedule.cheap import may_go_along


def behind_waits(body: Sequence[ir.Stmt], params: set[str]) -> list[ir.Stmt]:
    """`body` with cheap work on `params` moved behind the waits before its reader.

    In front of the waits, XLA writes its result to memory for the reader.  Behind them,
    XLA fuses both: the decayed moments of an update that waits for a sum, for example.
    What a transfer reads stays where it is.
    """
    waits, late = 0, list[ir.Stmt]()
    behind: dict[str, int] = {}
    """The waits behind the first reader of a value, if that is a computation."""
    for stmt in reversed(body):
        waits += stmt == ir.Synchronize(stream=TRANSFERS)
        computes = isinstance(stmt, ir.Compute)
        if computes and stmt.ins and may_go_along(stmt):
            given = params.issuperset(buffer.name for buffer in stmt.ins)
            if given and all(behind.get(o.name, waits) < waits for o in stmt.outs):
                late.append(stmt)
        read = (b.name for each in ir.walk((stmt,)) for b in reads_writes(each)[0])
        for name in read:
            behind.pop(name, None)
            if computes:
                behind[name] = waits
    moved = {*map(id, late)}
    rest = [stmt for stmt in body if id(stmt) not in moved]
    return [*before_readers(late[::-1], rest)] if late else rest
