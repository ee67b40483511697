"""Computations on stacks, at the place of an iteration that is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax import lax

from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.units.make import unit_of

When: TypeAlias = int | ir.Buffer
"""Which iteration, in the order that they run in: a number, or a count in a body."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stacks:
    """Appends to `body` what reads and writes the stacks of a scan."""

    scan: ir.Scan
    names: FreshNames
    body: list[ir.Stmt]

    def read(
        self, stack: ir.Buffer, part: ir.Buffer, number: When, ahead: int
    ) -> ir.Buffer:
        """The part of the iteration `ahead` of one, like a param of the body."""
        out = fresh(part, self.names)
        self._at(_sliced, [stack], out, number, ahead)
        return out

    def written(
        self, stack: ir.Buffer, value: ir.Buffer, number: When, ahead: int
    ) -> ir.Buffer:
        """The stack with what the iteration `ahead` of one gives."""
        out = fresh(stack, self.names)
        self._at(_written, [stack, value], out, number, ahead)
        return out

    def filled(self, stack: ir.Buffer) -> ir.Buffer:
        """One like it, with zeros."""
        out = fresh(stack, self.names)
        self._compute(lambda: lax.full(stack.shape, 0, stack.dtype), [], out)
        return out

    def count(self, value: int) -> ir.Buffer:
        out = ir.Buffer(
            name=self.names.fresh("count"), shape=(), dtype=np.dtype(np.int32), dims=()
        )
        # A scalar by itself would be a literal, which is no value of a program.
        made = lambda: lax.squeeze(lax.full((1,), value, np.int32), [0])  # noqa: E731
        self._compute(made, [], out)
        return out

    def next(self, count: ir.Buffer) -> ir.Buffer:
        out = fresh(count, self.names)
        self._compute(lambda count: count + 1, [count], out)
        return out

    def _at(
        self,
        fun: Callable[..., jax.Array],
        ins: Sequence[ir.Buffer],
        out: ir.Buffer,
        number: When,
        ahead: int,
    ) -> None:
        last = self.scan.length - 1

        def place(count: jax.Array | int) -> jax.Array | int:
            when = count + ahead
            return last - when if self.scan.reverse else when

        if isinstance(number, int):
            self._compute(lambda *args: fun(place(number), *args), ins, out)
        else:
            self._compute(
                lambda count, *args: fun(place(count), *args), [number, *ins], out
            )

    def _compute(
        self, fun: Callable[..., jax.Array], ins: Sequence[ir.Buffer], out: ir.Buffer
    ) -> None:
        types = [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype) for buffer in ins]
        unit = unit_of(self.names.fresh("cycle"), fun, *types)
        self.body.append(ir.Compute(unit=unit, ins=tuple(ins), outs=(out,)))


def fresh(buffer: ir.Buffer, names: FreshNames) -> ir.Buffer:
    """A buffer of its own that is like another one."""
    return dataclasses.replace(buffer, name=names.fresh(buffer.name))


def _sliced(place: jax.Array | int, stack: jax.Array) -> jax.Array:
    if isinstance(place, int):
        return lax.index_in_dim(stack, place, keepdims=False)
    starts = (place, *[np.int32(0)] * (stack.ndim - 1))
    sizes = (1, *stack.shape[1:])
    part = lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False)
    return lax.squeeze(part, [0])


def _written(place: jax.Array | int, stack: jax.Array, value: jax.Array) -> jax.Array:
    starts = (np.int32(place) if isinstance(place, int) else place,)
    starts += (np.int32(0),) * (stack.ndim - 1)
    return lax.dynamic_update_slice(
        stack, lax.expand_dims(value, [0]), starts, allow_negative_indices=False
    )
