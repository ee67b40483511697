"""Cumulative sums along a sharded dim, as one in each part and one over their totals.

A running sum needs all that is before it: of each part of another device a total.
Products, maxima and minima are found likewise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jax import lax

from jhost._jax import user_context
from jhost.lowering.ir.bodies import statements, with_each_body
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute, Stmt
from jhost.lowering.padding.windowed import ReachedAxes, reached_axes
from jhost.lowering.rules.reducers import COMBINE, Reducer, identity
from jhost.lowering.units.make import computes_of

_SCANS: Mapping[str, tuple[Callable[..., Any], Reducer]] = {
    "cummax": (lax.cummax, "max"),
    "cummin": (lax.cummin, "min"),
    "cumprod": (lax.cumprod, "prod"),
    "cumsum": (lax.cumsum, "sum"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class BlockScans:
    """`cumsum` along a dim that axes of the user's may reach -> in blocks."""

    name: ClassVar[str] = "block_scans"

    def apply(self, program: Program) -> Program:
        """`program`, and the bodies in it, with scans in as many blocks as parts."""
        reached = reached_axes(program) if _has_scans(program) else {}
        return _blocked(program, reached) if reached else program


def _has_scans(program: Program) -> bool:
    return any(_name(stmt) in _SCANS for stmt in statements(program))


def _name(stmt: Stmt) -> str:
    return stmt.unit.eqns[0].eqn.primitive.name if isinstance(stmt, Compute) else ""


def _blocked(program: Program, reached: ReachedAxes) -> Program:
    way = id(program)
    program = with_each_body(program, functools.partial(_blocked, reached=reached))
    mesh, names = dict(program.mesh.shape), FreshNames.of(program)
    body: list[Stmt] = []
    for stmt in program.body:
        blocks = _blocks(stmt, way, reached, mesh)
        if blocks > 1:
            assert isinstance(stmt, Compute)
            (out,) = stmt.outs
            scan = _in_blocks(stmt, blocks)
            with user_context(stmt.unit.eqns[0].eqn):
                body += computes_of(_name(stmt), scan, stmt.ins, out, names)
        else:
            body.append(stmt)
    if len(body) == len(program.body):
        return program
    return dataclasses.replace(program, body=tuple(body))


def _blocks(stmt: Stmt, way: int, reached: ReachedAxes, mesh: Mapping[str, int]) -> int:
    """In how many parts the dim of a scan may come, that divide it."""
    if not isinstance(stmt, Compute) or _name(stmt) not in _SCANS or not stmt.ins:
        return 1
    (x,), dim = stmt.ins, stmt.unit.eqns[0].eqn.params["axis"]
    axes = reached.get((way, x.name, dim), set()) | reached.get(
        (way, stmt.outs[0].name, dim), set()
    )
    counts = [axes_size(each, mesh) for each in axes]
    size = x.shape[dim] or 1
    return max((n for n in counts if size % n == 0), default=1)


def _in_blocks(stmt: Compute, blocks: int) -> Callable[[Any], Any]:
    (unit_eqn,) = stmt.unit.eqns
    dim, reverse = (unit_eqn.eqn.params[name] for name in ("axis", "reverse"))
    scan, reducer = _SCANS[_name(stmt)]

    def scanned(x: Any) -> Any:
        shape = x.shape
        size = shape[dim] // blocks
        x = lax.reshape(x, (*shape[:dim], blocks, size, *shape[dim + 1 :]))
        inside = scan(x, axis=dim + 1, reverse=reverse)
        last = 0 if reverse else size - 1
        totals = lax.index_in_dim(inside, last, dim + 1, keepdims=False)
        totals = scan(totals, axis=dim, reverse=reverse)
        # Of the blocks before each, and nothing before the first.
        config = [(0, 0, 0)] * totals.ndim
        config[dim] = (-1, 1, 0) if reverse else (1, -1, 0)
        before = lax.pad(totals, identity(reducer, x.dtype), config)
        others = [d for d in range(x.ndim) if d != dim + 1]
        before = lax.broadcast_in_dim(before, x.shape, others)
        return lax.reshape(COMBINE[reducer](before, inside), shape)

    return scanned
