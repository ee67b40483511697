"""How much a computation has to do: the kernels that XLA will make of it, about.

A contraction is a kernel of its own.  Everything else fuses with its neighbours: what
counts is the memory that they read from and write to what is not among them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from jax.extend.core import JaxprEqn, Literal, Var

from jhost.lowering.index import Index, evaluate
from jhost.lowering.ir import Compute, UnitEqn
from jhost.lowering.place import ChunkAt, Site, UnitPlace
from jhost.lowering.rates import Rates
from jhost.lowering.rules import Dims, local_shape, shape_of


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: a matmul of `batch` times m, n, k (or none), and memory traffic."""

    traffic: int
    matmul: tuple[int, int, int, int] | None = None

    def seconds(self, rates: Rates) -> float:
        """How long it takes: as long as the slower of arithmetic and memory."""
        arithmetic = rates.matmul_seconds(*self.matmul) if self.matmul else 0.0
        return rates.launch + max(arithmetic, self.traffic / rates.memory)


def kernels(
    compute: Compute, mesh: Mapping[str, int], at: Mapping[Index, int]
) -> list[Kernel]:
    """The kernels of `compute` on one device, in the iteration `at`."""
    return list(_Unit(compute, mesh, at).kernels())


def contracts(unit_eqn: UnitEqn) -> bool:
    """Whether an equation multiplies and sums: a reduced factor of two operands."""
    rule = unit_eqn.rule
    reduced = {f for f, reducer in enumerate(rule.reducers) if reducer is not None}
    holders = [_factors(dims) & reduced for dims in rule.operands]
    return len(holders) > 1 and bool(set.intersection(*holders[:2]))


class _Unit:
    def __init__(
        self, compute: Compute, mesh: Mapping[str, int], at: Mapping[Index, int]
    ) -> None:
        self.compute = compute
        self.eqns = compute.unit.eqns
        self.site = Site(mesh=mesh, rank=at.__getitem__, chunk=_chunk_at(compute, at))
        self.heavy = {id(e.eqn) for e in self.eqns if contracts(e)}
        self.maker = {id(v): e.eqn for e in self.eqns for v in e.eqn.outvars}

    def kernels(self) -> Iterator[Kernel]:
        for unit_eqn in self.eqns:
            if id(unit_eqn.eqn) in self.heavy:
                traffic = sum(
                    n for _, n in (*self.reads(unit_eqn), *self.writes(unit_eqn))
                )
                yield Kernel(traffic, self.matmul(unit_eqn))
        writes = [
            n for e in self.light() for var, n in self.writes(e) if self.kept(var)
        ]
        reads = {
            id(v): n for e in self.light() for v, n in self.reads(e) if self.far(v)
        }
        if writes:
            yield from (Kernel(n) for n in writes[1:])
            yield Kernel(writes[0] + sum(reads.values()))

    def light(self) -> Iterator[UnitEqn]:
        return (e for e in self.eqns if id(e.eqn) not in self.heavy)

    def kept(self, var: Var) -> bool:
        """Whether a value of a fusion leaves it."""
        if any(var is out for out in self.compute.unit.outvars):
            return True
        users = [e.eqn for e in self.eqns if any(var is v for v in e.eqn.invars)]
        return any(id(eqn) in self.heavy for eqn in users)

    def far(self, var: Var) -> bool:
        """Whether a value that a fusion reads comes from outside of it."""
        maker = self.maker.get(id(var))
        return maker is None or id(maker) in self.heavy

    # --- Sizes on this device ------------------------------------------------- #

    def place(self, unit_eqn: UnitEqn) -> UnitPlace:
        return UnitPlace(unit_eqn, self.site)

    def matmul(self, unit_eqn: UnitEqn) -> tuple[int, int, int, int]:
        """Batch, m, n and k of a contraction."""
        rule = unit_eqn.rule
        left, right = _factors(rule.operands[0]), _factors(rule.operands[1])
        out = _factors(rule.results[0])

        place = self.place(unit_eqn)

        def product(factors: set[int]) -> int:
            return math.prod(place.size(factor) for factor in factors)

        both = left & right
        return (
            product(both & out),
            product((left - right) & out),
            product((right - left) & out),
            product(both - out),
        )

    def reads(self, unit_eqn: UnitEqn) -> list[tuple[Var, int]]:
        pairs = zip(unit_eqn.eqn.invars, unit_eqn.rule.operands, strict=True)
        return [
            (var, self.bytes(unit_eqn, var, dims))
            for var, dims in pairs
            if not isinstance(var, Literal)
        ]

    def writes(self, unit_eqn: UnitEqn) -> list[tuple[Var, int]]:
        pairs = zip(unit_eqn.eqn.outvars, unit_eqn.rule.results, strict=True)
        return [(var, self.bytes(unit_eqn, var, dims)) for var, dims in pairs]

    def bytes(self, unit_eqn: UnitEqn, var: Var, dims: Dims) -> int:
        shape = local_shape(dims, shape_of(var), self.place(unit_eqn))
        return math.prod(shape) * itemsize(var)


def itemsize(var: Var) -> int:
    """The bytes of one element; a PRNG key's are few and do not matter."""
    return getattr(getattr(var.aval, "dtype", None), "itemsize", 1)


def _chunk_at(compute: Compute, at: Mapping[Index, int]) -> ChunkAt | None:
    chunk = compute.chunk
    return chunk and ChunkAt(
        start=evaluate(chunk.start, at),
        size=evaluate(chunk.size, at),
        extent=chunk.extent,
        groups=chunk.groups,
    )


def _factors(dims: Dims) -> set[int]:
    return {dim.factor for dim in dims if dim is not None}


def made_by_contraction(compute: Compute) -> tuple[bool, ...]:
    """For each result, whether a contraction writes it, which fuses with nothing."""
    heavy = {id(v) for e in compute.unit.eqns if contracts(e) for v in e.eqn.outvars}
    return tuple(id(var) in heavy for var in compute.unit.outvars)


def read_by_contraction(compute: Compute) -> tuple[bool, ...]:
    """For each operand, whether a contraction reads it, which takes no slice."""
    eqns: list[JaxprEqn] = [e.eqn for e in compute.unit.eqns if contracts(e)]
    read = {id(v) for eqn in eqns for v in eqn.invars}
    return tuple(id(var) in read for var in compute.unit.invars)
