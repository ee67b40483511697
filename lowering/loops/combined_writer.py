"""One collective in place of several small ones, whose values it moves in a vector."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jhost.lowering.ir.layout import axes_size, layout_of, used_axes
from jhost.lowering.ir.names import FreshNames
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import (
    Buffer,
    Communicate,
    Dim,
    Stmt,
    Wait,
)
from jhost.lowering.units.make import computes_of


class CombinedWriter:
    """Writes communications of one kind as one."""

    def __init__(self, program: Program) -> None:
        self.names = FreshNames.of(program)
        self.mesh = dict(program.mesh.shape)

    def written(self, stmts: Sequence[Communicate]) -> Iterator[Stmt]:
        if len(stmts) == 1:
            yield stmts[0]
            yield Wait(communication=stmts[0].name)
            return
        first = stmts[0]
        devices = 1 if first.kind == "AllReduce" else axes_size(first.axes, self.mesh)
        packed, whole = self.buffers(stmts, devices)
        yield from self.packing(stmts, packed, devices)
        dim = None if first.dim is None else 0
        yield dataclasses.replace(first, out=whole, source=packed, dim=dim)
        yield Wait(communication=first.name)
        yield from self.parts(stmts, whole, devices)

    def buffers(
        self, stmts: Sequence[Communicate], devices: int
    ) -> tuple[Buffer, Buffer]:
        """The vector of all sources, and the vector of all results."""
        first = stmts[0]
        scatters, gathers = (first.kind == k for k in ("ReduceScatter", "AllGather"))
        used = set[str]().union(
            *(used_axes(layout_of(s.out)) - {*first.axes} for s in stmts)
        )
        beside = tuple(axis for axis in self.mesh if axis in used)
        spread = (*beside, *first.axes)
        sent = sum(math.prod(stmt.source.shape) for stmt in stmts)
        there = sum(math.prod(stmt.out.shape) for stmt in stmts)
        return (
            dataclasses.replace(
                first.source,
                name=self.names.fresh(f"{first.out.name}_packed"),
                shape=(sent,),
                dims=(Dim(axes=spread if gathers else beside),),
            ),
            dataclasses.replace(
                first.out,
                name=self.names.fresh(f"{first.out.name}_together"),
                shape=(there,),
                dims=(Dim(axes=spread if scatters else beside),),
            ),
        )

    def packing(
        self, stmts: Sequence[Communicate], packed: Buffer, devices: int
    ) -> Iterator[Stmt]:
        """Put all sources into one vector; for a scatter, by device."""
        dims = [stmt.dim for stmt in stmts]
        scatters = stmts[0].kind == "ReduceScatter"

        def pack(*values: jax.Array) -> jax.Array:
            if not scatters:
                return lax.concatenate([lax.reshape(x, (x.size,)) for x in values], 0)
            # A scatter cuts once, so a device's parts of all values must be in a row.
            rows = [_rows(x, dim, devices) for x, dim in zip(values, dims, strict=True)]
            return lax.concatenate(rows, 1).reshape(packed.shape)

        sources = [stmt.source for stmt in stmts]
        yield from computes_of("pack", pack, sources, [packed], self.names)

    def parts(
        self, stmts: Sequence[Communicate], whole: Buffer, devices: int
    ) -> Iterator[Stmt]:
        """Take each value out of the vector of results."""
        gathers, start = stmts[0].kind == "AllGather", 0
        for stmt in stmts:
            shape, dim = stmt.out.shape, stmt.dim
            size = math.prod(shape) // (devices if gathers else 1)

            def part(
                x: jax.Array,
                # Defaults bind them now: the function is traced later, and would then
                # see the values of the last iteration.
                start: int = start,
                size: int = size,
                shape: tuple[int, ...] = shape,
                dim: int | None = dim,
            ) -> jax.Array:
                if not gathers:
                    return lax.slice(x, (start,), (start + size,)).reshape(shape)
                rows = x.reshape(devices, x.size // devices)
                rows = lax.slice(rows, (0, start), (devices, start + size))
                return _from_rows(rows, dim, devices, shape)

            yield from computes_of("part", part, [whole], [stmt.out], self.names)
            start += size


def _rows(x: jax.Array, dim: int | None, devices: int) -> jax.Array:
    """A row for each device, of its part of `dim`."""
    assert dim is not None, "what is scattered has a dim for that"
    shape = (*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0).reshape(devices, x.size // devices)


def _from_rows(
    rows: jax.Array, dim: int | None, devices: int, shape: tuple[int, ...]
) -> jax.Array:
    """The value whose parts along `dim` are rows."""
    assert dim is not None, "what is gathered has a dim for that"
    part = (*shape[:dim], shape[dim] // devices, *shape[dim + 1 :])
    return jnp.moveaxis(rows.reshape(devices, *part), 0, dim).reshape(shape)
