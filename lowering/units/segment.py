"""Group computations into units: maximal convex runs between communications.

The merge rule is a predicate that the caller hands in (nvFuser #4145); the default
keeps communications alone and merges every computation that works on the same chunk.
Loop and stream statements are borders: what stands between two of them is segmented
on its own.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jax.extend.core import JaxprEqn, Literal, Var

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import EachProgram
from jhost.lowering.ir.effects import touched
from jhost.lowering.ir.graph import (
    Group,
    ShouldMerge,
    dependencies,
    merge_groups,
    nodes,
)
from jhost.lowering.ir.names import Names
from jhost.lowering.ir.program import Program


def merge_computations(one: Group, other: Group) -> bool:
    """The default: computations on the same chunk merge, nothing else does."""
    first, second = one[0].stmt, other[0].stmt  # the others of each are alike
    if not (isinstance(first, ir.Compute) and isinstance(second, ir.Compute)):
        return False
    return first.chunk == second.chunk and not (first.reducer or second.reducer)


@dataclasses.dataclass(frozen=True, slots=True)
class Segment(EachProgram):
    """Computations of one equation -> units of as many as the predicate lets merge."""

    name: ClassVar[str] = "segment"

    should_merge: ShouldMerge = merge_computations

    def change(self, program: Program) -> Program:
        segmenter = _Segmenter(program, self.should_merge)
        return dataclasses.replace(program, body=segmenter.body(program.body))


class _Segmenter:
    def __init__(self, program: Program, should_merge: ShouldMerge) -> None:
        self.should_merge = should_merge
        self.names = Names()
        self.kept = {result.name for result in program.results}
        self.reads: Counter[str] = Counter()
        for stmt in ir.walk(program.body):
            if isinstance(stmt, ir.For | ir.If):
                continue
            self.reads.update(buffer.name for buffer in touched(stmt)[0])
            # What is written through an alias or into an allocation is never local.
            if isinstance(stmt, ir.Select):
                self.kept.add(stmt.out.name)
            elif isinstance(stmt, ir.Allocate):
                self.kept.add(stmt.buffer.name)

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
                case ir.For():
                    stretch.append(dataclasses.replace(stmt, body=self.body(stmt.body)))
                case _:
                    stretch.append(stmt)
        yield from self.stretch(stretch)

    def stretch(self, stmts: Sequence[ir.Stmt]) -> Iterator[ir.Stmt]:
        graph = nodes(stmts)
        for group in merge_groups(graph, dependencies(graph), self.should_merge):
            computes = [
                node.stmt for node in group if isinstance(node.stmt, ir.Compute)
            ]
            if len(computes) > 1:
                yield self.merged(computes)
            else:
                yield from (stmt for node in group for stmt in node.stmts)

    def merged(self, computes: Sequence[ir.Compute]) -> ir.Compute:
        """One computation that does what `computes` do, in their order."""
        made = {
            b.name: v
            for c in computes
            for b, v in zip(c.outs, c.unit.outvars, strict=True)
        }
        reads = Counter(buffer.name for compute in computes for buffer in compute.ins)
        variables = dict(made)
        eqns: list[ir.UnitEqn] = []
        ins = {}
        for compute in computes:
            for buffer, var in zip(compute.ins, compute.unit.invars, strict=True):
                variables.setdefault(buffer.name, var)
                if buffer.name not in made:
                    ins[buffer.name] = buffer
            eqns += _renamed(compute, variables)
        outs = [
            buffer
            for compute in computes
            for buffer in compute.outs
            if buffer.name in self.kept or self.reads[buffer.name] > reads[buffer.name]
        ]
        unit = ir.Unit(
            name=self.names.fresh("unit"),
            eqns=tuple(eqns),
            invars=tuple(variables[name] for name in ins),
            outvars=tuple(made[buffer.name] for buffer in outs),
        )
        first = computes[0]
        return dataclasses.replace(
            first, unit=unit, ins=tuple(ins.values()), outs=tuple(outs)
        )


def _renamed(compute: ir.Compute, variables: dict[str, Var]) -> Iterator[ir.UnitEqn]:
    """The equations of `compute` on the variables that its buffers have in the unit."""
    pairs = zip(compute.ins, compute.unit.invars, strict=True)
    renamed = {var: variables[buffer.name] for buffer, var in pairs}
    for unit_eqn in compute.unit.eqns:
        eqn = _with_invars(unit_eqn.eqn, renamed)
        yield dataclasses.replace(unit_eqn, eqn=eqn)


def _with_invars(eqn: JaxprEqn, renamed: dict[Var, Var]) -> JaxprEqn:
    invars = [v if isinstance(v, Literal) else renamed.get(v, v) for v in eqn.invars]
    return eqn.replace(invars=invars)
