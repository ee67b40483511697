"""Signs of zero: a sum over devices is -0.0 where all of its terms are.

NCCL gives this result, because its sums begin with a term, and so do chunks and
permutes.  XLA:CPU (of JAX 0.10 to 0.12) adds all terms to 0.  There one more collective
finds out whether all terms are -0.0, unless the terms are sums from 0 themselves.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh

from jhost._dtypes import summed_in
from jhost.lowering.emit.groups import axis_index, over
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.ir.statements import Communicate, Compute, Set, UnitEqn, walk

Needs: TypeAlias = frozenset[str] | None
"""A value is never -0.0 if these buffers never are; None if it may be anyway."""

_ADDS = frozenset(("add", "add_any"))


def sums_begin_with_0(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices of a mesh add all terms to 0."""
    if isinstance(mesh, AbstractMesh) or mesh.empty:
        return False
    return mesh.devices.flat[0].platform == "cpu"


def never_negative_zero(program: Program) -> frozenset[str]:
    """The buffers that hold sums that begin with 0, or sums and copies of these."""
    written: list[tuple[str, Needs]] = []
    for stmt in walk(program.body):
        if isinstance(stmt, Communicate | Set):
            # A gradient may be scattered over one axis and then summed over another.
            written.append((stmt.out.name, frozenset((stmt.source.name,))))
        elif isinstance(stmt, Compute):
            outs = zip(stmt.outs, stmt.unit.outvars, strict=True)
            needs = _needs(stmt)
            written += [(out.name, needs.get(var)) for out, var in outs]
    found = {out for out, _ in written}
    while more := {n for n, needs in written if needs is None or needs - found} & found:
        found -= more
    return frozenset(found)


def _needs(stmt: Compute) -> dict[Any, Needs]:
    """By the variables of its unit: what must never be -0.0, so that they never are."""
    ins = zip(stmt.unit.invars, stmt.ins, strict=True)
    known: dict[Any, Needs] = {var: frozenset((each.name,)) for var, each in ins}
    for each in stmt.unit.eqns:
        eqn = each.eqn
        terms = [None if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        needs: Needs = None
        if _sums_up(each):
            needs = frozenset()
        elif eqn.primitive.name in _ADDS and None not in terms:
            # A sum of two values is -0.0 only if both are.
            needs = frozenset[str]().union(*filter(None, terms))
        known.update(dict.fromkeys(eqn.outvars, needs))
    return known


def _sums_up(unit_eqn: UnitEqn) -> bool:
    rule = unit_eqn.rule
    summed = {factor for factor, r in enumerate(rule.reducers) if r == "sum"}
    return bool(summed - rule.picked - rule.updates)


def with_signs(total: Any, x: Any, stmt: Communicate, ranks: Ranks) -> Any:
    """`total`, a sum of the terms `x` from 0 on, as one of the terms alone."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = ((total.real, x.real), (total.imag, x.imag))
        return lax.complex(*(with_signs(*part, stmt, ranks) for part in parts))
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
        return total
    # A sum is -0.0 only if no term is anything else.
    # `jnp.signbit` (of JAX 0.10 to 0.12) refuses floats of 8 bits and less.
    is_negative = jnp.signbit(x.astype(summed_in(x.dtype))) & (x == 0)
    signs = lax.pmin(is_negative.astype(np.int8), **over(stmt.axes, ranks)).astype(bool)
    if stmt.kind == "ReduceScatter":
        assert stmt.dim is not None
        size = total.shape[stmt.dim]
        start = axis_index(stmt.axes, ranks.sizes) * size
        signs = lax.dynamic_slice_in_dim(signs, start, size, stmt.dim)
    return jnp.where(signs, jnp.full_like(total, -0.0), total)
