"""Work has no order in itself where no transfer begins or ends between two parts of it.

Tokens tell XLA before which work to issue a transfer and behind which to wait for it.
If all transfers stand beside all works, one token before the works and one behind them
say that.  XLA then fuses what stands between two works with either of them, and so does
the prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.queues import inside_own, on_own
from jhost.lowering.schedule.cheap import can_wait, is_cheap


def in_one_run(
    body: Sequence[ir.Stmt], works: Sequence[range], kept: Iterable[str]
) -> Sequence[ir.Stmt]:
    """`body` with its ordered works as one, if only cheap statements stand between.

    `works` says where each work is, with what sets its stream.  What has a name in
    `kept` is read behind `body`.
    """
    if len(works) < 2:
        return body
    first, last = works[0].start, works[-1].stop
    last += sum(1 for _ in itertools.takewhile(_is_cheap, body[last:]))
    sets_stream = {n for each in works for n in each if n not in inside_own(each)}
    run = [body[n] for n in range(first, last) if n not in sets_stream]
    # A loop, a transfer or another stream may stand between them.  And several
    # statements write to memory that is allocated, in an order that has to stay.
    allocates = any(isinstance(stmt, ir.Allocate) for stmt in body)
    if allocates or not all(map(can_wait, run)):
        return body
    before, along = _apart(body[:first], run, {*_read(body[last:]), *kept})
    return [*before, *on_own([*along, *run]), *body[last:]]


def _apart(
    body: Sequence[ir.Stmt], run: Sequence[ir.Stmt], without: set[str]
) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
    """The statements before a run, and cheap ones that only the run is made of.

    `without` has the names of what is read elsewhere.
    """
    before: list[ir.Stmt] = []
    along: list[ir.Stmt] = []
    for stmt in reversed(body):
        writes = {buffer.name for buffer in reads_writes(stmt)[1]}
        if _is_cheap(stmt) and writes <= {*_read((*along, *run))} - without:
            along.insert(0, stmt)
        else:
            before.insert(0, stmt)
            without.update(_read([stmt]))
    return before, along


def _is_cheap(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Compute) and all(map(is_cheap, stmt.unit.eqns))


def _read(body: Iterable[ir.Stmt]) -> Iterable[str]:
    return (buffer.name for stmt in body for buffer in reads_writes(stmt)[0])
