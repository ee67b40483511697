"""Cheap values stand right before what reads them, where only streams stand between.

XLA fuses both, although the works between them have an order.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.operation import can_wait
from jhost.lowering.ir.queues import MAIN


def beside_readers(
    body: Sequence[ir.Stmt], aliases: Container[str]
) -> Sequence[ir.Stmt]:
    """`body` with each cheap value before its first reader, if all readers are cheap.

    No value moves past a loop or a body, and none that touches one of `aliases`, which
    others may write.
    """
    cheap = [*map(_is_cheap, body, _on_main(body))]
    if not any(cheap):
        return body
    touched = [reads_writes(stmt) for stmt in body]
    readers: dict[str, set[int]] = {}
    for number, (reads, _) in enumerate(touched):
        for buffer in reads:
            readers.setdefault(buffer.name, set()).add(number)
    loops = [
        *itertools.accumulate(isinstance(s, (ir.For, *CONTROL_FLOW)) for s in body)
    ]
    places = [*range(len(body))]
    # From the last to the first: a value goes where its readers have gone.
    for number in reversed(range(len(body))):
        reads, writes = touched[number]
        if not cheap[number] or any(b.name in aliases for b in (*reads, *writes)):
            continue
        found = set[int]().union(*(readers.get(b.name, ()) for b in writes))
        if found and all(cheap[n] and loops[n] == loops[number] for n in found):
            places[number] = min(places[n] for n in found)
    order = sorted(range(len(body)), key=lambda n: (places[n], n))
    return [body[number] for number in order]


def _is_cheap(stmt: ir.Stmt, on_main: bool) -> bool:
    """Whether XLA may fuse it with others, wherever they stand."""
    if not on_main or not isinstance(stmt, ir.Compute):
        return False
    return can_wait(stmt) and stmt.chunk is None and not stmt.reducer


def _on_main(body: Sequence[ir.Stmt]) -> Iterator[bool]:
    """For each statement, whether it is on the stream on which a program begins."""
    first = True
    for stmt in body:
        if isinstance(stmt, ir.SetCurrentStream):
            first = stmt.stream == MAIN
        yield first
