"""Which values each device may have in an order of its own, as none asks for another.

Such a value is made and read by parts, and a device has each of them as much further on
as any other.  Or a contraction reads it whole, and reduces the dim: its steps may come
in any order, if the other operand has them in the same one.  A sum of floats that
several devices hold is the same on all, and so are its steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from fractions import Fraction
from typing import TypeAlias

import jax.numpy as jnp
from scipy.cluster.hierarchy import DisjointSet

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, programs
from jhost.lowering.ir.effects import touched
from jhost.lowering.ir.index import Rank, leaves
from jhost.lowering.ir.layout import layout_of, used_axes
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.ranks import Ranks

Name: TypeAlias = tuple[int, str]
"""A buffer's name, behind the identity of the program or body that has it."""

Dims: TypeAlias = Sequence[tuple[Name, int]]
"""Dims of values, counted from the last: they hold of what is stacked as well."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """By which part of a dim each device has a value further on than the first one."""

    dim: int
    by: tuple[Fraction, ...]
    axes: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Contraction:
    """The dims of each factor that it sums up, and the axes the sum is spread over."""

    reduced: Sequence[Dims]
    spread: AbstractSet[str]

    def takes(self, name: Name, turns: Mapping[Name, Turn]) -> bool:
        """Whether it may have an operand turned, and has the others turned alike."""
        turn = turns[name]
        if not turn.axes <= self.spread:
            return False
        return any(
            all(
                turns.get(other) == dataclasses.replace(turn, dim=dim)
                for other, dim in dims
            )
            for dims in self.reduced
            if (name, turn.dim) in dims
        )


@dataclasses.dataclass(slots=True)
class _Uses:
    """How a value is used: the parts of it that `Select`s show, and contractions."""

    parts: list[tuple[ir.Select, Mapping[str, int]]] = dataclasses.field(
        default_factory=list[tuple[ir.Select, Mapping[str, int]]]
    )
    contractions: list[_Contraction] = dataclasses.field(
        default_factory=list[_Contraction]
    )


def turned_values(program: Program) -> set[Name]:
    """The values of a program and its bodies that may be turned, and are."""
    values = _Values(program)
    turns = values.turns()
    while wrong := [name for name in turns if not values.agrees(name, turns)]:
        for name in wrong:
            for other in values.same.subset(name):
                turns.pop(other, None)
    return set(turns)


class _Values:
    """All values by name, and which are the `same`: stacked by a scan, and in its body.

    Of those in `whole` something touches more than parts, and is no contraction.
    """

    def __init__(self, program: Program) -> None:
        self.ranks = Ranks(program.mesh.shape)
        self.same: DisjointSet = DisjointSet()
        self.uses: dict[Name, _Uses] = {}
        self.whole: set[Name] = set()
        self.touch(id(program), (*program.params, *program.results))
        for each in programs(program):
            self.statements(id(each), each.body, {})

    def touch(self, here: int, buffers: Iterable[ir.Buffer]) -> None:
        self.whole |= {(here, buffer.name) for buffer in buffers}

    def of(self, here: int, buffer: ir.Buffer) -> _Uses:
        self.same.add((here, buffer.name))
        return self.uses.setdefault((here, buffer.name), _Uses())

    def statements(
        self, here: int, body: Sequence[ir.Stmt], loops: Mapping[str, int]
    ) -> None:
        for stmt in body:
            match stmt:
                case ir.Allocate() | ir.Deallocate():
                    pass
                case ir.Select(source=source, out=out):
                    self.touch(here, [out])  # an alias has no places of its own
                    self.of(here, source).parts.append((stmt, loops))
                case ir.For(index=index, extent=extent, body=inner):
                    self.statements(here, inner, {**loops, index: extent})
                case ir.If(then=then, otherwise=otherwise):
                    self.statements(here, (*then, *otherwise), loops)
                case ir.Scan():
                    self.scan(here, stmt)
                case ir.Compute() if _contracts(stmt):
                    self.contraction(here, stmt)
                case _:
                    self.touch(here, itertools.chain(*touched(stmt)))
                    for each in stmt.bodies if isinstance(stmt, CONTROL_FLOW) else ():
                        self.touch(id(each), (*each.params, *each.results))

    def scan(self, here: int, scan: ir.Scan) -> None:
        body, first, count = scan.body, len(scan.ins) - len(scan.xs), len(scan.carried)
        self.touch(here, (*scan.ins[:first], *scan.carried))
        self.touch(id(body), (*body.params[:first], *body.results[:count]))
        inside = (*body.params[first:], *body.results[count:])
        for one, other in zip(inside, (*scan.xs, *scan.ys), strict=True):
            self.of(id(body), one)
            self.of(here, other)
            self.same.merge((id(body), one.name), (here, other.name))

    def contraction(self, here: int, stmt: ir.Compute) -> None:
        self.touch(here, stmt.outs)
        reduced = [
            [((here, buffer.name), dim) for buffer, dim in dims]
            for dims in _reduced(stmt)
        ]
        (out,) = stmt.outs
        exact = jnp.issubdtype(out.dtype, jnp.integer)
        spread = self.ranks.sizes.keys() if exact else used_axes(layout_of(out))
        for buffer in stmt.ins:
            use = _Contraction(reduced, spread)
            self.of(here, buffer).contractions.append(use)

    # --- What may be turned --------------------------------------------------- #

    def turns(self) -> dict[Name, Turn]:
        """By how much each value is turned that has one turn, were all as they wish."""
        found: dict[Name, Turn] = {}
        for names in self.same.subsets():
            parts = [part for name in names for part in self.uses[name].parts]
            if names & self.whole or not any(_axes(select) for select, _ in parts):
                continue
            turns = set(itertools.chain(*(self.each_turn(*part) for part in parts)))
            if len(turns) == 1 and all(select.groups == 1 for select, _ in parts):
                found |= dict.fromkeys(names, turns.pop())
        return found

    def each_turn(self, select: ir.Select, loops: Mapping[str, int]) -> Iterator[Turn]:
        """In each iteration, how much further on a part is than on the first device."""
        extent = select.source.shape[select.dim]
        for numbers in itertools.product(*map(range, loops.values())):
            at = dict(zip(loops, numbers, strict=True))
            places = self.ranks.everywhere(self.ranks.value(select.index, at)).ravel()
            by = ((int(place) - int(places[0])) % extent for place in places)
            dim = select.dim - len(select.source.shape)
            yield Turn(dim, tuple(Fraction(n, extent) for n in by), _axes(select))

    def agrees(self, name: Name, turns: Mapping[Name, Turn]) -> bool:
        """Whether every contraction of a value takes it as it is turned."""
        return all(use.takes(name, turns) for use in self.uses[name].contractions)


def _axes(select: ir.Select) -> frozenset[str]:
    """The axes of the mesh along which devices have different parts."""
    ranks = (leaf for leaf in leaves(select.index) if isinstance(leaf, Rank))
    return frozenset(rank.axis for rank in ranks)


def _contracts(stmt: ir.Compute) -> bool:
    """Whether it is one contraction, of all that its operands have, and no kernel."""
    if stmt.chunk is not None or len(stmt.unit.eqns) != 1:
        return False
    rule = stmt.unit.eqns[0].rule
    return rule.contracts and rule.matmul is None


def _reduced(stmt: ir.Compute) -> list[list[tuple[ir.Buffer, int]]]:
    """For each factor that it reduces by sums, the dims of operands that have it."""
    (each,) = stmt.unit.eqns
    operands = dict(zip(map(id, stmt.unit.invars), stmt.ins, strict=True))
    reduced: dict[int, list[tuple[ir.Buffer, int]]] = {}
    for var, dims in zip(each.eqn.invars, each.rule.operands, strict=True):
        for number, dim in enumerate(dims):
            if dim is not None and each.rule.reducers[dim.factor] == "sum":
                place = operands[id(var)], number - len(dims)
                reduced.setdefault(dim.factor, []).append(place)
    return list(reduced.values())
