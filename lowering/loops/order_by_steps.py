"""Values that p2p loops make part by part lie in the order of the loops' steps.

In order of position the chunk of device r + k has a place that depends on r.  XLA then
copies each chunk to that place, and copies it out again for a kernel that reads it.  In
the order of the steps the chunk has place k, which is static, and kernels work in
place.  This holds for values between two loops, also where one scan stacks them and
another slices them, and for operands of contractions over all chunks behind a loop.

Without any transfers, six layers of Llama 8B in a scan take 2 to 4 % less time in this
order on one H200, and then as long as without chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set as AbstractSet
from typing import ClassVar, TypeAlias

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import with_each_body
from jhost.lowering.ir.derived import Shared
from jhost.lowering.ir.index import Constant, ranks, substituted, without_mods
from jhost.lowering.ir.program import Program
from jhost.lowering.loops.rotated_values import rotated_values

_Rotated: TypeAlias = Mapping[int, AbstractSet[str]]
"""The names of rotated values, by identity of the program or body that has them."""


@dataclasses.dataclass(frozen=True, slots=True)
class _InOrder:
    """A program or body before and after some of its values are rotated."""

    before: Program
    rotated: frozenset[str]
    after: Program


@dataclasses.dataclass(frozen=True, slots=True)
class OrderBySteps:
    """Places that depend on the rank -> places that do not, where no order is asked."""

    name: ClassVar[str] = "order_by_steps"

    known: Shared[_InOrder] = dataclasses.field(
        default_factory=Shared[_InOrder], compare=False, repr=False
    )

    def apply(self, program: Program) -> Program:
        rotated: dict[int, set[str]] = {}
        for owner, name in rotated_values(program):
            rotated.setdefault(owner, set()).add(name)
        return self.in_order(program, rotated) if rotated else program

    def in_order(self, program: Program, rotated: _Rotated) -> Program:
        """`program` with each device's rotated values where the first device has them.

        Candidates that rotate the same values of a body share the body.
        """
        names = frozenset(rotated.get(id(program), ()))
        inner = with_each_body(program, lambda body: self.in_order(body, rotated))
        if not names:
            return inner
        known = self.known.of(inner)
        for each in known:
            if each.before is inner and each.rotated == names:
                return each.after
        after = dataclasses.replace(inner, body=_statements(inner.body, {}, names))
        known.append(_InOrder(inner, names, after))
        return after


def _statements(
    body: Sequence[ir.Stmt], loops: Mapping[str, int], rotated: AbstractSet[str]
) -> tuple[ir.Stmt, ...]:
    def changed(stmt: ir.Stmt) -> ir.Stmt:
        match stmt:
            case ir.Select(source=source) if source.name in rotated:
                return _on_first(stmt, loops)
            case ir.For(index=index, extent=extent):
                inner = _statements(stmt.body, {**loops, index: extent}, rotated)
                return dataclasses.replace(stmt, body=inner)
            case _:
                return stmt

    return tuple(map(changed, body))


def _on_first(select: ir.Select, loops: Mapping[str, int]) -> ir.Select:
    # The first device has rank 0 along every axis, so its places are plain numbers.
    index = substituted(
        select.index, {rank: Constant(0) for rank in ranks(select.index)}
    )
    return dataclasses.replace(select, index=without_mods(index, loops))
