"""What a chunk reads beyond its own elements: a few of the chunks beside it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from jhost.lowering.ir.operation import operand_maps
from jhost.lowering.ir.statements import Compute, Stmt
from jhost.lowering.rules.reads import WindowReads


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkHalo:
    """How many elements of the chunks before and after a chunk reads along a dim.

    If one of them is negative, the chunk does not read so many of its own.
    """

    dim: int
    before: int
    after: int

    @property
    def sides(self) -> tuple[tuple[int, bool], tuple[int, bool]]:
        """The elements that it reads before it (False) and behind it (True)."""
        return (self.before, False), (self.after, True)

    @property
    def most(self) -> int:
        """The most elements that it reads of one neighbour."""
        return max(self.before, self.after)


def halos_of(stmt: Stmt, factor: int | None) -> dict[int, ChunkHalo]:
    """The halo of each operand of which a chunk reads more than its own elements."""
    if not isinstance(stmt, Compute):
        return {}
    halos = {
        operand: _halo(dim, reads) for operand, dim, reads in _windows(stmt, factor)
    }
    return {n: halo for n, halo in halos.items() if halo.before or halo.after}


def _halo(dim: int, reads: WindowReads) -> ChunkHalo:
    """The elements that a chunk of any size reads beside its own."""
    steps = reads.fewest
    start, own = reads.start(0, steps), steps * reads.stride // reads.dilation
    # Widths that users give may be NumPy's integers, which no index takes.
    return ChunkHalo(dim, -int(start), int(start + reads.window(steps) - own))


def fewest_steps(stmt: Compute, factor: int) -> int:
    """The fewest steps of a factor that read around whole elements of each operand."""
    return math.lcm(*(reads.fewest for _, _, reads in _windows(stmt, factor)))


def reads_others(stmt: Stmt, how: str = "") -> str:
    """Why a stream ends before a computation that reads in windows."""
    assert isinstance(stmt, Compute)
    (unit_eqn,) = stmt.unit.eqns
    others = f"{unit_eqn.eqn.primitive.name} reads elements of other chunks"
    return f"{others}, {how}" if how else others


def far_reads(stmt: Compute, factor: int) -> str:
    """Why chunks of a factor with windows are no chunks of the operands, or "".

    They are if a part of the steps reads around the same part of the elements, and a
    device has the dim whole.
    """
    (unit_eqn,) = stmt.unit.eqns
    if unit_eqn.axes[factor]:
        return reads_others(stmt, "and a device has only a part of the dim")
    if unit_eqn.rule.reducers[factor] is not None:
        return reads_others(stmt, "and reduces over all of them")
    joined = unit_eqn.rule.joined
    # Devices exchange what is joined, all of it at once: see `JoinedReads`.
    if joined is not None and joined.factor == factor:
        return reads_others(stmt)
    steps = unit_eqn.rule.sizes[factor]
    for operand, dim, reads in _windows(stmt, factor):
        if reads.stride < 0:
            return reads_others(stmt, "in reverse")
        size = stmt.ins[operand].shape[dim]
        if size * reads.dilation != steps * reads.stride:
            return reads_others(stmt, f"and makes {steps} of {size} elements")
        if reads.lead(reads.fewest) is None:
            return reads_others(stmt, "and its steps read gaps alone")
    return ""


def _windows(
    stmt: Compute, factor: int | None
) -> Iterator[tuple[int, int, WindowReads]]:
    for operand, dims in enumerate(operand_maps(stmt)):
        for dim, mapped in enumerate(dims):
            if mapped and mapped.factor == factor and mapped.reads is not None:
                yield operand, dim, mapped.reads
