"""Equations along a sharded dim, split into one in each part and one over the parts.

A running sum only needs the totals of the parts before it, and a search only needs what
each part found.  So each device sends no more than these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from jax.extend.core import JaxprEqn

from jhost._jax import user_context
from jhost.lowering.ir.bodies import statements, with_each_body
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute, Stmt
from jhost.lowering.padding.block_scans import SCANS, scan_in_blocks
from jhost.lowering.padding.block_searches import (
    SEARCHES,
    best_in_blocks,
    most_in_blocks,
)
from jhost.lowering.padding.reached import ReachedAxes, reached_axes
from jhost.lowering.units.make import computes_of

_Blockwise: TypeAlias = Callable[[JaxprEqn, int], Callable[[Any], Any] | None]
"""Computes an equation in so many blocks of its dim, if that is possible."""

BLOCKWISE: Mapping[str, _Blockwise] = {
    **dict.fromkeys(SCANS, scan_in_blocks),
    **dict.fromkeys(SEARCHES, best_in_blocks),
    "top_k": most_in_blocks,
}


@dataclasses.dataclass(frozen=True, slots=True)
class InBlocks:
    """`cumsum`, `argmax` or `top_k` of a dim that axes may reach -> in blocks."""

    name: ClassVar[str] = "in_blocks"

    def apply(self, program: Program) -> Program:
        """`program`, and the bodies in it, with as many blocks as there are parts."""
        reached = reached_axes(program) if _has_any(program) else {}
        return _blocked(program, reached) if reached else program


def _has_any(program: Program) -> bool:
    return any(_name(stmt) in BLOCKWISE for stmt in statements(program))


def _name(stmt: Stmt) -> str:
    return stmt.unit.eqns[0].eqn.primitive.name if isinstance(stmt, Compute) else ""


def _blocked(program: Program, reached: ReachedAxes) -> Program:
    # `reached` knows the program from before its bodies change.
    way = id(program)
    program = with_each_body(program, functools.partial(_blocked, reached=reached))
    mesh, names = dict(program.mesh.shape), FreshNames.of(program)
    body: list[Stmt] = []
    for stmt in program.body:
        fun = _in_blocks(stmt, way, reached, mesh)
        if fun is None:
            body.append(stmt)
            continue
        assert isinstance(stmt, Compute)
        # Remarks and profiles name the user's line for what is made here, too.
        with user_context(stmt.unit.eqns[0].eqn):
            body += computes_of(_name(stmt), fun, stmt.ins, stmt.outs, names)
    if len(body) == len(program.body):
        return program
    return dataclasses.replace(program, body=tuple(body))


def _in_blocks(
    stmt: Stmt, way: int, reached: ReachedAxes, mesh: Mapping[str, int]
) -> Callable[[Any], Any] | None:
    """Computes a statement in as many blocks as its dim may come in parts."""
    # A literal has no parts.
    if not isinstance(stmt, Compute) or _name(stmt) not in BLOCKWISE or not stmt.ins:
        return None
    (x,), eqn = stmt.ins, stmt.unit.eqns[0].eqn
    dim = _dim(eqn)
    alike = [b.name for b in (x, *stmt.outs) if b.shape == x.shape]
    axes = {each for name in alike for each in reached.get((way, name, dim), ())}
    size = x.shape[dim]
    counts = [n for n in (axes_size(each, mesh) for each in axes) if 1 < n <= size]
    if not counts:
        return None
    # Rather of one size each, and then as many as there may be.
    blocks = max(counts, key=lambda n: (size % n == 0, n))
    return BLOCKWISE[_name(stmt)](eqn, blocks)


def _dim(eqn: JaxprEqn) -> int:
    if "axes" in eqn.params:
        return eqn.params["axes"][0]  # a search has one
    return eqn.params["axis"]
