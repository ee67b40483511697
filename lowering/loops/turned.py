"""Which values each device may hold in a rotated order of its own.

A value qualifies if nothing asks for the order of position.

- It is made and read in parts, and a device has every part the same distance further on
  than the first device has it.
- Or whole-array work reads it for which the place of a step means nothing.  The result
  is then rotated as the operands are.
- A contraction may reduce the rotated dim, because its steps come in any order, as long
  as the other operand has the same one.  An exception is a sum of floats that several
  devices hold: it must have the same bits on all, so its steps need one order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set as AbstractSet,
)
from fractions import Fraction
from typing import TypeAlias

import jax.numpy as jnp
from scipy.cluster.hierarchy import DisjointSet

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, programs, statements
from jhost.lowering.ir.effects import touched
from jhost.lowering.ir.index import Rank, leaves
from jhost.lowering.ir.layout import layout_of, used_axes
from jhost.lowering.ir.operation import operand_maps
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.rules.dim_rule import Window

Name: TypeAlias = tuple[int, str]
"""A buffer's name, behind the identity of the program or body that has it."""

Dims: TypeAlias = Sequence[tuple[Name, int]]
"""Dims of values, counted from the last: they hold of what is stacked as well."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """How far each device has a value rotated, as a part of a dim."""

    dim: int
    by: tuple[Fraction, ...]
    axes: frozenset[str]

    def along(self, dim: int) -> Turn:
        """The same of another dim."""
        return dataclasses.replace(self, dim=dim)


@dataclasses.dataclass(frozen=True, slots=True)
class _Factor:
    """The dims of values that one factor of a computation of whole arrays follows.

    The factor cuts each dim into `steps`.  Dims of a `parallel` factor are turned alike
    or not at all.  The steps of a sum may come in any order along axes that the sum is
    `spread` over, as each device has a sum of its own there.  Others need the order.
    """

    dims: Dims
    steps: int
    parallel: bool = False
    spread: frozenset[str] = frozenset()

    def takes(self, turn: Turn, turns: Mapping[Name, Turn]) -> bool:
        """Whether values may be turned so along these dims, and are."""
        free = self.parallel or turn.axes <= self.spread
        whole = all((self.steps * by).denominator == 1 for by in turn.by)
        alike = (turns.get(name) == turn.along(dim) for name, dim in self.dims)
        return free and whole and all(alike)


_Factors: TypeAlias = Callable[[], Sequence[_Factor]]


@dataclasses.dataclass(slots=True)
class _Uses:
    """How a value is used: the parts that `Select`s show, and computations of all.

    The factors of a computation are found out when they are asked for.
    """

    parts: list[tuple[ir.Select, Mapping[str, int]]] = dataclasses.field(
        default_factory=list[tuple[ir.Select, Mapping[str, int]]]
    )
    computations: list[_Factors] = dataclasses.field(default_factory=list[_Factors])


def turned_values(program: Program) -> set[Name]:
    """The values of a program and its bodies that may be turned, and are."""
    if not any(isinstance(s, ir.Select) and _axes(s) for s in statements(program)):
        return set()
    values = _Values(program)
    turns = values.turns()
    waiting = [*turns]
    while waiting:
        name = waiting.pop()
        # One that does not fit is dropped, and all that share work with it are asked
        # again, until those that are left agree.
        if name in turns and not values.agrees(name, turns):
            for other in values.same.subset(name):
                turns.pop(other, None)
                waiting += values.beside(other)
    return set(turns)


class _Values:
    """All values by name, and which are the `same`: stacked by a scan, and in its body.

    Something touches all of those in `whole`, by no factor that is known.
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
                case ir.Scan():
                    self.scan(here, stmt)
                case ir.Compute() if _is_known(stmt):
                    found = functools.partial(_factors, here, stmt, self.ranks)
                    self.computation(here, stmt, found)
                case ir.Set():
                    found = functools.partial(_dims_alike, here, stmt)
                    self.computation(here, stmt, found)
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
            iterations = _Factor([((here, other.name), -len(other.shape))], scan.length)
            self.of(here, other).computations.append(
                functools.partial(list, [iterations])
            )
            self.same.merge((id(body), one.name), (here, other.name))

    def computation(
        self, here: int, stmt: ir.Compute | ir.Set, found: _Factors
    ) -> None:
        factors = functools.cache(found)
        for buffer in itertools.chain(*touched(stmt)):
            self.of(here, buffer).computations.append(factors)

    # --- What may be turned --------------------------------------------------- #

    def turns(self) -> dict[Name, Turn]:
        """The turn of each value that has one, if all could be as they wish."""
        found: dict[Name, Turn] = {}
        for names in self.same.subsets():
            parts = [part for name in names for part in self.uses[name].parts]
            if names & self.whole or not any(_axes(select) for select, _ in parts):
                continue
            turns = set(itertools.chain(*(self.each_turn(*part) for part in parts)))
            # Loops that rotate a value differently leave it in order of position.
            if len(turns) == 1 and all(select.groups == 1 for select, _ in parts):
                found |= dict.fromkeys(names, turns.pop())
        self.hand_on(found)
        return found

    def hand_on(self, turns: dict[Name, Turn]) -> None:
        """Turn what is made of turned values, or makes them, and has no parts."""
        waiting = [*turns]
        while waiting:
            name = waiting.pop()
            for factor in self.factors(name):
                if factor.parallel and (name, turns[name].dim) in factor.dims:
                    for other, dim in factor.dims:
                        names = self.same.subset(other)
                        if other not in turns and self.follows(names):
                            turns |= dict.fromkeys(names, turns[name].along(dim))
                            waiting += names

    def follows(self, names: AbstractSet[Name]) -> bool:
        """Whether a value has the places that what it is made with has."""
        parts = any(self.uses[name].parts for name in names)
        return not (parts or names & self.whole)

    def each_turn(self, select: ir.Select, loops: Mapping[str, int]) -> Iterator[Turn]:
        """How far a part is rotated from the first device's, in each iteration."""
        extent = select.source.shape[select.dim]
        # Evaluated in every iteration on every rank: loops are short, and no algebra
        # has to show that two expressions are equal.
        for numbers in itertools.product(*map(range, loops.values())):
            at = dict(zip(loops, numbers, strict=True))
            places = self.ranks.everywhere(self.ranks.value(select.index, at)).ravel()
            by = ((int(place) - int(places[0])) % extent for place in places)
            dim = select.dim - len(select.source.shape)
            yield Turn(dim, tuple(Fraction(n, extent) for n in by), _axes(select))

    def agrees(self, name: Name, turns: Mapping[Name, Turn]) -> bool:
        """Whether every computation takes a value as it is turned."""
        place = name, turns[name].dim
        return all(
            factor.takes(turns[name], turns)
            for factor in self.factors(name)
            if place in factor.dims
        )

    def beside(self, name: Name) -> set[Name]:
        """The values that share a factor with a value in some computation."""
        return {other for factor in self.factors(name) for other, _ in factor.dims}

    def factors(self, name: Name) -> Iterator[_Factor]:
        """Those of all computations of a value."""
        for factors in self.uses[name].computations:
            yield from factors()


def _axes(select: ir.Select) -> frozenset[str]:
    """The axes of the mesh along which devices have different parts."""
    ranks = (leaf for leaf in leaves(select.index) if isinstance(leaf, Rank))
    return frozenset(rank.axis for rank in ranks)


def _is_known(stmt: ir.Compute) -> bool:
    """Whether it is one equation, on all that its operands have, with a dim rule."""
    if stmt.chunk is not None or len(stmt.unit.eqns) != 1:
        return False
    return not stmt.unit.eqns[0].rule.is_closed


def _dims_alike(here: int, copy: ir.Set) -> list[_Factor]:
    """Each dim of what is copied, and of the copy."""
    names = [(here, buffer.name) for buffer in (copy.source, copy.out)]
    return [
        _Factor([(name, dim - len(copy.out.shape)) for name in names], steps, True)
        for dim, steps in enumerate(copy.out.shape)
    ]


def _factors(here: int, stmt: ir.Compute, ranks: Ranks) -> list[_Factor]:
    """All factors of a computation, and those dims that it takes whole."""
    rule = stmt.unit.eqns[0].rule
    maps = (*operand_maps(stmt), *rule.results)
    found: dict[int | None, list[tuple[Name, int]]] = {}
    steps: dict[int | None, int] = {}
    for buffer, dims in zip((*stmt.ins, *stmt.outs), maps, strict=True):
        for number, dim in enumerate(dims):
            factor = dim and dim.factor
            place = (here, buffer.name), number - len(dims)
            found.setdefault(factor, []).append(place)
            steps[factor] = buffer.shape[number] // dim.scale if dim else 1
    # The steps of these mean something by where they stand.
    placed = {*rule.counted, *rule.picked, *rule.updates, *_seen(rule.window)}
    parallel, summed = (
        {n for n, r in enumerate(rule.reducers) if r == reducer} - placed
        for reducer in (None, "sum")
    )
    if not rule.contracts or rule.matmul is not None:
        summed = set[int]()
    # Sums of integers are equal on all devices, in whatever order they are made.
    exact = all(jnp.issubdtype(out.dtype, jnp.integer) for out in stmt.outs)
    spread = frozenset[str](ranks.sizes) if exact else _spread(stmt.outs)
    return [
        _Factor(
            dims,
            steps[factor],
            parallel=factor in parallel,
            spread=spread if factor in summed else frozenset[str](),
        )
        for factor, dims in found.items()
    ]


def _seen(window: Window | None) -> tuple[int, ...]:
    """The factors of which not all steps see all."""
    return (window.queries, window.keys) if window and not window.sees_all else ()


def _spread(outs: Sequence[ir.Buffer]) -> frozenset[str]:
    """The axes along which devices have different parts of all of these."""
    return frozenset[str].intersection(*(used_axes(layout_of(out)) for out in outs))
