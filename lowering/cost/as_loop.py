"""The body of a scan as XLA runs it: a loop that reads and writes stacks by a counter.

A cycle is written so already (`schedule/with_cycle.py`), and XLA makes the same kernels
of other scans.  So all are timed in this form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.border import scan_ins, scan_outs, stacked
from jhost.lowering.ir.derived import derived_with
from jhost.lowering.ir.effects import Aliases, reads_writes, written
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.schedule.blocks import in_blocks
from jhost.lowering.schedule.stacks import Stacks, fresh, last_place
from jhost.lowering.units.segment import Segment


def as_loop(scan: ir.Scan) -> Program:
    """The body of a scan with a counter, and with stacks instead of slices."""
    if not (scan.length and (scan.xs or scan.ys)):
        return scan.body
    *_, slices = scan_ins(scan, scan.body.params)
    _, ys = scan_outs(scan, scan.body.results)
    return _with_stacks(scan.body, slices, ys, scan.length, last_place(scan))


@derived_with
def _with_stacks(
    body: Program,
    slices: Sequence[ir.Buffer],
    ys: Sequence[ir.Buffer],
    length: int,
    last: int | None,
) -> Program:
    """`body` in a scan of that length; if it is reversed, it begins at `last`."""
    names = FreshNames.of(body)
    reads, writes, ends = (Stacks(last, names, []) for _ in range(3))
    count = reads.counter()
    read, made = (
        [fresh(stacked(each, length), names) for each in of] for of in (slices, ys)
    )
    for part, stack in zip(slices, read, strict=True):
        reads.read_into(part, stack, count)
    full = [writes.written(stack, y, count) for y, stack in zip(ys, made, strict=True)]
    # What is stacked is read once more than the body says, so nothing is freed there.
    stmts = [stmt for stmt in body.body if not isinstance(stmt, ir.Deallocate)]
    stmts = _behind_makers(
        writes.body, ys, [*_before_readers(reads.body, slices, stmts)]
    )
    given = body.params[: len(body.params) - len(slices)]
    carried = body.results[: len(body.results) - len(ys)]
    looped = dataclasses.replace(
        body,
        params=(*given, *read, count, *made),
        results=(ends.next(count), *carried, *full),
        body=(*stmts, *ends.body),
    )
    # XLA fuses a read with its readers, and a write with what makes its value.
    return Segment().change(looped)


def _before_readers(
    reads: Sequence[ir.Stmt], values: Sequence[ir.Buffer], body: Sequence[ir.Stmt]
) -> Iterator[ir.Stmt]:
    """`body` with the read of each value before the first statement that reads it.

    That may be on another stream, so blocks are no places for it.
    """
    left = {value.name: read for value, read in zip(values, reads, strict=True)}
    for stmt in body:
        read = (buffer for s in ir.walk((stmt,)) for buffer in reads_writes(s)[0])
        yield from (left.pop(b.name) for b in read if b.name in left)
        yield stmt
    yield from left.values()


def _behind_makers(
    writes: Sequence[ir.Stmt], values: Sequence[ir.Buffer], body: Sequence[ir.Stmt]
) -> list[ir.Stmt]:
    """`body` with the write of each value behind the last block that makes of it."""
    aliases = Aliases(body)
    blocks = [*in_blocks(body), []]
    maker = {
        name: number
        for number, block in enumerate(blocks)
        for stmt in ir.walk(tuple(block))
        for name in aliases.memories(written(stmt))
    }
    for write, value in zip(writes, values, strict=True):
        # A value that is given is written at the end.
        blocks[maker.get(value.name, -1)].append(write)
    return [stmt for block in blocks for stmt in block]
