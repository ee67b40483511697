"""From a flat jaxpr to the first Host IR program: a statement an equation.

The program is for one device, with global shapes.  `jhost.stream`, `jhost.serial`
and `jhost.shard` leave it as marks on buffers, which later passes take up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from jhost._jax import arg_names, source_line, with_own_operands
from jhost.lowering.frontend.constrained_casts import on_narrower
from jhost.lowering.frontend.contractions import without_transposes
from jhost.lowering.frontend.control_flow import (
    carried_params,
    control_flow,
    has_programs,
    names_of_results,
    out_names,
    param_names,
)
from jhost.lowering.frontend.convolution_padding import with_own_padding
from jhost.lowering.frontend.inline_calls import FlatJaxpr, inline_calls
from jhost.lowering.frontend.markers import MARKERS, Markers
from jhost.lowering.frontend.rows import with_rows
from jhost.lowering.frontend.shifts import with_shifts
from jhost.lowering.frontend.specs import raise_problems
from jhost.lowering.frontend.unsupported import check_supported
from jhost.lowering.frontend.values import DisplayNames, as_var
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.marks import SerialMark
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.rules.dim_rule import DimRule, shape_of
from jhost.lowering.rules.elementwise import moves_memory
from jhost.lowering.rules.registry import without_factors
from jhost.lowering.rules.table import for_parts, reason_of, rule_of

_MOVED = "a move to other memory"

Flatten: TypeAlias = Callable[[Any, JaxprEqn], FlatJaxpr]
"""A closed jaxpr, and the equation whose body it is -> its equations, without calls."""


def build(
    flat: FlatJaxpr,
    *,
    name: str,
    mesh: AbstractMesh,
    param_names: Sequence[str],
    result_names: Sequence[str],
    display_names: DisplayNames | None = None,
    is_body: bool = False,
    flatten: Flatten = inline_calls,
) -> Program:
    """The straight-line program of `flat`, with its marks and the marks of its bodies.

    `flatten` gives the equations of a body.  `display_names` are what messages call the
    values; without them, the same names.

    Raises:
        SpecRankError, UnknownAxisError, DuplicateAxisError: a `jhost.shard` that does
            not fit its value or the mesh.
        NoMeshError: a `jhost.shard` where there is no mesh.
        UnsupportedError: what a program cannot hold.
        StreamConflictError: two streams on different dims of one value.
    """
    named = dict(zip(param_names, flat.invars, strict=True))
    # Of the equations as the user wrote them: rules may want others in their place.
    check_supported(name, mesh.shape, named, flat.eqns)
    flat = dataclasses.replace(flat, eqns=tuple(map(for_parts, flat.eqns)))
    flat = with_shifts(with_rows(without_transposes(flat)))
    flat = with_own_padding(flat)
    said = display_names or DisplayNames(param_names, result_names)
    by_result = dict(zip(flat.outvars, result_names, strict=True))
    builder = _Builder(flat, name, mesh, by_result, said, flatten)
    params = builder.params(flat.invars, param_names)
    builder.given = {param.name for param in params} if is_body else set()
    for eqn in flat.eqns:
        builder.equation(eqn)
    # Once all is built: of a barrier only the pieces that are read have values.
    for pieces in flat.barriers:
        builder.barrier(pieces)
    results = builder.results(flat.outvars, result_names)
    # All of them are known by now, and one error has them all, as `jax.shard_map`'s
    # has.
    raise_problems(f"jhost.shard in {name}", builder.problems)
    return Program(
        name=name,
        mesh=mesh,
        params=params,
        results=results,
        body=tuple(builder.body),
        is_body=is_body,
        marks=on_narrower([*builder.marks.values()], builder.body, results),
        remarks=tuple(builder.remarks),
        display_names=builder.display_names,
    )


class _Builder(Markers):
    """A statement for each equation, unless it is a marker."""

    def __init__(
        self,
        flat: FlatJaxpr,
        name: str,
        mesh: AbstractMesh,
        result_names: Mapping[Var, str],
        display_names: DisplayNames,
        flatten: Flatten,
    ) -> None:
        super().__init__(flat, mesh, result_names, display_names)
        self.name = name
        self.said = display_names
        self.flatten = flatten

    def equation(self, eqn: JaxprEqn) -> None:
        marker = MARKERS.get(eqn.primitive.name)
        if marker is not None:
            self.buffers[eqn.outvars[0]] = marker(self, eqn)
        elif has_programs(eqn):
            self.control_flow(eqn)
        else:
            self.compute(eqn)

    def compute(self, eqn: JaxprEqn) -> None:
        """A unit of its own for `eqn`, with a variable for each operand it reads."""
        own, read = with_own_operands(eqn)
        rule = constant_rule(eqn) or rule_of(eqn)
        unit_eqn = ir.UnitEqn(eqn=own, rule=rule, axes=((),) * len(rule.sizes))
        if rule.opaque and any(eqn.outvars):
            self.remark_opaque(eqn, rule)
        unit = ir.Unit(
            name=self.names.fresh(eqn.primitive.name),
            eqns=(unit_eqn,),
            invars=tuple(read),
            outvars=tuple(eqn.outvars),
        )
        ins = tuple(self.buffers[v] for v in read.values())
        outs = tuple(self.define(var) for var in eqn.outvars)
        self.body.append(ir.Compute(unit=unit, ins=ins, outs=outs))
        if moves_memory(eqn):  # a loop would put its chunks together in one memory
            self.marks |= {
                (SerialMark, b.name): SerialMark(buffer=b.name, reason=_MOVED)
                for b in outs
            }

    def control_flow(self, eqn: JaxprEqn) -> None:
        ins = [self.buffers[as_var(atom)] for atom in eqn.invars]
        names = out_names(eqn)
        outs = [
            self.define(var, self.result_names.get(var, name))
            for var, name in zip(eqn.outvars, names, strict=True)
        ]
        build_body = functools.partial(self.body_program, eqn)
        stmt = control_flow(eqn, ins, outs, build_body)
        self.body.append(stmt)
        for var, name in zip(eqn.outvars, names_of_results(stmt), strict=True):
            self.name_result(var, name)

    def body_program(
        self, eqn: JaxprEqn, jaxpr: Any, what: str, ins: Sequence[ir.Buffer]
    ) -> Program:
        """The program of a body of `eqn` on such values, with marks of its own."""
        outside = [self.display_names[buffer.name] for buffer in ins]
        # JAX names the operands of a body after its Python function, where that has
        # names.
        own = arg_names(jaxpr) or [""] * len(ins)
        carried = carried_params(eqn, what)
        said = [
            other if other in self.said.paths and number not in carried else name
            for number, (name, other) in enumerate(zip(own, outside, strict=True))
        ]
        said = [name or other for name, other in zip(said, outside, strict=True)]
        return build(
            self.flatten(jaxpr, eqn),
            name=f"{self.name}.{what}",
            mesh=self.mesh,
            param_names=param_names(jaxpr),
            result_names=["y"] * len(jaxpr.out_avals),
            display_names=self.said._replace(
                params=said, results=[None] * len(jaxpr.out_avals)
            ),
            is_body=True,
            flatten=self.flatten,
        )

    def remark_opaque(self, eqn: JaxprEqn, rule: DimRule) -> None:
        primitive = eqn.primitive.name
        text = f"{primitive} works on whole arrays: {reason_of(eqn, rule)}"
        self.remarks.append(Note(form=text, where=source_line(eqn)))


def constant_rule(eqn: JaxprEqn) -> DimRule | None:
    """The rule of an equation that reads a literal array, which every device has."""
    # No factors, for a literal has no layout; and no remark, for nothing moves.
    if any(isinstance(v, Literal) and shape_of(v) for v in eqn.invars):
        return dataclasses.replace(without_factors(eqn), opaque=False)
    return None
