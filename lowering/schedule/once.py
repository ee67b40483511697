"""Gathers of values that no iteration of a scan changes, made once in front of it.

All microbatches read the same weights.  The first gather of their layers, which nothing
in the body can hide, brings the same weights each time.  The result is kept for the
whole scan; a cycle would also keep it, from one iteration to the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.border import Crossing, scan_border, with_scan_border
from jhost.lowering.ir.effects import read_and_made
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.schedule.copied import copied
from jhost.lowering.schedule.cycle import Early
from jhost.lowering.schedule.movable_transfers import MovableTransfers


@dataclasses.dataclass(frozen=True, slots=True)
class Once:
    """The gathers to put in front of a scan; `core` is the body without them."""

    scan: ir.Scan
    gathers: tuple[Early, ...]
    core: tuple[ir.Stmt, ...]

    @property
    def stmts(self) -> list[ir.Communicate]:
        return [each.stmt for each in self.gathers]


def once_of(scan: ir.Scan, found: MovableTransfers) -> Once | None:
    """The gathers that no iteration changes, and that nothing in one can hide."""
    # A scan of one iteration gathers once already.
    if scan.length < 2:
        return None
    gathers = tuple(each for each in found.early() if _reads(each) <= found.constant)
    return Once(scan, gathers, found.core(gathers, ())) if gathers else None


def with_once(program: Program, once: Once) -> tuple[Program, ir.Scan]:
    """`program` with these gathers in front of a new scan; and the new scan."""
    stmts, came = _gathered(once, FreshNames.of(program))
    scan = _that_reads(came, once)
    # By identity: a program may have two equal scans.
    place = next(n for n, stmt in enumerate(program.body) if stmt is once.scan)
    body = (*program.body[:place], *stmts, scan, *program.body[place + 1 :])
    return dataclasses.replace(program, body=body), scan


def _gathered(once: Once, names: FreshNames) -> tuple[list[ir.Stmt], list[ir.Buffer]]:
    """The statements that gather, and the gathered values."""
    border = scan_border(once.scan)
    known = {inside.name: outside for outside, inside in border.consts}
    body: list[ir.Stmt] = []
    came: list[ir.Buffer] = []
    for each in once.gathers:
        stmts = (*each.issued, ir.Wait(communication=each.stmt.name))
        copies, made = copied(stmts, known, names)
        body += copies
        came.append(made[each.stmt.out.name])
    return body, came


def _that_reads(came: Sequence[ir.Buffer], once: Once) -> ir.Scan:
    """The scan with the gathered values as further constants."""
    border = scan_border(once.scan)
    # The params have the names that the gathers' results had in the body, so its other
    # statements stay as they are.
    more = map(Crossing, came, (stmt.out for stmt in once.stmts))
    consts = (*border.consts, *more)
    body = dataclasses.replace(once.scan.body, body=once.core)
    border = dataclasses.replace(border, consts=consts)
    return with_scan_border(once.scan, body, border)


def _reads(gather: Early) -> set[str]:
    """The names of all that a gather, and the statements issued with it, read."""
    read, _ = read_and_made(gather.issued)
    return {*read}
