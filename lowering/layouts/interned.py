"""Bodies and fills that several solutions for one program share are written once."""

from __future__ import annotations

import dataclasses

from jhost._jax import fresh_var
from jhost.lowering.ir.layout import Layout
from jhost.lowering.ir.operation import Operation
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute
from jhost.lowering.layouts.flat_bodies import FlatBody


class Interned:
    """The bodies and fills written so far for one program."""

    def __init__(self) -> None:
        self.bodies: dict[tuple[str, int], list[Program]] = {}
        self.fills: dict[tuple[int, Layout], Compute] = {}

    def body(self, flat: FlatBody, program: Program) -> Program:
        """A rewritten body, or an equal one from before.

        Passes remember what they found out about a body by its identity.
        """
        known = self.bodies.setdefault((flat.prefix, id(flat.program.body)), [])
        for other in known:
            if other == program and other.display_names is program.display_names:
                return other
        known.append(program)
        return program

    def fill(self, op: Operation, layout: Layout) -> Compute:
        """An operation that reads nothing, to make its result in `layout`."""
        assert isinstance(op.stmt, Compute)
        key = id(op.stmt), layout
        if key not in self.fills:
            self.fills[key] = _filling(op, op.stmt, layout)
        return self.fills[key]


def _filling(op: Operation, stmt: Compute, layout: Layout) -> Compute:
    (eqn,) = stmt.unit.eqns
    var = fresh_var(eqn.eqn.outvars[0].aval)
    unit_eqn = dataclasses.replace(
        eqn, eqn=eqn.eqn.replace(outvars=[var]), axes=op.making(layout)
    )
    unit = dataclasses.replace(stmt.unit, eqns=(unit_eqn,), outvars=(var,))
    return dataclasses.replace(stmt, unit=unit)
