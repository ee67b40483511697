"""The permutes and additions that make a sum over devices outside of loops.

In a reduce-scatter each device gets all others' terms of its part.  In an all-reduce
each device swaps all that it has with one other device in each round.  In round j that
is the device whose rank differs by bit j (recursive doubling; Thakur, Rabenseifner and
Gropp 2005, "Optimization of Collective Communication Operations in MPICH").  All
devices add the same pairs, so they have equal bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jhost._dtypes import bits
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.index import Constant, Index
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.loops.by_permutes import ByPermutes
from jhost.lowering.loops.chunk import is_narrow
from jhost.lowering.loops.moves import combined
from jhost.lowering.units.make import unit_of


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """A sum, what this device `has` of it after some rounds, and what is added next.

    That is what the communications of `sends` bring.
    """

    stmt: ir.Communicate
    has: ir.Buffer
    rounds: int = 0
    sends: tuple[ir.Stmt, ...] = ()

    @property
    def permutes(self) -> list[ir.Communicate]:
        """The communications among what it sends."""
        return [stmt for stmt in self.sends if isinstance(stmt, ir.Communicate)]


def can_be_sent(stmt: ir.Communicate, mesh: Mapping[str, int]) -> bool:
    """Whether a collective is a sum that there is a way for.

    All-reduces are those over a power of two of devices.  Floats of eight bits, or
    fewer, are left out: some have no infinity, and `reduce_precision` knows only those
    that do.  So are integers of fewer.
    """
    tiny = is_narrow(stmt.out) and bits(stmt.out.dtype) <= 8
    if stmt.reducer != "sum" or tiny:
        return False
    # Each round of doubling pairs all devices only if they are a power of two.
    doubles = axes_size(stmt.axes, mesh).bit_count() == 1
    return stmt.kind == "ReduceScatter" or (stmt.kind == "AllReduce" and doubles)


class Sums(ByPermutes):
    """Writes what sums send, and adds up what came."""

    def sent(self, each: Sum) -> Sum:
        """The sum, with what other devices send for it under way."""
        stmt = each.stmt
        if stmt.kind == "AllReduce":
            sends = [self.permute(stmt, each.has, self.shift(each))]
        else:
            steps = range(1, self.devices(stmt))
            sends = [sent for step in steps for sent in self.part_sent(stmt, step)]
        return dataclasses.replace(each, sends=tuple(sends))

    def part_sent(self, stmt: ir.Communicate, step: int) -> tuple[ir.Stmt, ir.Stmt]:
        """The part of the device `step` further on, to it."""
        part = self.part(stmt, step)
        return part, self.permute(stmt, part.out, Constant(step))

    def shift(self, each: Sum) -> Index:
        """To the device whose rank differs by the bit of the round."""
        devices, bit = self.devices(each.stmt), 2**each.rounds
        if devices == 2:
            return Constant(1)
        # Up by the bit where the rank lacks it, else down by it, modulo the devices.
        return (self.rank(each.stmt) // bit) % 2 * (devices - 2 * bit) + bit

    def added(self, sums: Sequence[Sum]) -> tuple[list[Sum], list[ir.Stmt]]:
        """The sums that have another round, and what adds what came of all."""
        left: list[Sum] = []
        stmts: list[ir.Stmt] = []
        for each in sums:
            out = self.sum_of_round(each)
            if out != each.stmt.out:
                left.append(Sum(each.stmt, out, each.rounds + 1))
            stmts += self.addition(each, out)
        return left, stmts

    def sum_of_round(self, each: Sum) -> ir.Buffer:
        """The sum after a round; after the last one, the result."""
        out, devices = each.stmt.out, self.devices(each.stmt)
        last = each.stmt.kind == "ReduceScatter" or 2 ** (each.rounds + 1) == devices
        name = out.name if last else self.names.fresh(f"{out.name}_part")
        return out if last else dataclasses.replace(each.has, name=name)

    def addition(self, each: Sum, out: ir.Buffer) -> list[ir.Stmt]:
        """The sum of what a device has and what came."""
        came = [permute.out for permute in each.permutes]
        if each.stmt.kind == "AllReduce":
            return [self.unit(_both, (each.has, *came), out)]
        own = self.part(each.stmt, 0)
        total = functools.partial(combined, "sum")
        return [own, self.unit(total, (own.out, *came), out)]

    def unit(
        self, add: Callable[..., jax.Array], ins: Sequence[ir.Buffer], out: ir.Buffer
    ) -> ir.Compute:
        """The computation that adds up `ins`."""
        types = [jax.ShapeDtypeStruct(out.shape, out.dtype)] * len(ins)
        add = functools.partial(add, is_narrow(out))
        unit = unit_of(self.names.fresh("add"), add, *types)
        return ir.Compute(unit=unit, ins=tuple(ins), outs=(out,))


def _both(widen: bool, here: jax.Array, came: jax.Array) -> jax.Array:
    """Their sum; of narrow floats in float32.

    The local term is rounded as the sent one was.  XLA may otherwise keep it wider, or
    fuse a product with the addition, and devices would differ by the last bit.
    """
    dtype = here.dtype
    here = lax.optimization_barrier(here)
    if widen:
        info = jnp.finfo(dtype)
        here, came = (x.astype(jnp.float32) for x in (here, came))
        here = lax.reduce_precision(here, info.nexp, info.nmant)
    return lax.convert_element_type(lax.add(here, came), dtype)
