"""How permutes make a collective: devices put parts together, or add them.

At step k a device sends to the device k ranks further on.  Each device counts the parts
of a whole from its own part on.

- All-gather: each device sends its shard to all others, which put it in its place.
- Reduce-scatter: each device gets all others' terms of its part, and adds them up.
- All-reduce: each device swaps all that it has with one other device in each round.  In
  round j the other device is the one whose rank differs in bit j (recursive doubling;
  Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication
  Operations in MPICH").  All devices add the same pairs, so they get equal bits.

Loops over chunks do the same chunk by chunk: see `loops/moves.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jhost._dtypes import bits, summed_in
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.index import Constant, Index, linear_rank
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.rules.reducers import COMBINE, Reducer
from jhost.lowering.units.make import barrier_of, type_of, unit_of


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """What a device sends at one time, and what it does once all of it has come.

    `sends` has communications, and aliases for their operands.
    """

    sends: tuple[ir.Stmt, ...]
    ends: tuple[ir.Stmt, ...] = ()

    @property
    def waits(self) -> tuple[ir.Wait, ...]:
        """Waits for all that was sent."""
        return tuple(
            ir.Wait(communication=stmt.name)
            for stmt in self.sends
            if isinstance(stmt, ir.Communicate)
        )


def is_made_of_permutes(stmt: ir.Communicate, mesh: Mapping[str, int]) -> bool:
    """Whether `Permutes.rounds` knows how to make a collective."""
    if stmt.kind == "AllGather":
        return True
    # Some floats of at most 8 bits have no infinity, and `lax.reduce_precision`, which
    # `_both` needs, assumes that there is one.
    tiny = is_narrow(stmt.out) and bits(stmt.out.dtype) <= 8
    if stmt.reducer != "sum" or tiny:
        return False
    # Each round of doubling pairs all devices only if they are a power of two.
    doubles = axes_size(stmt.axes, mesh).bit_count() == 1
    return stmt.kind == "ReduceScatter" or (stmt.kind == "AllReduce" and doubles)


# --- Collectives ------------------------------------------------------------------ #


class Permutes:
    """Writes collectives as permutes, under names that are fresh in a program."""

    def __init__(self, program: Program) -> None:
        self.mesh: Mapping[str, int] = dict(program.mesh.shape)
        self.names = FreshNames.of(program)

    def rounds(self, stmt: ir.Communicate) -> list[Round]:
        """The rounds that make what a collective makes; see `is_made_of_permutes`."""
        match stmt.kind:
            case "AllGather":
                return [self._gathered(stmt)]
            case "ReduceScatter":
                return [self._scattered(stmt)]
            case _:
                return [*self._doubled(stmt)]

    def _gathered(self, stmt: ir.Communicate) -> Round:
        """Each device gets a shard from the next device, the one after, ..."""
        devices = axes_size(stmt.axes, self.mesh)
        sends = [
            self._sent(stmt, stmt.source, Constant(devices - step))
            for step in range(1, devices)
        ]
        came = [stmt.source, *(permute.out for permute in sends)]
        return Round(tuple(sends), tuple(self._placed(stmt, came)))

    def _placed(
        self, stmt: ir.Communicate, shards: Sequence[ir.Buffer]
    ) -> Iterator[ir.Stmt]:
        """The device's own shard and those that came, each in its place of the whole.

        A barrier has them all wait for the last one.  Without it XLA would allocate the
        whole when the program begins, to put the device's own shard there.
        """
        there = [
            dataclasses.replace(shard, name=self.names.fresh(shard.name))
            for shard in shards
        ]
        unit = barrier_of(self.names.fresh("there"), *map(type_of, shards))
        yield ir.Compute(unit=unit, ins=tuple(shards), outs=tuple(there))
        yield ir.Allocate(buffer=stmt.out)
        for step, shard in enumerate(there):
            part = self._part(stmt, step)
            yield part
            yield ir.Set(out=part.out, source=shard)

    def _scattered(self, stmt: ir.Communicate) -> Round:
        """Each device sends every other device's part to it, and adds what comes."""
        sends: list[ir.Stmt] = []
        came: list[ir.Buffer] = []
        for step in range(1, axes_size(stmt.axes, self.mesh)):
            part = self._part(stmt, step)
            permute = self._sent(stmt, part.out, Constant(step))
            sends += [part, permute]
            came.append(permute.out)
        own = self._part(stmt, 0)
        ins = (own.out, *came)
        total = self._unit(combined, ins, stmt.out, reducer="sum")
        return Round(tuple(sends), (own, total))

    def _doubled(self, stmt: ir.Communicate) -> Iterator[Round]:
        """Each device adds the sum that its partner had after the round before."""
        has, devices = stmt.source, axes_size(stmt.axes, self.mesh)
        for bit in (2**number for number in range(devices.bit_length() - 1)):
            permute = self._sent(stmt, has, self._partner(stmt, bit))
            out = stmt.out
            if 2 * bit < devices:
                name = self.names.fresh(f"{out.name}_part")
                out = dataclasses.replace(has, name=name)
            yield Round((permute,), (self._unit(_both, (has, permute.out), out),))
            has = out

    def _partner(self, stmt: ir.Communicate, bit: int) -> Index:
        """The shift to the device whose rank differs in `bit`."""
        devices = axes_size(stmt.axes, self.mesh)
        if devices == 2:
            return Constant(1)
        # Up by the bit where the rank lacks it, else down by it, modulo the devices.
        rank = linear_rank(stmt.axes, self.mesh)
        return rank // bit % 2 * (devices - 2 * bit) + bit

    # --- Statements ----------------------------------------------------------- #

    def _sent(
        self, stmt: ir.Communicate, source: ir.Buffer, shift: Index
    ) -> ir.Communicate:
        """A permute of `source`, for a collective, to the device `shift` further on."""
        came = self.names.fresh(f"{stmt.out.name}_came")
        out = dataclasses.replace(source, name=came)
        return permute(source, out, stmt.axes, shift, self.names)

    def _part(self, stmt: ir.Communicate, step: int) -> ir.Select:
        """An alias for the part of the device `step` further on.

        It is a part of an all-gather's result, or of a reduce-scatter's operand.
        """
        assert stmt.dim is not None
        whole, shard = stmt.out, stmt.source
        if stmt.kind == "ReduceScatter":
            whole, shard = shard, whole
        rank, devices = (
            linear_rank(stmt.axes, self.mesh),
            axes_size(stmt.axes, self.mesh),
        )
        place = (rank + step) % devices if step else rank
        size = shard.shape[stmt.dim]
        return part_of(
            whole, stmt.dim, place * size, size, self.names, like=stmt.source
        )

    def _unit(
        self,
        add: Callable[..., jax.Array],
        ins: Sequence[ir.Buffer],
        out: ir.Buffer,
        **params: Any,
    ) -> ir.Compute:
        """The computation that adds up `ins`."""
        types, name = [type_of(out)] * len(ins), self.names.fresh("add")
        unit = unit_of(name, add, *types, widen=is_narrow(out), **params)
        return ir.Compute(unit=unit, ins=tuple(ins), outs=(out,))


# --- One permute, one part --------------------------------------------------------- #


def permute(
    source: ir.Buffer,
    out: ir.Buffer,
    axes: tuple[str, ...],
    shift: Index,
    names: FreshNames,
) -> ir.Communicate:
    """Each device sends `source` to the one `shift` further on along `axes`."""
    return ir.Communicate(
        name=names.fresh("c"),
        kind="CollectivePermute",
        out=out,
        source=source,
        axes=axes,
        shift=shift,
    )


def part_of(
    whole: ir.Buffer,
    dim: int,
    start: Index,
    size: int,
    names: FreshNames,
    *,
    like: ir.Buffer | None = None,
    called: str = "part",
) -> ir.Select:
    """An alias of `size` elements of a dim; that dim lies as it does in `like`."""
    shape, dims = list(whole.shape), list(whole.dims)
    shape[dim] = size
    dims[dim] = (like or whole).dims[dim]
    out = dataclasses.replace(
        whole,
        name=names.fresh(f"{whole.name}_{called}"),
        shape=tuple(shape),
        dims=tuple(dims),
    )
    return ir.Select(out=out, source=whole, dim=dim, index=start, size=Constant(size))


# --- Sums ------------------------------------------------------------------------- #


def is_narrow(buffer: ir.Buffer) -> bool:
    """Whether sums of this type are made in a wider one."""
    return summed_in(buffer.dtype) != buffer.dtype


def combined(*terms: jax.Array, reducer: Reducer, widen: bool) -> jax.Array:
    """The terms combined from the left; narrow dtypes are summed in a wider one."""
    dtype = terms[0].dtype
    if widen and reducer == "sum":
        wide = summed_in(dtype)
        terms = tuple(lax.convert_element_type(term, wide) for term in terms)
    return lax.convert_element_type(functools.reduce(COMBINE[reducer], terms), dtype)


def _both(here: jax.Array, came: jax.Array, *, widen: bool) -> jax.Array:
    """The sum of two terms; narrow floats are added in float32."""
    dtype = here.dtype
    # The local term is rounded as the sent one was.  Otherwise XLA may keep it wider,
    # or fuse a product into the addition, and devices would differ in the last bit.
    here = lax.optimization_barrier(here)
    if widen:
        info = jnp.finfo(dtype)
        here, came = (x.astype(jnp.float32) for x in (here, came))
        here = lax.reduce_precision(here, info.nexp, info.nmant)
    return lax.convert_element_type(lax.add(here, came), dtype)
