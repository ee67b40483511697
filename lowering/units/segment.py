"""Group computations into units: maximal convex runs between communications.

Communications stay alone.  Computations that work on the same chunk may merge, and a
predicate of the caller's says which of them do (nvFuser #4145).
Loop and stream statements are borders: the statements between two of them are segmented
by themselves.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias

from jax.extend.core import Literal, Var

from jhost._jax import fresh_var
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.graph import (
    Group,
    Node,
    ShouldMerge,
    merge_groups,
    nodes,
)
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.rules.dim_rule import Dims, shape_of


def merge_all(group: Group, joining: Group) -> bool:
    """The default: all computations on the same chunk merge."""
    del group, joining
    return True


def chunk_of(node: Node) -> tuple[ir.Chunk | None] | None:
    """The chunk that a computation works on; None for statements that stay alone."""
    stmt = node.stmt
    # A statement's reducer combines all its results.  In a merged statement it would
    # also combine results of the others, so an accumulating computation stays alone.
    if not isinstance(stmt, ir.Compute) or stmt.reducer:
        return None
    return (stmt.chunk,)


_UnitStatements: TypeAlias = tuple[Sequence[ir.Compute], Sequence[ir.Stmt]]
"""The computations of a group, and all its statements."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What candidates share, and the forms that their transfers may have.

    Attributes:
        groups: stretches and their groups, by the identities of their statements.
        units: computations and what they were merged into, by their identities and by
            the values that others read.
    """

    groups: dict[
        tuple[int, ...], tuple[Sequence[ir.Stmt], Sequence[_UnitStatements]]
    ] = dataclasses.field(default_factory=dict[Any, Any])
    units: dict[
        tuple[tuple[int, ...], tuple[str, ...]],
        tuple[Sequence[ir.Compute], ir.Compute],
    ] = dataclasses.field(default_factory=dict[Any, Any])


@dataclasses.dataclass(frozen=True, slots=True)
class Segment(EachProgram):
    """Computations of one equation -> units of all that the predicate lets merge."""

    name: ClassVar[str] = "segment"

    should_merge: ShouldMerge = merge_all
    known: _Known = dataclasses.field(default_factory=_Known, compare=False, repr=False)

    def change(self, program: Program) -> Program:
        segmenter = _Segmenter(program, self.should_merge, self.known)
        return dataclasses.replace(program, body=segmenter.body(program.body))


class _Segmenter:
    def __init__(
        self, program: Program, should_merge: ShouldMerge, known: _Known
    ) -> None:
        self.should_merge = should_merge
        self.known = known
        self.names = FreshNames()
        self.kept = {result.name for result in program.results}
        self.reads: Counter[str] = Counter()
        every = ir.walk(program.body)
        loops = {id(stmt) for stmt in ir.every(ir.For, every)}
        # A loop's statements come by themselves.
        reads = [reads_writes(stmt)[0] for stmt in every if id(stmt) not in loops]
        self.reads.update([buffer.name for buffers in reads for buffer in buffers])
        # A value written through an alias or into an allocation is never local.
        self.kept |= {stmt.out.name for stmt in ir.every(ir.Select, every)}
        self.kept |= {stmt.buffer.name for stmt in ir.every(ir.Allocate, every)}

    def body(self, body: Sequence[ir.Stmt]) -> tuple[ir.Stmt, ...]:
        return tuple(self.stretches(body))

    def stretches(self, body: Sequence[ir.Stmt]) -> Iterator[ir.Stmt]:
        """`body` with each stretch between borders segmented."""
        stretch: list[ir.Stmt] = []
        for stmt in body:
            match stmt:
                case ir.GetCurrentStream() | ir.SetCurrentStream() | ir.Synchronize():
                    yield from self.stretch(stretch)
                    stretch = []
                    yield stmt
                case _:
                    stretch.append(stmt)
        yield from self.stretch(stretch)

    def stretch(self, stmts: Sequence[ir.Stmt]) -> Iterator[ir.Stmt]:
        # A loop is one node of the stretch; its body has stretches of its own.
        loops = {
            id(stmt): dataclasses.replace(stmt, body=self.body(stmt.body))
            for stmt in stmts
            if isinstance(stmt, ir.For)
        }
        if len(stmts) < 2:  # the most frequent case in loops
            yield from (loops.get(id(stmt), stmt) for stmt in stmts)
            return
        for computes, every in self.groups(stmts):
            if len(computes) > 1:
                yield self.named(computes)
            else:
                yield from (loops.get(id(stmt), stmt) for stmt in every)

    def groups(self, stmts: Sequence[ir.Stmt]) -> Sequence[_UnitStatements]:
        """The groups of a stretch: the computations of each, and all its statements."""
        key = tuple(map(id, stmts))
        if key not in self.known.groups:
            graph = nodes(stmts)
            merged = merge_groups(graph, graph.before, self.should_merge, chunk_of)
            every = [
                [stmt for node in group for stmt in node.stmts] for group in merged
            ]
            computes = [
                [s for s in each if isinstance(s, ir.Compute)] for each in every
            ]
            found = list(zip(computes, every, strict=True))
            # With the statements, so that no others get their identities.
            self.known.groups[key] = stmts, found
        return self.known.groups[key][1]

    def named(self, computes: Sequence[ir.Compute]) -> ir.Compute:
        """One computation that does what `computes` do, with the next unit's name."""
        made = [buffer.name for compute in computes for buffer in compute.outs]
        reads = Counter(buffer.name for compute in computes for buffer in compute.ins)
        # A value that only this unit reads becomes a variable without a buffer.
        left = tuple(
            name for name in made if name in self.kept or self.reads[name] > reads[name]
        )
        key = tuple(map(id, computes)), left
        if key not in self.known.units:
            self.known.units[key] = computes, self.merged(computes, left)
        _, merged = self.known.units[key]
        unit = merged.unit.named(self.names.fresh("unit"))
        return dataclasses.replace(merged, unit=unit)

    def merged(
        self, computes: Sequence[ir.Compute], left: Container[str]
    ) -> ir.Compute:
        """One computation of all that `computes` do; its results are those `left`."""
        made = {buffer.name for compute in computes for buffer in compute.outs}
        ins = {b.name: b for c in computes for b in c.ins if b.name not in made}
        variables = _variables(computes)
        eqns = [eqn for compute in computes for eqn in _renamed(compute, variables)]
        outs = [b for compute in computes for b in compute.outs if b.name in left]
        unit = ir.Unit(
            name="unit",
            eqns=tuple(eqns),
            invars=tuple(variables[name] for name in ins),
            outvars=tuple(variables[buffer.name] for buffer in outs),
        )
        # All work on one chunk and none has a reducer, so the first one's fields hold
        # for all.
        first = computes[0]
        return dataclasses.replace(
            first, unit=unit, ins=tuple(ins.values()), outs=tuple(outs)
        )


def _variables(computes: Sequence[ir.Compute]) -> dict[str, Var]:
    """A variable of the unit for each buffer that `computes` touch, by its name."""
    found: dict[str, list[tuple[Var, Dims]]] = {}
    for compute in computes:
        mapped = _mapped(compute)
        for buffer, var in _values_of(compute):
            found.setdefault(buffer.name, []).append((var, mapped.get(var, ())))
    taken: set[Var] = set()
    variables: dict[str, Var] = {}
    for name, each in found.items():
        var = _widest(each)
        variables[name] = fresh_var(var.aval) if var in taken else var
        taken.add(var)
    return variables


def _widest(found: Sequence[tuple[Var, Dims]]) -> Var:
    """The variable with the largest shape, of the variables for one buffer.

    The user's equations have variables with global shapes.  Equations that passes made,
    such as barriers and sums of terms, have variables with a device's shape.  Rules
    need the global one.  But an equation with a device's shape may have no factor for a
    dim, for example where it pads the dim.  Then its size counts.
    """
    widest = found[0][0]
    shapes = {shape_of(var) for var, _ in found} if len(found) > 1 else ()
    if len(shapes) < 2:
        return widest
    for var, _ in found:
        if _is_larger(var, widest):
            widest = var
    for var, dims in found:
        sizes = zip(dims, shape_of(var), shape_of(widest), strict=False)
        if any(dim is None and here < whole for dim, here, whole in sizes):
            return var
    return widest


def _is_larger(var: Var, than: Var) -> bool:
    return any(n > m for n, m in zip(shape_of(var), shape_of(than), strict=True))


def _mapped(compute: ir.Compute) -> dict[Var, Dims]:
    """The map of each variable of a computation: the factors that its dims follow."""
    return {
        var: dims
        for eqn in compute.unit.eqns
        for var, dims in zip(
            (*eqn.eqn.invars, *eqn.eqn.outvars),
            (*eqn.rule.operands, *eqn.rule.results),
            strict=True,
        )
        if isinstance(var, Var)
    }


def _values_of(compute: ir.Compute) -> Iterator[tuple[ir.Buffer, Var]]:
    yield from zip(compute.ins, compute.unit.invars, strict=True)
    yield from zip(compute.outs, compute.unit.outvars, strict=True)


def _renamed(compute: ir.Compute, variables: dict[str, Var]) -> Iterator[ir.UnitEqn]:
    """The equations of `compute` on the variables that its buffers have in the unit."""
    renamed = {var: variables[buffer.name] for buffer, var in _values_of(compute)}
    for unit_eqn in compute.unit.eqns:
        eqn = unit_eqn.eqn
        invars = [
            v if isinstance(v, Literal) else renamed.get(v, v) for v in eqn.invars
        ]
        outvars = [renamed.get(v, v) for v in eqn.outvars]
        if _same((*invars, *outvars), (*eqn.invars, *eqn.outvars)):
            yield unit_eqn
            continue
        eqn = eqn.replace(invars=invars, outvars=outvars)
        yield dataclasses.replace(unit_eqn, eqn=eqn)


def _same(variables: Sequence[object], others: Sequence[object]) -> bool:
    return all(map(operator.is_, variables, others))
