"""The factors of a statement's operands and results, as padding sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.operation import operation
from jhost.lowering.ir.statements import (
    Buffer,
    Communicate,
    Compute,
    Select,
    Set,
    Stmt,
)
from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.dim_rule import Dims, aligned
from jhost.lowering.rules.reducers import Reducer


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Operands:
    """A statement's values and the factors that tie their dims, in steps on a device.

    Attributes:
        counted: the factors whose positions in the whole count, so a device has to know
            which part it holds.
        fixed: whether it can work on no other sizes.
        inner: the factors that some dim follows inside of another factor's steps.
        windows: the dims of each operand that are read in windows.  They take a dim as
            long as it is.
    """

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    steps: tuple[int, ...]
    reducers: tuple[Reducer | None, ...]
    counted: frozenset[int]
    fixed: bool = False
    inner: frozenset[int] = frozenset()
    windows: tuple[frozenset[int], ...] = ()


def operands_of(stmt: Stmt, mesh: Mapping[str, int]) -> Operands | None:
    """The factors of `stmt`, if it has any business with the dims of values.

    Control flow has operands for each value that crosses its border (`flat.py`).
    """
    if isinstance(stmt, Compute):
        return _of_compute(stmt, mesh)
    if not isinstance(stmt, Set | Select | Communicate):
        return None
    # These dims do not stay what they are, so padding ends there.
    moved = {getattr(stmt, "dim", None), getattr(stmt, "source_dim", None)}
    factors = Factors()
    dims = factors.dims(stmt.out.shape, whole=moved)
    count = len(factors.sizes)
    return Operands(
        reads=(stmt.source,),
        writes=(stmt.out,),
        operands=(dims,),
        results=(dims,),
        steps=tuple(factors.sizes),
        reducers=(None,) * count,
        counted=frozenset(),
    )


def _of_compute(stmt: Compute, mesh: Mapping[str, int]) -> Operands:
    op = operation(stmt)
    windows = [
        {w.dim for w in op.windows if w.operand == n} for n in range(len(op.ins))
    ]
    (unit_eqn,) = stmt.unit.eqns
    devices = [axes_size(axes, mesh) for axes in unit_eqn.axes]
    spread = frozenset(f for f, d in enumerate(devices) if d > 1)
    return Operands(
        reads=stmt.ins,
        writes=stmt.outs,
        operands=tuple(map(aligned, op.operands)),
        results=op.results,
        steps=tuple(n // d for n, d in zip(op.sizes, devices, strict=True)),
        reducers=op.reducers,
        # On one device positions begin at 0, whatever the size.
        counted=unit_eqn.rule.counted & spread,
        fixed=op.pinned is not None,
        inner=unit_eqn.rule.inner,
        windows=tuple(map(frozenset, windows)),
    )
