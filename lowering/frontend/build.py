"""From a flat jaxpr to the first Host IR program: a statement an equation.

The program is that of one device, with global shapes.  `jhost.stream`, `jhost.serial`
and `jhost.shard` leave it as marks on buffers, which later passes take up.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, NamedSharding

from jhost import errors
from jhost._annotate import spec_entries
from jhost._jax import arg_names, aval_of, fresh_var, source_line
from jhost._primitives import Spec
from jhost.lowering.frontend.control_flow import (
    control_flow,
    has_programs,
    out_names,
    param_names,
)
from jhost.lowering.frontend.inline_calls import FlatJaxpr, inline_calls
from jhost.lowering.frontend.specs import Problem, check_spec, raise_problems
from jhost.lowering.frontend.unsupported import check_supported
from jhost.lowering.frontend.value_names import Variables, handed_on, value_names
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.marks import (
    BarrierMark,
    Mark,
    SerialMark,
    ShardMark,
    StreamRequest,
)
from jhost.lowering.ir.names import Names
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.requests import merge_marks
from jhost.lowering.rules.dim_rule import DimRule, shape_of, without_factors
from jhost.lowering.rules.elementwise import moves_memory
from jhost.lowering.rules.table import reason_of, rule_of

_MOVED = "a move to other memory"


def build(
    flat: FlatJaxpr,
    *,
    name: str,
    mesh: AbstractMesh,
    param_names: Sequence[str],
    result_names: Sequence[str],
    said_names: SaidNames | None = None,
    is_body: bool = False,
) -> Program:
    """The straight-line program of `flat`, with its marks, and those of its bodies.

    `said_names` are what messages call the values: the same names, if there are none.

    Raises:
        SpecRankError, UnknownAxisError, DuplicateAxisError: a `jhost.shard` that does
            not fit its value or the mesh.
        NoMeshError: a `jhost.shard` where there is no mesh.
        UnsupportedError: what a program cannot hold.
        StreamConflictError: two streams on different dims of one value.
    """
    named = dict(zip(param_names, flat.invars, strict=True))
    check_supported(name, mesh.shape, named, flat.eqns)
    said = said_names or SaidNames(param_names, result_names)
    builder = _Builder(
        flat, name, mesh, dict(zip(flat.outvars, result_names, strict=True)), said
    )
    params = builder.params(flat.invars, param_names)
    builder.given = {param.name for param in params} if is_body else set()
    for eqn in flat.eqns:
        builder.equation(eqn)
    for pieces in flat.barriers:
        builder.barrier(pieces)
    results = builder.results(flat.outvars, result_names)
    raise_problems(f"jhost.shard in {name}", builder.problems)
    return Program(
        name=name,
        mesh=mesh,
        params=params,
        results=results,
        body=tuple(builder.body),
        marks=tuple(builder.marks.values()),
        remarks=tuple(builder.remarks),
        said=builder.said,
    )


class SaidNames(NamedTuple):
    """What messages call params and results; None where a result has no own name.

    Which of the user's `variables` name the values between, `value_names` says.
    """

    params: Sequence[str]
    results: Sequence[str | None]
    variables: Variables = "all"

    def of(self, flat: FlatJaxpr) -> dict[Var, str]:
        """Each value's name."""
        params = dict(zip(flat.invars, self.params, strict=True))
        results = zip(flat.outvars, self.results, strict=True)
        known = {var: name for var, name in results if name}
        names = value_names(flat.eqns, params, self.variables)
        return names | handed_on(flat.eqns, known) | params


class _Builder:
    def __init__(
        self,
        flat: FlatJaxpr,
        name: str,
        mesh: AbstractMesh,
        result_names: Mapping[Var, str],
        said_names: SaidNames,
    ) -> None:
        self.name = name
        self.mesh = mesh
        self.mesh_shape = {axis: n for axis, n in mesh.shape.items() if n > 1}
        self.names = Names()
        self.body: list[ir.Stmt] = []
        self.marks: dict[tuple[type[Mark], str], Mark] = {}
        self.remarks: list[Note] = []
        self.problems: list[tuple[str, Problem]] = []
        self.buffers: dict[Var, ir.Buffer] = {}
        self.taken: set[str] = set()
        # What a body is given is laid out as outside: a weight of which a body wants
        # more than a device has is gathered in each iteration, not whole before.
        self.given: set[str] = set()
        self.reads = _Reads(flat)
        self.result_names = handed_on(flat.eqns, result_names)
        self.value_names = said_names.of(flat)
        self.variables: Variables = said_names.variables
        self.said: dict[str, str] = {}
        self.markers: dict[str, Callable[[JaxprEqn], ir.Buffer]] = {
            "copy": self.copy,
            "stream": self.stream,
            "serial": self.serial,
            "shard": self.shard,
            "sharding_constraint": self.sharding_constraint,
        }

    # --- Values --------------------------------------------------------------- #

    def params(
        self, invars: Sequence[Var], names: Sequence[str]
    ) -> tuple[ir.Buffer, ...]:
        pairs = zip(invars, names, strict=True)
        params = tuple(self.define(var, name) for var, name in pairs)
        self.taken.update(buffer.name for buffer in params)
        return params

    def results(
        self, outvars: Sequence[Var], names: Sequence[str]
    ) -> tuple[ir.Buffer, ...]:
        """The result buffers: each its own, and none a parameter's."""
        results: list[ir.Buffer] = []
        for var, name in zip(outvars, names, strict=True):
            buffer = self.buffers[var]
            if buffer.name in self.taken:
                buffer = self.set(buffer, var, name)
            self.taken.add(buffer.name)
            results.append(buffer)
        return tuple(results)

    def define(self, var: Var, name: str | None = None) -> ir.Buffer:
        self.buffers[var] = self.buffer(var, aval_of(var), name)
        return self.buffers[var]

    def buffer(self, var: Var, aval: Any, name: str | None) -> ir.Buffer:
        buffer = ir.Buffer(
            name=self.names.fresh(name or self.result_names.get(var, "v")),
            shape=tuple(aval.shape),
            dtype=aval.dtype,
            dims=(ir.Dim(),) * len(aval.shape),
        )
        self.said[buffer.name] = self.value_names[var]
        return buffer

    def set(self, source: ir.Buffer, var: Var, name: str | None = None) -> ir.Buffer:
        """A copy of `source`: a value with a layout and a stream of its own."""
        out = self.buffer(var, source, name)
        self.body.append(ir.Set(out=out, source=source))
        return out

    # --- Equations ------------------------------------------------------------ #

    def equation(self, eqn: JaxprEqn) -> None:
        marker = self.markers.get(eqn.primitive.name)
        if marker is not None:
            self.buffers[eqn.outvars[0]] = marker(eqn)
        elif has_programs(eqn):
            self.control_flow(eqn)
        else:
            self.compute(eqn)

    def compute(self, eqn: JaxprEqn) -> None:
        """A unit of its own for `eqn`, with a variable for each operand it reads.

        An operand read twice gets two variables: it may be needed in two layouts.
        """
        invars = [
            v if isinstance(v, Literal) else fresh_var(v.aval) for v in eqn.invars
        ]
        rule = constant_rule(eqn) or rule_of(eqn)
        unit_eqn = ir.UnitEqn(
            eqn=eqn.replace(invars=invars), rule=rule, axes=((),) * len(rule.sizes)
        )
        if rule.opaque and any(eqn.outvars):
            self.remark_opaque(eqn, rule)
        unit = ir.Unit(
            name=self.names.fresh(eqn.primitive.name),
            eqns=(unit_eqn,),
            invars=tuple(v for v in invars if not isinstance(v, Literal)),
            outvars=tuple(eqn.outvars),
        )
        ins = tuple(self.buffers[v] for v in eqn.invars if not isinstance(v, Literal))
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
        self.body.append(control_flow(eqn, ins, outs, self.body_program))

    def body_program(self, jaxpr: Any, what: str, ins: Sequence[ir.Buffer]) -> Program:
        """The program of a body on such values, with marks of its own."""
        outside = (self.said[buffer.name] for buffer in ins)
        own = arg_names(jaxpr) or [""] * len(ins)
        said = [name or other for name, other in zip(own, outside, strict=True)]
        return build(
            inline_calls(jaxpr),
            name=f"{self.name}.{what}",
            mesh=self.mesh,
            param_names=param_names(jaxpr),
            result_names=["y"] * len(jaxpr.out_avals),
            said_names=SaidNames(said, [None] * len(jaxpr.out_avals), self.variables),
            is_body=True,
        )

    def remark_opaque(self, eqn: JaxprEqn, rule: DimRule) -> None:
        primitive = eqn.primitive.name
        text = f"{primitive} works on whole arrays: {reason_of(eqn, rule)}"
        self.remarks.append(Note(form=text, where=source_line(eqn)))

    # --- Markers -------------------------------------------------------------- #

    def copy(self, eqn: JaxprEqn) -> ir.Buffer:
        return self.set(self.operand(eqn), eqn.outvars[0])

    def stream(self, eqn: JaxprEqn) -> ir.Buffer:
        """Mark the value itself; a second mark may add to the first, not differ."""
        buffer, params = self.operand(eqn), eqn.params
        mark = StreamRequest(
            buffer=buffer.name,
            dim=params["axis"],
            chunks=params["chunks"],
            pipeline=params["pipeline"],
            lines=(source_line(eqn),),
        )
        first = self.marks.get((StreamRequest, buffer.name))
        if isinstance(first, StreamRequest):
            mark = self.agreed(buffer, first, mark)
        self.marks[StreamRequest, buffer.name] = mark
        return buffer

    def agreed(
        self, buffer: ir.Buffer, one: StreamRequest, other: StreamRequest
    ) -> StreamRequest:
        """One mark for two on the same value."""
        merged = merge_marks(one, other) if one.dim == other.dim else None
        if merged is None:
            raise errors.StreamConflictError(
                f"One value of shape {buffer.shape} has two streams that differ; it is "
                "cut along one dim, one way. Keep one of the marks, or put "
                "jhost.serial between.",
                [
                    f"axis={mark.dim}, chunks={mark.chunks}, pipeline={mark.pipeline} "
                    f"at {mark.where}"
                    for mark in (one, other)
                ],
            )
        return merged

    def serial(self, eqn: JaxprEqn) -> ir.Buffer:
        out = self.set(self.operand(eqn), eqn.outvars[0])
        self.marks[SerialMark, out.name] = SerialMark(buffer=out.name)
        return out

    def shard(self, eqn: JaxprEqn) -> ir.Buffer:
        """`jhost.shard`."""
        return self.constrain(eqn, eqn.params["spec"])

    def sharding_constraint(self, eqn: JaxprEqn) -> ir.Buffer:
        """The program with marks for the shardings of parameters and results."""
        sharding = eqn.params["sharding"]
        if not isinstance(sharding, NamedSharding):
            text = f"a sharding constraint is no NamedSharding: {sharding}"
            self.remarks.append(Note(form=text, where=source_line(eqn)))
            return self.operand(eqn)
        if self.mesh.shape and dict(sharding.mesh.shape) != dict(self.mesh.shape):
            raise errors.MeshMismatchError(
                "A sharding constraint is for another mesh than the function's. Use "
                "the function's mesh.",
                [
                    f"{sharding.mesh} at {source_line(eqn)}",
                    f"the function's: {self.mesh}",
                ],
            )
        entries = spec_entries(sharding)
        if entries and all(axes is None for axes in entries):
            return self.operand(eqn)
        rest = ((),) * (len(self.operand(eqn).shape) - len(entries))
        return self.constrain(eqn, (*entries, *rest))

    def constrain(self, eqn: JaxprEqn, spec: Spec) -> ir.Buffer:
        """Lay out the value itself where nothing else reads it, else a copy of it."""
        buffer, where = self.operand(eqn), source_line(eqn)
        if not self.mesh.shape:
            raise errors.NoMeshError(
                "jhost.shard needs a mesh: give one to jhost.jit(mesh=...), or call "
                "the function under jax.set_mesh.",
                [f"shape {buffer.shape} at {where}"],
            )
        name = f"value of shape {buffer.shape} at {where}"
        problems = check_spec(spec, buffer.shape, dict(self.mesh.shape), uneven=True)
        self.problems += [(name, problem) for problem in problems]
        # An axis of one device shards nothing.
        spec = tuple(
            None if axes is None else tuple(a for a in axes if a in self.mesh_shape)
            for axes in spec
        )
        there = self.marks.get((ShardMark, buffer.name))
        if isinstance(there, ShardMark) and there.spec == spec:
            return buffer
        read_again = self.reads[as_var(eqn.invars[0])] > 1
        if there is not None or read_again or buffer.name in self.given:
            buffer = self.set(buffer, eqn.outvars[0])
        mark = ShardMark(buffer=buffer.name, spec=spec, where=where)
        self.marks[ShardMark, buffer.name] = mark
        return buffer

    def barrier(self, pieces: Sequence[JaxprEqn]) -> None:
        """Mark what the pieces of a barrier make, as far as it is read."""
        operands = tuple(
            self.buffers[atom].name
            for eqn in pieces
            for atom in eqn.invars
            if not isinstance(atom, Literal) and atom in self.buffers
        )
        for var in (eqn.outvars[0] for eqn in pieces):
            if var in self.buffers:
                name = self.buffers[var].name
                mark = BarrierMark(buffer=name, operands=operands)
                self.marks[BarrierMark, name] = mark

    def operand(self, eqn: JaxprEqn) -> ir.Buffer:
        return self.buffers[as_var(eqn.invars[0])]


def constant_rule(eqn: JaxprEqn) -> DimRule | None:
    """The rule of an equation that reads a literal array, which every device has."""
    if any(isinstance(v, Literal) and shape_of(v) for v in eqn.invars):
        return dataclasses.replace(without_factors(eqn), opaque=False)
    return None


def as_var(atom: Var | Literal) -> Var:
    """`atom`, which an identity reads and `inline_calls` has made a variable."""
    assert isinstance(atom, Var)
    return atom


class _Reads:
    """How many equations and results read each value; a stream mark is no reader."""

    def __init__(self, flat: FlatJaxpr) -> None:
        self._marked: dict[Var, Var] = {}
        self._counts: Counter[Var] = Counter()
        for eqn in flat.eqns:
            variables = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
            if eqn.primitive.name == "stream":
                self._marked[eqn.outvars[0]] = self._value(variables[0])
            else:
                self._counts.update(map(self._value, variables))
        self._counts.update(map(self._value, flat.outvars))

    def _value(self, var: Var) -> Var:
        return self._marked.get(var, var)

    def __getitem__(self, var: Var) -> int:
        return self._counts[self._value(var)]
