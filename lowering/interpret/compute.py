"""Runs the equations of a unit on one device after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import Mesh, PartitionSpec

from jhost._jax import cached
from jhost.lowering.interpret.arrays import OnDevices, as_jax, as_numpy, as_operand
from jhost.lowering.interpret.collectives import reduced
from jhost.lowering.interpret.equations import evaluated, traced
from jhost.lowering.ir.ranks import Ranks
from jhost.lowering.ir.statements import Chunk, Compute, Unit
from jhost.lowering.rules.dim_rule import Combine
from jhost.lowering.rules.properties import has_callback
from jhost.lowering.units.evaluate import ChunkAt, Site, evaluate_unit


def compute(
    stmt: Compute,
    ins: Sequence[OnDevices],
    starts: Sequence[int],
    size: int,
    ranks: Ranks,
    mesh: Mesh,
) -> list[OnDevices]:
    """The results of `stmt` on each device; a chunk has `size` steps from `starts`."""
    # Devices wait for each other in such a unit, so all have to run at once.
    if mesh.axis_names and _communicates(stmt.unit):
        return _on_mesh(stmt, ins, starts, size, mesh)
    dtypes = [buffer.dtype for buffer in stmt.ins]
    unit = _UnitOnDevice(stmt.unit, stmt.chunk, size, tuple(ranks.sizes.items()))
    found: list[list[np.ndarray]] = []
    places = [jax.memory.Space.Device] * (1 + len(ranks.shape))
    spaces = *places, *(buffer.memory_space for buffer in stmt.ins)
    for rank, each in enumerate(_by_device(ins, ranks.count)):
        place = starts[rank], *np.unravel_index(rank, ranks.shape)
        args = *map(np.int32, place), *map(as_operand, each, dtypes)
        found.append(_run(unit, args, spaces))
    return list(map(list, zip(*found, strict=True)))


def combined(
    stmt: Compute, held: Sequence[np.ndarray], new: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The new values of a device's accumulators: `held` combined with `new`."""
    assert stmt.reducer is not None
    if stmt.reducer != "softmax":
        pairs = zip(held, new, strict=True)
        # An accumulator of narrow floats is wider than the chunks that go into it.
        return [reduced(stmt.reducer, (a, b.astype(a.dtype))) for a, b in pairs]
    (unit_eqn,) = stmt.unit.eqns
    assert unit_eqn.rule.combine is not None
    spaces = [jax.memory.Space.Device] * 2 * len(new)
    return _run(_Combination(unit_eqn.rule.combine), (*held, *new), spaces)


def _by_device(ins: Sequence[OnDevices], count: int) -> list[tuple[np.ndarray, ...]]:
    # A fill has no operands to zip, but it runs on each device too.
    return list(zip(*ins, strict=True)) if ins else [()] * count


@dataclasses.dataclass(frozen=True, slots=True)
class _UnitOnDevice:
    """What a statement's unit does with `size` steps of its chunk, on any device."""

    unit: Unit
    chunk: Chunk | None
    size: int
    mesh: tuple[tuple[str, int], ...]

    def __call__(self, start: Any, *operands: Any) -> list[Any]:
        """The results, from the device's place on each axis and what the unit reads."""
        count = len(self.mesh)
        position = dict(zip(dict(self.mesh), operands[:count], strict=True))
        site = Site(
            mesh=dict(self.mesh),
            rank=position.__getitem__,
            chunk=self.chunk and ChunkAt.of(self.chunk, start, self.size),
        )
        return evaluate_unit(self.unit, operands[count:], site)


@dataclasses.dataclass(frozen=True, slots=True)
class _Combination:
    """One result of two parts' results, which come one behind the other."""

    combine: Combine

    def __call__(self, *values: Any) -> Sequence[Any]:
        half = len(values) // 2
        return self.combine(values[:half], values[half:])


def _run(
    function: Callable[..., Any], args: Sequence[Any], spaces: Sequence[Any]
) -> list[np.ndarray]:
    types = [
        ShapedArray(x.shape, x.dtype, memory_space=space)
        for x, space in zip(args, spaces, strict=True)
    ]
    return list(map(as_numpy, evaluated(traced(function, *types), args)))


# --- On all devices at once --------------------------------------------------------- #


def _communicates(unit: Unit) -> bool:
    """Whether an equation communicates, or calls the host once for all devices."""
    return any(
        each.eqn.primitive.name == "shard_map" or has_callback(each.eqn)
        for each in unit.eqns
    )


def _on_mesh(
    stmt: Compute,
    ins: Sequence[OnDevices],
    starts: Sequence[int],
    size: int,
    mesh: Mesh,
) -> list[OnDevices]:
    """The unit under one `jax.shard_map`: the collectives in it are the user's own."""
    step = _over_mesh(mesh, stmt, size)
    outs = step(np.asarray(starts, np.int32), *map(np.stack, ins))
    return [list(as_numpy(out)) for out in outs]


# `starts` is an operand, so the iterations of a loop share what is compiled.
@cached(256)
def _over_mesh(mesh: Mesh, stmt: Compute, size: int) -> Any:
    """(starts, *ins) -> outs, each with a leading dim for the devices."""
    dtypes = [buffer.dtype for buffer in stmt.ins]

    def on_device(starts: Any, *ins: Any) -> Any:
        given = [as_jax(x[0], dtype) for x, dtype in zip(ins, dtypes, strict=True)]
        chunk = stmt.chunk and ChunkAt.of(stmt.chunk, starts[0], size)
        site = Site(mesh=mesh.shape, rank=lax.axis_index, chunk=chunk)
        return [out[None] for out in evaluate_unit(stmt.unit, given, site)]

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
