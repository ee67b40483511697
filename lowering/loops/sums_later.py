"""All-reduces by permutes, each beside what is computed until its sum is read.

Nothing of a backward waits for the sum of a weight's gradient over the devices that
share the rows.  As a collective it would run alone: NCCL's kernels find no
multiprocessor beside a matmul.  So devices swap what they have with one other after the
other, and add: in round j with the one whose rank differs by bit j (recursive doubling;
Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication
Operations in MPICH").  All add the same pairs, and have equal bits.

What is swapped is waited for when the sums after the next set out: what is computed
until then stands beside it, and no more than three times as many are kept.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Container, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.effects import touched
from jhost.lowering.ir.index import Constant, Index, linear_rank
from jhost.lowering.ir.names import Names
from jhost.lowering.ir.program import Program
from jhost.lowering.loops.chunk import MAIN, is_narrow
from jhost.lowering.loops.collective import on_stream
from jhost.lowering.rules.dim_rule import axes_size
from jhost.lowering.units.make import unit_of

_SWAPS = ir.Stream(name="swaps")
"""The queue of the transfers."""

_AHEAD = 2
"""How many times sums set out until the first of them are waited for."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Sum:
    """An all-reduce, what this device `has` of it after some rounds, and what `came`.

    `swap` is the name of the communication that brings it.
    """

    stmt: ir.Communicate
    has: ir.Buffer
    rounds: int = 0
    came: ir.Buffer | None = None
    swap: str = ""


def sums_beside_work(program: Program) -> list[ir.Communicate]:
    """The sums that can be swapped, and have work behind them before it needs them.

    Those are sums over a power of two of devices.
    """
    mesh = dict(program.mesh.shape)
    found: list[ir.Communicate] = []
    open_ones: dict[str, set[str]] = {}  # what is made of each sum, by its name
    sums: dict[str, ir.Communicate] = {}
    for block in _blocks(program):
        read = {b.name for stmt in block for b in touched(stmt)[0]}
        made = {b.name for stmt in block for b in touched(stmt)[1]}
        of = [name for name, values in open_ones.items() if values & read]
        stmt = _sum_of(block)
        if stmt is not None and axes_size(stmt.axes, mesh).bit_count() == 1:
            sums[stmt.out.name] = stmt
            open_ones[stmt.out.name] = {stmt.out.name}
        if _can_wait(block):
            for name in of:
                open_ones[name] |= made
            continue
        for name in of:
            del open_ones[name]
        if _works(block):
            found += [sums[name] for name in open_ones]
            open_ones = {}
    return found


def with_sums_later(
    program: Program, chosen: Container[str]
) -> tuple[Program, list[ir.Communicate]]:
    """`program` with some of `sums_beside_work`, by name, beside what is computed next.

    Returns:
        The program, and those that are swapped.  Others were needed too early: what
        reads one has all that are under way made.
    """
    later = _Later(program, chosen)
    body = later.statements()
    return dataclasses.replace(program, body=tuple(body)), later.swapped


class _Later:
    """A walk through a program, with the sums to come and those under way.

    What is made of a sum, and is no work, is `put_off` until that is there.
    """

    def __init__(self, program: Program, chosen: Container[str]) -> None:
        self.program, self.chosen = program, chosen
        self.mesh = dict(program.mesh.shape)
        self.names = Names.of(program)
        self.coming: list[_Sum] = []
        self.under_way: list[list[_Sum]] = []
        self.put_off: list[ir.Stmt] = []
        self.swapped: list[ir.Communicate] = []
        self.body: list[ir.Stmt] = []

    def statements(self) -> list[ir.Stmt]:
        for block in _blocks(self.program):
            stmt = _sum_of(block)
            if stmt is not None and stmt.name in self.chosen:
                self.coming.append(_Sum(stmt, stmt.source))
            elif not self.is_wait(block[0]):
                self.block(block)
        self.finish()
        return self.body

    def is_wait(self, stmt: ir.Stmt) -> bool:
        """Whether a statement waits for a chosen sum."""
        return isinstance(stmt, ir.Wait) and stmt.communication in self.chosen

    def block(self, block: Sequence[ir.Stmt]) -> None:
        read = {buffer.name for stmt in block for buffer in touched(stmt)[0]}
        if not read.isdisjoint(self.missing()):
            if _can_wait(block):
                self.put_off += block
                return
            self.finish()
        if self.coming and _works(block):
            self.turn()
        self.body += block

    def missing(self) -> set[str]:
        """The sums that are not there yet, and what is made of them."""
        sums = itertools.chain(self.coming, *self.under_way)
        made = (b.name for stmt in self.put_off for b in touched(stmt)[1])
        return {*(each.stmt.out.name for each in sums), *made}

    # --- Rounds --------------------------------------------------------------- #

    def turn(self) -> None:
        """Those to come set out; the first of those under way are waited for."""
        first = self.under_way.pop(0) if len(self.under_way) == _AHEAD else []
        self.swapped += [each.stmt for each in self.coming]
        self.under_way.append([self.sent(each) for each in self.coming])
        self.coming = []
        left, added = self.added(first)
        self.on_swaps(*map(self.permute, self.under_way[-1]), *_waits(first), *added)
        if left:
            again = [self.sent(each) for each in left]
            self.under_way[-1] += again
            self.on_swaps(*map(self.permute, again))
        self.resume()

    def finish(self) -> None:
        """All sums made, with nothing more beside them."""
        for each in self.coming:
            self.body += [each.stmt, ir.Wait(communication=each.stmt.name)]
        left = [each for batch in self.under_way for each in batch]
        self.coming, self.under_way = [], []
        while left:
            self.on_swaps(*_waits(left))
            left, added = self.added(left)
            self.body += added
            left = [self.sent(each) for each in left]
            self.on_swaps(*map(self.permute, left))
        self.resume()

    def resume(self) -> None:
        """What was put off for nothing but sums that are there now."""
        waiting, self.put_off = self.put_off, []
        for stmt in waiting:
            read = {buffer.name for buffer in touched(stmt)[0]}
            here = self.body if read.isdisjoint(self.missing()) else self.put_off
            here.append(stmt)

    def on_swaps(self, *stmts: ir.Stmt) -> None:
        """Statements on the queue of transfers, which the main one waits for."""
        if stmts:
            moved = [ir.Synchronize(stream=MAIN), *stmts]
            self.body += [
                ir.GetCurrentStream(stream=MAIN),
                *on_stream(_SWAPS, moved),
                ir.Synchronize(stream=_SWAPS),
            ]

    def sent(self, each: _Sum) -> _Sum:
        """The sum, with what another device sends for it under way."""
        name = self.names.fresh(f"{each.stmt.out.name}_swapped")
        came = dataclasses.replace(each.has, name=name)
        return dataclasses.replace(each, came=came, swap=self.names.fresh("c"))

    def permute(self, each: _Sum) -> ir.Communicate:
        assert each.came is not None
        return ir.Communicate(
            name=each.swap,
            kind="CollectivePermute",
            out=each.came,
            source=each.has,
            axes=each.stmt.axes,
            shift=self.shift(each),
        )

    def shift(self, each: _Sum) -> Index:
        """To the device whose rank differs by the bit of the round."""
        devices, bit = axes_size(each.stmt.axes, self.mesh), 2**each.rounds
        if devices == 2:
            return Constant(1)
        rank = linear_rank(each.stmt.axes, self.mesh)
        return (rank // bit) % 2 * (devices - 2 * bit) + bit

    def added(self, sums: Sequence[_Sum]) -> tuple[list[_Sum], list[ir.Stmt]]:
        """The sums that are to be swapped again, and what adds what came of all."""
        left: list[_Sum] = []
        stmts: list[ir.Stmt] = []
        for each in sums:
            assert each.came is not None
            rounds = each.rounds + 1
            out = each.stmt.out
            if 2**rounds < axes_size(each.stmt.axes, self.mesh):
                name = self.names.fresh(f"{out.name}_part")
                out = dataclasses.replace(each.has, name=name)
                left.append(_Sum(each.stmt, out, rounds))
            ins = each.has, each.came
            stmts.append(ir.Compute(unit=self.addition(out), ins=ins, outs=(out,)))
        return left, stmts

    def addition(self, out: ir.Buffer) -> ir.Unit:
        """The sum of what a device has and what came."""
        both = [jax.ShapeDtypeStruct(out.shape, out.dtype)] * 2
        add = functools.partial(_add, is_narrow(out))
        return unit_of(self.names.fresh("add"), add, *both)


def _add(widen: bool, here: jax.Array, came: jax.Array) -> jax.Array:
    """Their sum; of narrow floats in float32.

    What is here was sent, and is added as it was sent: XLA may keep it wider than it
    is, or multiply and add at once, and devices would differ by the last bit.
    """
    dtype = here.dtype
    here = lax.optimization_barrier(here)
    if widen:
        info = jnp.finfo(dtype)
        here, came = (x.astype(jnp.float32) for x in (here, came))
        here = lax.reduce_precision(here, info.nexp, info.nmant)
    return lax.convert_element_type(lax.add(here, came), dtype)


def _waits(sums: Sequence[_Sum]) -> list[ir.Stmt]:
    return [ir.Wait(communication=each.swap) for each in sums]


# --- What stands where ------------------------------------------------------------- #


def _blocks(program: Program) -> Iterator[list[ir.Stmt]]:
    """The statements of a program, those from one switch of streams to the way back."""
    block: list[ir.Stmt] = []
    away = False
    for stmt in program.body:
        if isinstance(stmt, ir.SetCurrentStream):
            away = stmt.stream != MAIN
        block.append(stmt)
        if not away:
            yield block
            block = []


def _sum_of(block: Sequence[ir.Stmt]) -> ir.Communicate | None:
    """The sum over devices that a block is, on the stream that the program began on.

    Floats of eight bits are left out: some have no infinity, and `reduce_precision`
    knows only those that do.
    """
    stmt = block[0]
    if not isinstance(stmt, ir.Communicate) or stmt.kind != "AllReduce":
        return None
    tiny = is_narrow(stmt.out) and stmt.out.dtype.itemsize == 1
    return stmt if stmt.reducer == "sum" and not tiny else None


def _can_wait(block: Sequence[ir.Stmt]) -> bool:
    """Whether a block is no work, and nothing but its values says when it ran."""
    if isinstance(block[0], ir.Set):
        return True
    return isinstance(block[0], ir.Compute) and not any(
        eqn.rule.contracts or eqn.eqn.effects for eqn in block[0].unit.eqns
    )


def _works(block: Sequence[ir.Stmt]) -> bool:
    """Whether transfers may run beside a block: it contracts, or is a loop."""
    return any(
        any(eqn.rule.contracts for eqn in stmt.unit.eqns)
        if isinstance(stmt, ir.Compute)
        else isinstance(stmt, ir.For | ir.Scan | ir.While | ir.Cond)
        for stmt in block
    )
