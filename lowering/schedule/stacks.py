"""Reads and writes of a scan's stacks, at the place that a counter says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jhost._jax import zeros_on_host
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.units.make import barrier_of, type_of, unit_of


@dataclasses.dataclass(frozen=True, slots=True)
class Stacks:
    """Appends to `body` the statements that read and write the stacks of a scan.

    `last` is what `last_place` says of the scan.
    """

    last: int | None
    names: FreshNames
    body: list[ir.Stmt]

    @classmethod
    def of(cls, scan: ir.Scan, names: FreshNames, body: list[ir.Stmt]) -> Stacks:
        return cls(last_place(scan), names, body)

    def read(
        self, stack: ir.Buffer, part: ir.Buffer, count: ir.Buffer, ahead: int
    ) -> ir.Buffer:
        """The slice of the iteration at `count + ahead`, like a param of the body."""
        out = fresh(part, self.names)
        self.read_into(out, stack, count, ahead)
        return out

    def read_into(
        self, out: ir.Buffer, stack: ir.Buffer, count: ir.Buffer, ahead: int = 0
    ) -> None:
        """Make `out` the slice of the iteration at `count + ahead`."""
        self._at(_sliced, [stack], out, count, ahead)

    def written(
        self, stack: ir.Buffer, value: ir.Buffer, count: ir.Buffer, ahead: int = 0
    ) -> ir.Buffer:
        """The stack with `value` at the place of the iteration at `count + ahead`."""
        out = fresh(stack, self.names)
        self._at(_written, [stack, value], out, count, ahead)
        return out

    def filled(self, stack: ir.Buffer) -> ir.Buffer:
        """A stack like `stack`, of zeros."""
        out = fresh(stack, self.names)
        # Each place is written before it is read, but XLA has no array without values.
        how = {"shape": stack.shape, "dtype": stack.dtype}
        if stack.memory_space == jax.memory.Space.Host:
            self._compute(zeros_on_host, [], out, **how)
        else:
            self._compute(_zeros, [], out, **how)
        return out

    def finished(self, stack: ir.Buffer) -> ir.Buffer:
        """The stack behind a barrier: its last place is written before any read."""
        # Without the barrier, XLA fuses the write into each reader, and keeps the stack
        # as it was before the write.
        out = fresh(stack, self.names)
        self._compute(lax.optimization_barrier, [stack], out)
        return out

    def first_count(self) -> ir.Buffer:
        """The count of the first iteration."""
        out = self.counter()
        self._compute(_first_count, [], out)
        return out

    def counter(self) -> ir.Buffer:
        """A buffer for a count."""
        name, dtype = self.names.fresh("count"), np.dtype(np.int32)
        return ir.Buffer(name=name, shape=(), dtype=dtype, dims=())

    def known_behind(self, there: ir.Buffer, count: ir.Buffer) -> ir.Buffer:
        """The count behind a barrier with the value `there`, so no longer static."""
        # XLA knows how far a loop counts, so the place of the last iteration would be
        # static.  It would then read that place before others are written, and keep two
        # stacks.  It would also cast the weights of the first and the last iteration at
        # one time.
        out = fresh(count, self.names)
        self._compute(_known_behind, [count, there], out)
        return out

    def together(self, values: Sequence[ir.Buffer]) -> tuple[ir.Buffer, ...]:
        """The values behind one barrier: none is read before all are there."""
        outs = tuple(fresh(value, self.names) for value in values)
        unit = barrier_of(self.names.fresh("border"), *map(type_of, values))
        self.body.append(ir.Compute(unit=unit, ins=tuple(values), outs=outs))
        return outs

    def next(self, count: ir.Buffer) -> ir.Buffer:
        out = fresh(count, self.names)
        self._compute(_next, [count], out)
        return out

    def _at(
        self,
        part: Callable[..., jax.Array],
        ins: Sequence[ir.Buffer],
        out: ir.Buffer,
        count: ir.Buffer,
        ahead: int,
    ) -> None:
        how = {"part": part, "ahead": ahead, "last": self.last}
        self._compute(_at_place, [count, *ins], out, **how)

    def _compute(
        self,
        fun: Callable[..., jax.Array],
        ins: Sequence[ir.Buffer],
        out: ir.Buffer,
        **params: Any,
    ) -> None:
        unit = unit_of(self.names.fresh("cycle"), fun, *map(type_of, ins), **params)
        self.body.append(ir.Compute(unit=unit, ins=tuple(ins), outs=(out,)))


def last_place(scan: ir.Scan) -> int | None:
    """The place in its stacks at which a reversed scan begins; None if it is not."""
    return scan.length - 1 if scan.reverse else None


def fresh(buffer: ir.Buffer, names: FreshNames) -> ir.Buffer:
    """A buffer like `buffer`, with a fresh name."""
    return dataclasses.replace(buffer, name=names.fresh(buffer.name))


# --- What is computed ------------------------------------------------------------- #


def _zeros(*, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return lax.full(shape, 0, dtype)


def _first_count() -> jax.Array:
    # `lax.full` of a scalar would be a literal, and a literal has no buffer.
    return lax.squeeze(lax.full((1,), 0, np.int32), [0])


def _next(count: jax.Array) -> jax.Array:
    return count + 1


def _known_behind(count: jax.Array, there: jax.Array) -> jax.Array:
    return lax.optimization_barrier((count, there))[0]


def _at_place(
    count: jax.Array,
    *args: jax.Array,
    part: Callable[..., jax.Array],
    ahead: int,
    last: int | None,
) -> jax.Array:
    """The `part` of an iteration, whose place is counted back from the `last` one."""
    when = count + ahead
    return part(when if last is None else last - when, *args)


def _sliced(place: jax.Array, stack: jax.Array) -> jax.Array:
    starts = (place, *[np.int32(0)] * (stack.ndim - 1))
    sizes = (1, *stack.shape[1:])
    # By default JAX (0.10 to 0.12) adds a comparison and a select for indices below 0.
    part = lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False)
    return lax.squeeze(part, [0])


def _written(place: jax.Array, stack: jax.Array, value: jax.Array) -> jax.Array:
    starts = (place, *[np.int32(0)] * (stack.ndim - 1))
    return lax.dynamic_update_slice(
        stack, lax.expand_dims(value, [0]), starts, allow_negative_indices=False
    )
