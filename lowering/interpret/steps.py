"""One statement at a time on every device: the plainest reading of each node.

Values have the mesh as leading dims, so that each device holds its own.  Communication
is one thing only: every device gathers what all have, and takes its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jhost._jax import cached
from jhost.lowering.emit.collectives import dim_of, reducer_of, swapped_ranks
from jhost.lowering.emit.control_flow import RunBody, call_control_flow
from jhost.lowering.emit.shard_map import shard_map
from jhost.lowering.ir import accumulate
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import (
    Communicate,
    Compute,
    Cond,
    ControlFlow,
    Scan,
    Unit,
    While,
)
from jhost.lowering.rules.reducers import COMBINE
from jhost.lowering.units.evaluate import ChunkAt, Site, evaluate_unit

OnDevices: TypeAlias = Callable[..., Any]


def stacked(mesh: Mesh, spec: PartitionSpec) -> OnDevices:
    """From a global array to what each device holds of it."""
    return _over_mesh(mesh, lambda x: _lead(mesh, x), spec, _leading(mesh))


def unstacked(mesh: Mesh, spec: PartitionSpec) -> OnDevices:
    """The global array that the devices hold the parts of."""
    return _over_mesh(mesh, lambda x: _local(mesh, x), _leading(mesh), spec)


@cached(256)
def select(mesh: Mesh, dim: int, size: int, groups: int, drop: bool) -> OnDevices:
    """(source, start) -> the part of the source."""

    def step(x: Any, start: Any) -> Any:
        parts = _grouped(x, dim, groups)
        part = lax.dynamic_slice_in_dim(parts, start, size, dim + 1)
        return _shape_after(part, dim, drop)

    return _per_device(mesh, step)


@cached(256)
def update(mesh: Mesh, dim: int, groups: int) -> OnDevices:
    """(source, start, part) -> the source with the part changed."""

    def step(x: Any, start: Any, part: Any) -> Any:
        parts = _grouped(x, dim, groups)
        rest = [n for d, n in enumerate(parts.shape) if d != dim + 1]
        size = part.size // max(1, _product(rest))
        part = part.reshape((*parts.shape[: dim + 1], size, *parts.shape[dim + 2 :]))
        return lax.dynamic_update_slice_in_dim(parts, part, start, dim + 1).reshape(
            x.shape
        )

    return _per_device(mesh, step)


@cached(256)
def compute(
    mesh: Mesh, unit: Unit, size: int, extent: int, groups: int, grain: int
) -> OnDevices:
    """(chunk start, *ins) -> outs; an extent of 0 stands for no chunk."""

    def step(start: Any, *ins: Any) -> Any:
        chunk = ChunkAt(
            start=start, size=size, extent=extent, groups=groups, grain=grain
        )
        site = Site(
            mesh=mesh.shape, rank=lax.axis_index, chunk=chunk if extent else None
        )
        return tuple(evaluate_unit(unit, ins, site))

    return _per_device(mesh, step)


@cached(256)
def combine(mesh: Mesh, stmt: Compute) -> OnDevices:
    """(held..., new...) -> both combined, of the accumulators of `stmt`."""

    def step(*values: Any) -> Sequence[Any]:
        count = len(values) // 2
        return tuple(accumulate.combine(stmt, values[:count], values[count:]))

    return _per_device(mesh, step)


def control_flow(
    mesh: Mesh, stmt: ControlFlow, ins: Sequence[Any], run: RunBody
) -> Sequence[Any]:
    """The results of `stmt`; of what is stacked, the mesh's dims come second.

    What decides is the same on all devices, and is asked of the first.
    """
    dims, first = len(mesh.axis_names), (0,) * len(mesh.axis_names)
    values = list(ins)
    match stmt:
        case Scan(xs=xs, carried=carried):
            count = len(values) - len(xs)
            values[count:] = [jnp.moveaxis(x, dims, 0) for x in values[count:]]
            outs = call_control_flow(stmt, values, run)
            ys = (jnp.moveaxis(y, 0, dims) for y in outs[len(carried) :])
            return *outs[: len(carried)], *ys
        case While(condition=condition):

            def asking_the_first(body: Program, *args: Any) -> Sequence[Any]:
                results = run(body, *args)
                return [results[0][first]] if body is condition else results

            return call_control_flow(stmt, values, asking_the_first)
        case Cond():
            values[0] = values[0][first]
            return call_control_flow(stmt, values, run)


@cached(256)
def communicate(mesh: Mesh, stmt: Communicate, sources: tuple[int, ...]) -> OnDevices:
    """(source,) -> what each device has of the result."""
    axes = stmt.axes

    def step(x: Any) -> Any:
        every, me = list(_every(x, axes)), lax.axis_index(axes)
        return _result(stmt, every, me, jnp.asarray(sources)[me])

    return _per_device(mesh, step)


def _every(x: Any, axes: tuple[str, ...]) -> Any:
    """What each device along `axes` has, along a new dim in front."""
    # As one dim, for JAX cannot lower a gather of keys into a new one.
    return lax.all_gather(x[None], axes, axis=0, tiled=True)


def _result(stmt: Communicate, every: list[Any], me: Any, source: Any) -> Any:
    match stmt.kind:
        case "AllGather":
            return lax.concatenate(every, dim_of(stmt))
        case "AllReduce":
            return _total(stmt, every)
        case "ReduceScatter":
            return _part(_total(stmt, every), dim_of(stmt), me, len(every))
        case "AllToAll":
            parts = [_part(x, dim_of(stmt), me, len(every)) for x in every]
            return lax.concatenate(parts, stmt.source_dim or 0)
        case "CollectivePermute":
            return jnp.stack(every)[source]
        case "SwapAxes":
            return jnp.stack(every)[jnp.asarray(swapped_ranks(len(every)))[me]]


def _total(stmt: Communicate, every: list[Any]) -> Any:
    return functools.reduce(COMBINE[reducer_of(stmt)], every)


def _part(x: Any, dim: int, number: Any, parts: int) -> Any:
    size = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(x, number * size, size, dim)


def _grouped(x: Any, dim: int, groups: int) -> Any:
    size = x.shape[dim] // groups
    return x.reshape((*x.shape[:dim], groups, size, *x.shape[dim + 1 :]))


def _shape_after(part: Any, dim: int, drop: bool) -> Any:
    merged = () if drop else (part.shape[dim] * part.shape[dim + 1],)
    return part.reshape((*part.shape[:dim], *merged, *part.shape[dim + 2 :]))


def _product(sizes: list[int]) -> int:
    return functools.reduce(lambda a, b: a * b, sizes, 1)


# --- Devices ------------------------------------------------------------------ #


def _per_device(mesh: Mesh, step: OnDevices) -> OnDevices:
    """`step` on the values of each device; all arguments and results are stacked."""

    def local(*args: Any) -> Any:
        outs = step(*(_local(mesh, arg) for arg in args))
        return jax.tree.map(lambda out: _lead(mesh, out), outs)

    return _over_mesh(mesh, local, _leading(mesh), _leading(mesh))


def _over_mesh(
    mesh: Mesh, step: OnDevices, in_spec: PartitionSpec, out_specs: Any
) -> OnDevices:
    def call(*args: Any) -> Any:
        return shard_map(step, mesh, (in_spec,) * len(args), out_specs)(*args)

    return jax.jit(call)


def _leading(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(*mesh.axis_names)


def _local(mesh: Mesh, x: Any) -> Any:
    return x.reshape(x.shape[len(mesh.axis_names) :])


def _lead(mesh: Mesh, x: Any) -> Any:
    return x.reshape((1,) * len(mesh.axis_names) + x.shape)
