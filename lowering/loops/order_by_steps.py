"""Values that p2p loops make part by part lie in the order of the loops' steps.

In order of position the chunk of device r + k has a place that depends on r.  XLA then
copies each chunk there, and copies each chunk out that a kernel reads.  In the order of
the steps it has place k, which is known beforehand, and kernels work in place.  This
holds for values between two loops, also where one scan stacks them and another slices
them, and for what a contraction sums up behind a loop.

Six layers of Llama 8B in a scan take 2 to 4 % less so on one H200, transfers standing
still: as long as without chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import ClassVar

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import with_bodies
from jhost.lowering.ir.index import Constant, Rank, leaves, substituted, without_mods
from jhost.lowering.ir.program import Program
from jhost.lowering.loops.turned import Name, turned_values


@dataclasses.dataclass(frozen=True, slots=True)
class OrderBySteps:
    """Places that depend on the rank -> places that do not, where none else reads."""

    name: ClassVar[str] = "order_by_steps"

    def apply(self, program: Program) -> Program:
        turned = turned_values(program)
        return _in_order(program, turned) if turned else program


def _in_order(program: Program, turned: AbstractSet[Name]) -> Program:
    """`program`, in which each device has those where the first one has them."""
    body = _statements(program.body, {}, id(program), turned)
    return dataclasses.replace(program, body=body)


def _statements(
    body: Sequence[ir.Stmt],
    loops: Mapping[str, int],
    here: int,
    turned: AbstractSet[Name],
) -> tuple[ir.Stmt, ...]:
    def changed(stmt: ir.Stmt) -> ir.Stmt:
        match stmt:
            case ir.Select(source=source) if (here, source.name) in turned:
                return _on_first(stmt, loops)
            case ir.For(index=index, extent=extent):
                inner = _statements(stmt.body, {**loops, index: extent}, here, turned)
                return dataclasses.replace(stmt, body=inner)
            case ir.Scan() | ir.While() | ir.Cond():
                return with_bodies(stmt, [_in_order(b, turned) for b in stmt.bodies])
            case _:
                return stmt

    return tuple(map(changed, body))


def _on_first(select: ir.Select, loops: Mapping[str, int]) -> ir.Select:
    # The first device has rank 0 along every axis, so its places are plain numbers.
    ranks = {leaf for leaf in leaves(select.index) if isinstance(leaf, Rank)}
    index = substituted(select.index, dict.fromkeys(ranks, Constant(0)))
    return dataclasses.replace(select, index=without_mods(index, loops))
