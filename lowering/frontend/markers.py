"""The marks that `jhost.stream`, `jhost.serial` and `jhost.shard` leave on buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, NamedSharding

from jhost import errors
from jhost._annotate import spec_entries
from jhost._jax import source_line
from jhost._primitives import Spec
from jhost.lowering.frontend.inline_calls import FlatJaxpr
from jhost.lowering.frontend.specs import SpecProblem, check_spec
from jhost.lowering.frontend.values import DisplayNames, Values, as_var
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.marks import (
    BarrierMark,
    Mark,
    SerialMark,
    ShardMark,
    StreamRequest,
)
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.requests import merge_marks


class Markers(Values):
    """Values with their marks, and the problems of these marks."""

    def __init__(
        self,
        flat: FlatJaxpr,
        mesh: AbstractMesh,
        result_names: Mapping[Var, str],
        display_names: DisplayNames,
    ) -> None:
        super().__init__(flat, result_names, display_names)
        self.mesh = mesh
        self.mesh_shape = {axis: n for axis, n in mesh.shape.items() if n > 1}
        self.marks: dict[tuple[type[Mark], str], Mark] = {}
        self.remarks: list[Note] = []
        self.problems: list[tuple[str, SpecProblem]] = []
        # What a body is given is laid out as outside: if a body wants more of a weight
        # than a device has, each iteration gathers it, and nothing gathers it whole
        # before.
        self.given: set[str] = set()
        self.reads = _ReadCounts(flat)

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
            wished=params.get("wished", ()),
        )
        first = self.marks.get((StreamRequest, buffer.name))
        if isinstance(first, StreamRequest):
            mark = self.agreed(buffer, first, mark)
        self.marks[StreamRequest, buffer.name] = mark
        return buffer

    def agreed(
        self, buffer: ir.Buffer, first: StreamRequest, second: StreamRequest
    ) -> StreamRequest:
        """One mark for two on the same value."""
        merged = merge_marks(first, second) if first.dim == second.dim else None
        if merged is None:
            raise errors.StreamConflictError(
                f"Two marks ask for different streams of one value of shape "
                f"{buffer.shape}. Keep one of them, or put jhost.serial between them.",
                [
                    f"axis={mark.dim}, chunks={mark.chunks}, pipeline={mark.pipeline} "
                    f"at {mark.where}"
                    for mark in (first, second)
                ],
            )
        return merged

    def serial(self, eqn: JaxprEqn) -> ir.Buffer:
        out = self.set(self.operand(eqn), eqn.outvars[0])
        # On a copy: the value itself may be in a stream, which ends here.
        self.marks[SerialMark, out.name] = SerialMark(buffer=out.name)
        return out

    def shard(self, eqn: JaxprEqn) -> ir.Buffer:
        """`jhost.shard`."""
        return self.constrain(eqn, eqn.params["spec"])

    def sharding_constraint(self, eqn: JaxprEqn) -> ir.Buffer:
        """The program with marks for the shardings of parameters and results."""
        sharding = eqn.params["sharding"]
        if not isinstance(sharding, NamedSharding):
            # Only a `NamedSharding` names axes, which layouts are made of.
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
        # Such a constraint says on which devices a value is, and leaves all dims free.
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
        # A layer that is called twice constrains its weight twice, alike.
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


MARKERS: Mapping[str, Callable[[Markers, JaxprEqn], ir.Buffer]] = {
    "copy": Markers.copy,
    "stream": Markers.stream,
    "serial": Markers.serial,
    "shard": Markers.shard,
    "sharding_constraint": Markers.sharding_constraint,
}
"""What takes up the equations of each marker."""


class _ReadCounts:
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
