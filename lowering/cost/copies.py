"""The copies that XLA makes of parts of arrays, beside its kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set as AbstractSet

from jhost.lowering.cost.contractions import made_by_contraction, read_in_place
from jhost.lowering.cost.kernels import Kernel
from jhost.lowering.cost.writers import Writers
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import read_whole, reads_writes
from jhost.lowering.ir.index import ranks
from jhost.lowering.ir.layout import bytes_of
from jhost.lowering.ir.program import Program


class Copies:
    """The copies of each statement; asked in the order in which a program runs.

    `writers` says who wrote what so far.  A value that is `in_pieces` never becomes one
    array.  A value that is `copied` anyway, because a scan stacks it, for example, is
    read from its pieces by that copy.
    """

    def __init__(
        self, writers: Writers, *, in_pieces: AbstractSet[str], copied: AbstractSet[str]
    ) -> None:
        self.writers = writers
        self.in_pieces = in_pieces
        self.copied = copied

    def of(self, stmt: ir.Compute) -> Iterator[Kernel]:
        """The copies that contractions need: they cannot write or read parts in place.

        A value that is read in the pieces in which it was written never becomes one
        array.  Pieces at known places are put together when the value is first read as
        one array.
        """
        for heavy, buffer in zip(made_by_contraction(stmt), stmt.outs, strict=True):
            alias = self.alias(buffer)
            # XLA fuses a copy into the array with other kernels, but not with cuBLAS's.
            by_rank = heavy and alias is not None and _by_rank(alias)
            if by_rank or self.is_put_together(buffer):
                yield copy_of(buffer)
        for in_place, buffer in zip(read_in_place(stmt), stmt.ins, strict=True):
            alias = self.alias(buffer)
            if in_place and alias is not None and _by_rank(alias):
                yield copy_of(buffer)

    def is_part_by_rank(self, buffer: ir.Buffer) -> bool:
        """Whether a transfer needs a copy, because the part's place is not static.

        Parts of the dim in chunks do not count: their copies are in the rates, which
        were fitted to the times of whole loops.  So this is about the other dim of an
        all-to-all.
        """
        alias = self.alias(buffer)
        if alias is None or alias.source.dims[alias.dim].stream:
            return False
        return _by_rank(alias)

    def is_put_together(self, buffer: ir.Buffer) -> bool:
        """Whether it is a piece, at a static place, of a value read as one array."""
        alias = self.alias(buffer)
        if alias is None or alias.drop or _by_rank(alias):
            return False
        return alias.source.name not in self.copied

    def alias(self, buffer: ir.Buffer) -> ir.Select | None:
        """Which part of an array a buffer is, if it is one."""
        root, *_ = self.writers.of(buffer.name)
        _, alias = self.writers.aliases.get(buffer.name, (None, None))
        return None if root in self.in_pieces else alias


def written_in_pieces(program: Program) -> set[str]:
    """The values that are written part by part and not read as a whole."""
    stmts = ir.walk(program.body)
    made = {stmt.buffer.name for stmt in ir.every(ir.Allocate, stmts)}
    return made - read_whole(program) if made else made


def taken_from_pieces(program: Program) -> set[str]:
    """The values whose readers of the whole can all read them in pieces.

    Such a reader is a fusion, or a copy that reorders dims for a contraction.
    """
    # A result leaves the program as one array, whatever else reads it.
    arrays = {result.name for result in program.results}
    found: set[str] = set()
    for stmt in ir.walk(program.body):
        if isinstance(stmt, ir.Compute):
            for in_place, buffer in zip(read_in_place(stmt), stmt.ins, strict=True):
                (arrays if in_place else found).add(buffer.name)
        elif not isinstance(stmt, ir.Select | ir.Deallocate | ir.For):
            arrays |= {buffer.name for buffer in reads_writes(stmt)[0]}
    return found - arrays


def is_transposed(stmt: ir.Communicate) -> tuple[bool, bool]:
    """Whether XLA transposes what an all-to-all sends, and what it receives.

    An all-to-all sends and receives parts that lie one behind the other in memory.
    Only parts of the major dim do, so XLA transposes parts of another dim.
    """
    if stmt.kind != "AllToAll":
        return False, False
    sent, received = (stmt.source, stmt.dim), (stmt.out, stmt.source_dim)
    return not _is_major(*sent), not _is_major(*received)


def _is_major(buffer: ir.Buffer, dim: int | None) -> bool:
    return math.prod(buffer.shape[:dim]) == 1


def _by_rank(alias: ir.Select) -> bool:
    """Whether the part depends on the device's number, so its place is not static."""
    return bool(ranks(alias.index))


def copy_of(buffer: ir.Buffer) -> Kernel:
    # It reads each byte and writes it.
    return Kernel(2 * bytes_of(buffer))
