"""An estimate of the kernels that XLA makes of a computation, and of their work.

A contraction is one kernel, with what it adds to a product.  Everything else fuses with
its neighbours, up to the next reduction.  The cost of a fusion is the memory that it
reads and writes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jhost.lowering.cost.contractions import added
from jhost.lowering.cost.rates import Rates
from jhost.lowering.ir.derived import derived_with
from jhost.lowering.ir.index import Index, Rank, evaluate
from jhost.lowering.ir.statements import Compute, Unit, UnitEqn
from jhost.lowering.rules.contract import read_in_other_order
from jhost.lowering.rules.dim_rule import part_shape, shape_of
from jhost.lowering.rules.flops import matmul_of
from jhost.lowering.rules.properties import VIEWS, is_barrier
from jhost.lowering.units.evaluate import ChunkAt, EqnShard, Site


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One launch.

    Attributes:
        traffic: the bytes that it reads and writes.
        matmul: batch, m, n and k of its product, if it has one.
        between: the bytes that arithmetic does not hide: what a kernel of several
            products moves from one to the next, and what is added to a product.
        choices: how many branches are chosen when it runs.
    """

    traffic: int
    matmul: tuple[int, int, int, int] | None = None
    between: int = 0
    choices: int = 0

    def seconds(self, rates: Rates) -> float:
        """How long it takes: as long as the slower of arithmetic and memory."""
        arithmetic = rates.matmul_seconds(*self.matmul) if self.matmul else 0.0
        # A kernel loads while it multiplies: the two overlap.
        slower = max(arithmetic, self.traffic / rates.memory)
        waiting = rates.launch + self.choices * rates.choice
        return waiting + slower + self.between / rates.memory


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, and the variables that it reads from memory and writes, by identity."""

    kernel: Kernel
    reads: frozenset[int]
    writes: frozenset[int]


def kernels(
    compute: Compute, mesh: Mapping[str, int], at: Mapping[Index, int]
) -> list[Kernel]:
    """The kernels of `compute` on one device, in the iteration `at`."""
    return [step.kernel for step in _launches(compute, mesh, at)]


def steps_for(
    compute: Compute,
    mesh: Mapping[str, int],
    at: Mapping[Index, int],
    urgent: Set[int],
) -> list[Launch]:
    """The kernels in a possible order, with those that `urgent` needs first."""
    steps = _launches(compute, mesh, at)
    maker = {var: number for number, step in enumerate(steps) for var in step.writes}
    ordered: list[Launch] = []
    placed = set[int]()

    def place(number: int) -> None:
        if number in placed:
            return
        placed.add(number)
        # By number: identities come in another order in each process, and all processes
        # have to predict the same.
        for before in sorted({maker[v] for v in steps[number].reads if v in maker}):
            place(before)
        ordered.append(steps[number])

    numbers = range(len(steps))
    for number in sorted(numbers, key=lambda n: steps[n].writes.isdisjoint(urgent)):
        place(number)
    return ordered


def _launches(
    compute: Compute, mesh: Mapping[str, int], at: Mapping[Index, int]
) -> Sequence[Launch]:
    ranks = {axis: at[Rank(axis)] for axis in mesh}
    return _launches_of(compute.unit, mesh, ranks, _chunk_at(compute, at))


# Candidates have most units in common, and each is timed in many programs.
@derived_with
def _launches_of(
    unit: Unit, mesh: Mapping[str, int], ranks: Mapping[str, int], chunk: ChunkAt | None
) -> Sequence[Launch]:
    site = Site(mesh=mesh, rank=ranks.__getitem__, chunk=chunk)
    return [*_UnitKernels(unit, site).steps()]


def forwarded(unit: Unit) -> dict[int, int]:
    """The operands of barriers, each by the variable of the result that equals it."""
    found: dict[int, int] = {}
    for eqn in (e.eqn for e in unit.eqns if is_barrier(e.eqn)):
        for source, out in zip(eqn.invars, eqn.outvars, strict=True):
            found[id(out)] = found.get(id(source), id(source))
    return found


class _UnitKernels:
    def __init__(self, unit: Unit, site: Site) -> None:
        self.eqns = [e for e in unit.eqns if not is_barrier(e.eqn)]
        self.invars = unit.invars
        self.value = _identities(forwarded(unit))
        self.site = site
        self.heavy = {id(e.eqn) for e in self.eqns if e.rule.contracts}
        self.added = added(unit)
        self.additions = {id(each.eqn) for each in self.added.values()}
        self.apart = self.heavy | self.additions
        self.bytes = self.sizes()
        users = (e.eqn for e in self.eqns if id(e.eqn) in self.heavy)
        outside = (*unit.outvars, *(var for eqn in users for var in eqn.invars))
        self.wanted = set(map(self.value, outside))
        self.sources = self.origins()

    def steps(self) -> Iterator[Launch]:
        given = set(map(id, self.invars))

        def ordered(eqn: JaxprEqn) -> set[int]:
            """The operands that are transposed first, once for all contractions."""
            found = {
                self.value(eqn.invars[n]) for n in read_in_other_order(eqn)
            } & given
            given.difference_update(found)
            return found

        for unit_eqn in self.eqns:
            # cuBLAS and cuDNN fuse with nothing around them.
            if id(unit_eqn.eqn) in self.heavy:
                eqn = unit_eqn.eqn
                read = set(map(self.value, eqn.invars))
                more, written = self.sum_of(eqn)
                traffic, matmul = self.traffic(read | written), self.matmul(unit_eqn)
                between = self.between(unit_eqn) + 2 * self.traffic(ordered(eqn))
                # What is added is read when the product is there.
                between += self.traffic(more)
                kernel = Kernel(traffic, matmul, between, self.choices(unit_eqn))
                yield Launch(kernel, frozenset(read | more), frozenset(written))
        for fusion in self.fusions():
            for read, written in self.connected(fusion):
                kernel = Kernel(self.traffic(read) + self.traffic(written))
                yield Launch(kernel, read, written)

    def sum_of(self, eqn: JaxprEqn) -> tuple[set[int], set[int]]:
        """What a contraction adds to its product, and what it writes."""
        addition = self.added.get(id(eqn))
        if addition is None:
            return set(), set(map(id, eqn.outvars))
        return {self.value(addition.array)}, set(map(id, addition.eqn.outvars))

    def ends(self, unit_eqn: UnitEqn) -> bool:
        """Whether its results are complete in memory before anything reads them."""
        if id(unit_eqn.eqn) in self.added:
            return False
        rule = unit_eqn.rule
        return rule.contracts or rule.reduces or id(unit_eqn.eqn) in self.additions

    def fusions(self) -> list[list[int]]:
        """The values that each fusion writes.

        Fusions are told apart by the reductions and contractions that must be complete
        before them, because these end a fusion.  XLA computes cheap values again where
        they are read.  It writes only values that end a fusion, that a contraction
        reads, or that the unit returns.  What is filled with one number costs nothing:
        nor do the stacks of a scan, which XLA fills too.
        """
        level: dict[int, int] = {}
        fusions: dict[int, list[int]] = {}
        for unit_eqn in self.eqns:
            eqn, outs = unit_eqn.eqn, [id(var) for var in unit_eqn.eqn.outvars]
            read = map(self.value, eqn.invars)
            own = max((level.get(value, 0) for value in read), default=0)
            reduces = self.ends(unit_eqn)
            # A reduction is complete a level later, so its readers are another fusion.
            level |= dict.fromkeys(outs, own + reduces)
            if id(eqn) not in self.apart and not _is_filled(eqn):
                written = [var for var in outs if reduces or var in self.wanted]
                fusions.setdefault(own, []).extend(written)
        return [fusion for fusion in fusions.values() if fusion]

    def connected(
        self, fusion: Sequence[int]
    ) -> list[tuple[frozenset[int], frozenset[int]]]:
        """What each part of a fusion reads and writes; parts share no operand."""
        parts: list[tuple[frozenset[int], frozenset[int]]] = []
        for var in fusion:
            read, written = frozenset(self.sources[var]), frozenset({var})
            # XLA makes values that share an operand in one kernel with several results
            # (multi-output fusion).
            joined = [part for part in parts if part[0] & read]
            parts = [part for part in parts if part not in joined]
            written = written.union(*(others for _, others in joined))
            read = read.union(*(others for others, _ in joined)) - written
            parts.append((read, written))
        return parts

    def origins(self) -> dict[int, set[int]]:
        """The values in memory that each value is made from.

        XLA writes a value into a stack where it makes it, if nothing else reads it.
        Otherwise it copies the value.
        """
        found: dict[int, set[int]] = {}
        in_memory: dict[int, set[int]] = {}
        stored = {value: {value} for value in self.wanted}
        for unit_eqn in self.eqns:
            eqn = unit_eqn.eqn
            values = [*map(self.value, eqn.invars)]
            read = [in_memory.get(value, {value}) for value in values]
            if eqn.primitive is lax.dynamic_update_slice_p:
                # A place is a number.  XLA makes no kernel larger to read it once.
                read = [read[0], stored.get(values[1], read[1])]
            for out in map(id, eqn.outvars):
                found[out] = set().union(*read)
                in_memory[out] = {out} if self.ends(unit_eqn) else found[out]
                if self.views(eqn) in stored:
                    stored.setdefault(out, stored[values[0]])
        return found

    def views(self, eqn: JaxprEqn) -> int | None:
        """The value that an equation shows in another shape, if that is all it does."""
        if eqn.primitive.name not in VIEWS or not eqn.invars:
            return None
        value, out = self.value(eqn.invars[0]), self.value(eqn.outvars[0])
        # By bytes here: variables of one value may have global and local shapes.
        return value if self.bytes.get(value) == self.bytes.get(out) else None

    def traffic(self, values: Iterable[int]) -> int:
        return sum(self.bytes.get(value, 0) for value in values)

    # --- Sizes on this device ------------------------------------------------- #

    def shard(self, unit_eqn: UnitEqn) -> EqnShard:
        return EqnShard(unit_eqn, self.site)

    def matmul(self, unit_eqn: UnitEqn) -> tuple[int, int, int, int]:
        """Batch, m, n and k of a contraction."""
        rule, shard = unit_eqn.rule, self.shard(unit_eqn)
        return rule.matmul(shard) if rule.matmul else matmul_of(rule, shard)

    def between(self, unit_eqn: UnitEqn) -> int:
        """The bytes that a contraction moves between its products."""
        rule, shard = unit_eqn.rule, self.shard(unit_eqn)
        return rule.traffic(shard) if rule.traffic else 0

    def choices(self, unit_eqn: UnitEqn) -> int:
        """How many branches a contraction chooses when it runs."""
        rule, shard = unit_eqn.rule, self.shard(unit_eqn)
        return rule.choices(shard) if rule.choices else 0

    def sizes(self) -> dict[int, int]:
        """The bytes of each value here."""
        found: dict[int, int] = {}
        # The last equation with a value says its size, so it comes first here.
        for unit_eqn in reversed(self.eqns):
            eqn, rule, shard = unit_eqn.eqn, unit_eqn.rule, self.shard(unit_eqn)
            variables = (*eqn.invars, *eqn.outvars)
            maps = (*rule.operands, *rule.results)
            for var, dims in zip(reversed(variables), reversed(maps), strict=True):
                value = self.value(var)
                if value not in found and not isinstance(var, Literal):
                    shape = part_shape(dims, shape_of(var), shard)
                    found[value] = math.prod(shape) * itemsize(var)
        return found | self.touched(found)

    def touched(self, sizes: Mapping[int, int]) -> dict[int, int]:
        """The bytes of the part of a value that is read or written at a place."""
        read = dict[int, int]()
        written = dict[int, int]()
        whole = set[int]()
        for eqn in (each.eqn for each in self.eqns):
            first, *rest = map(self.value, eqn.invars) if eqn.invars else (0,)
            if eqn.primitive is lax.dynamic_slice_p:
                read[first] = read.get(first, 0) + sizes[id(eqn.outvars[0])]
            elif eqn.primitive is lax.dynamic_update_slice_p:
                # In place, as XLA does it where nothing reads the old contents.
                read.setdefault(first, 0)
                written[id(eqn.outvars[0])] = sizes.get(rest[0], 0)
            else:
                whole |= {first, *rest}
        # A slice of a slice may be larger than what that takes of the whole.
        parts = {v: min(n, sizes[v]) for v, n in read.items() if v in sizes}
        return {v: n for v, n in parts.items() if v not in whole} | written


def _identities(forwarded: Mapping[int, int]) -> Callable[[Var | Literal], int]:
    """The identity of a variable's value; a barrier's result is its operand."""
    # Most units have no barrier, and this is asked more often than all else.
    return (lambda var: forwarded.get(id(var), id(var))) if forwarded else id


def _is_filled(eqn: JaxprEqn) -> bool:
    """Whether all elements of its result are one number, which is known here."""
    return eqn.primitive is lax.broadcast_in_dim_p and all(
        isinstance(var, Literal) for var in eqn.invars
    )


def itemsize(var: Var) -> int:
    """The bytes of one element; a PRNG key's are few and do not matter."""
    return getattr(getattr(var.aval, "dtype", None), "itemsize", 1)


def _chunk_at(compute: Compute, at: Mapping[Index, int]) -> ChunkAt | None:
    chunk = compute.chunk
    return chunk and ChunkAt.of(
        chunk, evaluate(chunk.start, at), evaluate(chunk.size, at)
    )
