"""What contractions read and write in memory: they fuse with nothing but additions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jhost._jax import aval_of
from jhost.lowering.ir.derived import derived_with
from jhost.lowering.ir.statements import Compute, Unit, UnitEqn
from jhost.lowering.rules.contract import read_in_other_order


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """An addition that a product makes itself.

    Attributes:
        eqn: the addition.
        array: what is added to the product, which something else made.
    """

    eqn: JaxprEqn
    array: Var


@derived_with
def added(unit: Unit) -> Mapping[int, Added]:
    """The additions that products make, by the identities of the products' equations.

    cuBLAS reads an array and adds it to a product, in one kernel.  XLA has it do so
    once for each product (its GemmRewriter), and writes the sum where the array was.
    It may copy an array first that something else reads, which takes as long as an
    addition: such additions are not among these.
    """
    return _Additions(unit).found


class _Additions:
    def __init__(self, unit: Unit) -> None:
        eqns = [each.eqn for each in unit.eqns]
        read = [var for eqn in eqns for var in eqn.invars]
        self.readers = Counter(map(id, (*read, *unit.outvars)))
        self.maker = {id(var): eqn for eqn in eqns for var in eqn.outvars}
        self.products = {id(e.eqn) for e in unit.eqns if _is_of_cublas(e)}
        ends = (e.eqn for e in unit.eqns if e.rule.contracts or e.rule.reduces)
        self.complete = set(map(id, ends))
        self.found: dict[int, Added] = {}
        self.sums: set[int] = set()
        for eqn in eqns:
            if eqn.primitive.name in ("add", "add_any"):
                self.add(eqn)

    def add(self, eqn: JaxprEqn) -> None:
        """Note an addition if a product makes it."""
        left, right = map(self.source, eqn.invars)
        if left is None or right is None:
            return
        for var, other in ((left, right), (right, left)):
            maker = id(self.maker[id(var)])
            if maker in self.products:
                self.found[maker] = Added(eqn, other)
                self.sums.add(id(eqn))
            # XLA asks no further than the first operand that cuBLAS makes.
            if maker in self.products | self.sums:
                return

    def source(self, var: Var | Literal) -> Var | None:
        """The value in memory that `var` shows, if nothing else reads it."""
        while isinstance(var, Var) and self.readers[id(var)] == 1:
            eqn = self.maker.get(id(var))
            if eqn is None:
                return None
            if id(eqn) in self.complete | self.sums:
                return var
            if not _is_view(eqn):
                return None
            (var,) = eqn.invars
        return None


def _is_of_cublas(each: UnitEqn) -> bool:
    """Whether cuBLAS makes the product and can add to it.  It adds no integers."""
    is_dot = each.eqn.primitive is lax.dot_general_p and each.rule.contracts
    return is_dot and not np.issubdtype(aval_of(each.eqn.outvars[0]).dtype, np.integer)


def _is_view(eqn: JaxprEqn) -> bool:
    """Whether XLA can write a product in this form at once.

    A transposed matrix is the product of the operands in the other order.
    """
    if eqn.primitive is lax.transpose_p:
        return len(eqn.params["permutation"]) == 2
    return eqn.primitive in (lax.reshape_p, lax.squeeze_p)


def made_by_contraction(compute: Compute) -> tuple[bool, ...]:
    """For each result, whether a contraction writes it; contractions do not fuse."""
    unit = compute.unit
    eqns = [each.eqn for each in unit.eqns if each.rule.contracts]
    eqns += [addition.eqn for addition in added(unit).values()]
    heavy = {id(var) for eqn in eqns for var in eqn.outvars}
    return tuple(id(var) in heavy for var in unit.outvars)


def read_in_place(compute: Compute) -> tuple[bool, ...]:
    """For each operand, whether a contraction reads the array as it lies in memory.

    An operand that a contraction needs in another order of dims is copied for it, and
    that copy is counted with the contraction's kernel.
    """
    read: set[int] = set()
    copied: set[int] = set()
    for eqn in (each.eqn for each in compute.unit.eqns if each.rule.contracts):
        read |= set(map(id, eqn.invars))
        copied |= {id(eqn.invars[number]) for number in read_in_other_order(eqn)}
    return tuple(id(var) in read - copied for var in compute.unit.invars)
