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

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.bodies import CONTROL_FLOW, programs, statements
from jhost.lowering.ir.border import scan_border
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.index import ranks
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.loops.rotation import (
    Factor,
    Rotation,
    ValueName,
    dims_alike,
    factors_of_compute,
)

_FindFactors: TypeAlias = Callable[[], Sequence[Factor]]


@dataclasses.dataclass(slots=True)
class _Uses:
    """How a value is used: the parts that `Select`s show, and computations of all.

    The factors of a computation are found out when they are asked for.
    """

    parts: list[tuple[ir.Select, Mapping[str, int]]] = dataclasses.field(
        default_factory=list[tuple[ir.Select, Mapping[str, int]]]
    )
    computations: list[_FindFactors] = dataclasses.field(
        default_factory=list[_FindFactors]
    )


def rotated_values(program: Program) -> set[ValueName]:
    """The values of a program and its bodies that are rotated, by name."""
    if not any(isinstance(s, ir.Select) and _axes(s) for s in statements(program)):
        return set()
    values = _Rotations(program)
    rotations = values.rotations()
    waiting = [*rotations]
    while waiting:
        name = waiting.pop()
        # One that does not fit is dropped, and all that share work with it are asked
        # again, until those that are left agree.
        if name in rotations and not values.agrees(name, rotations):
            for other in values.same[name]:
                rotations.pop(other, None)
                waiting += values.sharing(other)
    return set(rotations)


class _Rotations:
    """All values by name, and which are the `same`: stacked by a scan, and in its body.

    Values in `whole` are read or made by something whose factors are not known.
    """

    def __init__(self, program: Program) -> None:
        self.ranks = Ranks(program.mesh.shape)
        self.same: dict[ValueName, set[ValueName]] = {}
        self.uses: dict[ValueName, _Uses] = {}
        self.whole: set[ValueName] = set()
        self.all_of_it(id(program), (*program.params, *program.results))
        for each in programs(program):
            self.statements(id(each), each.body, {})

    def all_of_it(self, owner: int, buffers: Iterable[ir.Buffer]) -> None:
        """Note that something reads all of these in a way that no factor describes."""
        self.whole |= {(owner, buffer.name) for buffer in buffers}

    def of(self, owner: int, buffer: ir.Buffer) -> _Uses:
        self.same.setdefault((owner, buffer.name), {(owner, buffer.name)})
        return self.uses.setdefault((owner, buffer.name), _Uses())

    def statements(
        self, owner: int, body: Sequence[ir.Stmt], loops: Mapping[str, int]
    ) -> None:
        for stmt in body:
            match stmt:
                case ir.Allocate() | ir.Deallocate():
                    pass
                case ir.Select(source=source, out=out):
                    self.all_of_it(owner, [out])  # an alias cannot be rotated by itself
                    self.of(owner, source).parts.append((stmt, loops))
                case ir.For(index=index, extent=extent, body=inner):
                    self.statements(owner, inner, {**loops, index: extent})
                case ir.Scan():
                    self.scan(owner, stmt)
                case ir.Compute() if _is_known(stmt):
                    found = functools.partial(
                        factors_of_compute, owner, stmt, self.ranks
                    )
                    self.computation(owner, stmt, found)
                case ir.Set():
                    found = functools.partial(dims_alike, owner, stmt)
                    self.computation(owner, stmt, found)
                case _:
                    self.all_of_it(owner, itertools.chain(*reads_writes(stmt)))
                    for each in stmt.bodies if isinstance(stmt, CONTROL_FLOW) else ():
                        self.all_of_it(id(each), (*each.params, *each.results))

    def scan(self, owner: int, scan: ir.Scan) -> None:
        """A stacked value lies as it does in the body, with the iterations in front."""
        border, body = scan_border(scan), scan.body
        whole = (*border.consts, *border.carry, *border.carried)
        self.all_of_it(owner, (each.outside for each in whole))
        self.all_of_it(id(body), (each.inside for each in whole))
        for outside, inside in (*border.xs, *border.ys):
            self.of(id(body), inside)
            stacked = (owner, outside.name), -len(outside.shape)
            self.of(owner, outside).computations.append(
                functools.partial(list, [Factor([stacked], scan.length)])
            )
            self.merge((id(body), inside.name), (owner, outside.name))

    def merge(self, value: ValueName, other: ValueName) -> None:
        """Note that two values are the same, and so all that are the same as either."""
        # SciPy's disjoint sets would do this, but take half a second to import.
        names = self.same[value]
        names |= self.same[other]
        self.same |= dict.fromkeys(names, names)

    def computation(
        self, owner: int, stmt: ir.Compute | ir.Set, found: _FindFactors
    ) -> None:
        factors = functools.cache(found)
        for buffer in itertools.chain(*reads_writes(stmt)):
            self.of(owner, buffer).computations.append(factors)

    # --- What may be rotated -------------------------------------------------- #

    def rotations(self) -> dict[ValueName, Rotation]:
        """The rotation of each value whose parts all have one, not yet compared."""
        found: dict[ValueName, Rotation] = {}
        for names in {id(names): names for names in self.same.values()}.values():
            parts = [part for name in names for part in self.uses[name].parts]
            if names & self.whole or not any(_axes(select) for select, _ in parts):
                continue
            rotations = set(
                itertools.chain(*(self.each_rotation(*part) for part in parts))
            )
            # Loops that rotate a value differently leave it in order of position.
            if len(rotations) == 1 and all(select.groups == 1 for select, _ in parts):
                found |= dict.fromkeys(names, rotations.pop())
        self.propagate(found)
        return found

    def propagate(self, rotations: dict[ValueName, Rotation]) -> None:
        """Rotate values without parts that make rotated ones, or are made of them."""
        waiting = [*rotations]
        while waiting:
            name = waiting.pop()
            for factor in self.factors(name):
                if factor.parallel and (name, rotations[name].dim) in factor.dims:
                    for other, dim in factor.dims:
                        names = self.same[other]
                        if other not in rotations and self.follows(names):
                            rotations |= dict.fromkeys(
                                names, rotations[name].along(dim)
                            )
                            waiting += names

    def follows(self, names: AbstractSet[ValueName]) -> bool:
        """Whether values may follow others: nothing shows parts, or needs the order."""
        parts = any(self.uses[name].parts for name in names)
        return not (parts or names & self.whole)

    def each_rotation(
        self, select: ir.Select, loops: Mapping[str, int]
    ) -> Iterator[Rotation]:
        """How far a part is rotated from the first device's, in each iteration."""
        extent = select.source.shape[select.dim]
        # Evaluated in every iteration on every rank: loops are short, and no algebra
        # has to show that two expressions are equal.
        for numbers in itertools.product(*map(range, loops.values())):
            at = dict(zip(loops, numbers, strict=True))
            places = self.ranks.everywhere(self.ranks.value(select.index, at)).ravel()
            by = ((int(place) - int(places[0])) % extent for place in places)
            dim = select.dim - len(select.source.shape)
            yield Rotation(dim, tuple(Fraction(n, extent) for n in by), _axes(select))

    def agrees(self, name: ValueName, rotations: Mapping[ValueName, Rotation]) -> bool:
        """Whether every computation takes a value as it is rotated."""
        place = name, rotations[name].dim
        return all(
            factor.takes(rotations[name], rotations)
            for factor in self.factors(name)
            if place in factor.dims
        )

    def sharing(self, name: ValueName) -> set[ValueName]:
        """The values that share a factor with a value in some computation."""
        return {other for factor in self.factors(name) for other, _ in factor.dims}

    def factors(self, name: ValueName) -> Iterator[Factor]:
        """The factors of all computations that read or make a value."""
        for factors in self.uses[name].computations:
            yield from factors()


def _axes(select: ir.Select) -> frozenset[str]:
    """The axes of the mesh along which devices have different parts."""
    return frozenset(rank.axis for rank in ranks(select.index))


def _is_known(stmt: ir.Compute) -> bool:
    """Whether it is one equation, on all that its operands have, with a dim rule."""
    if stmt.chunk is not None or len(stmt.unit.eqns) != 1:
        return False
    return not stmt.unit.eqns[0].rule.is_closed
