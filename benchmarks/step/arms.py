"""Who computes a step, by name: each makes what has `lower`, as `jax.jit` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from benchmarks.arms.base import per_device
from benchmarks.axes import FSDP
from benchmarks.communication import AXIS, Collectives, Rows
from benchmarks.step.programs import Step, StepCommunication

Arm: TypeAlias = Callable[[Step, Mesh, bool], Any]
"""From a step, a mesh and whether gradients are wanted."""


@dataclasses.dataclass(frozen=True)
class Global:
    """Global arrays with their layouts, and marks or none; `jax.jit` ignores marks."""

    rows: NamedSharding
    columns: NamedSharding
    marked: bool = True

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        result = self.stream(rows(x)) if ends else rows(x)
        return constrain(result, self.columns)

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        # Said of h, or GSPMD gathers weights for the gradient of cuDNN's attention.
        h = constrain(h, self.columns)
        return constrain(self.stream(h @ w), self.rows)

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return self.stream(h @ w)

    def stream(self, x: jax.Array) -> jax.Array:
        return jhost.stream(x, axis=0) if self.marked else x

    def weight(self, shard: jax.Array, dim: int) -> jax.Array:
        return shard


class ByHand(Collectives):
    """One collective each, for weights as well."""

    def weight(self, shard: jax.Array, dim: int) -> jax.Array:
        return lax.all_gather(shard, FSDP, axis=dim, tiled=True)


class Alone:
    """No communication: a device's own rows stand in for those of all.

    They are written, and blocks of rows added up, as a collective would do it on each
    device, and the gradient of either is the other.
    """

    def gather(self, x: jax.Array, rows: Rows, *, ends: bool = False) -> jax.Array:
        gathered = jnp.concatenate([x] * lax.axis_size(AXIS))
        return rows(lax.optimization_barrier(gathered))

    def scatter(self, h: jax.Array, w: jax.Array) -> jax.Array:
        # Behind a barrier, so that the product is computed whole.
        product = lax.optimization_barrier(h @ w)
        return jnp.sum(product.reshape(lax.axis_size(AXIS), -1, w.shape[1]), axis=0)

    def reduce(self, h: jax.Array, w: jax.Array) -> jax.Array:
        return h @ w

    def weight(self, shard: jax.Array, dim: int) -> jax.Array:
        whole = jnp.concatenate([shard] * lax.axis_size(FSDP), axis=dim)
        return lax.optimization_barrier(whole)


def gspmd(step: Step, mesh: Mesh, backward: bool) -> Any:
    """`jax.jit` of the global function, whose layouts are said."""
    ins, outs = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        (step.specs, step.out_specs(backward)),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )
    function = step.function(_global(step, mesh), backward)
    return jax.jit(function, in_shardings=ins, out_shardings=outs)


def plain(step: Step, mesh: Mesh, backward: bool) -> Any:
    """What anybody writes: `jax.shard_map`, one collective each."""
    return _by_hand(step, mesh, backward, ByHand(), _summed)


def compute(step: Step, mesh: Mesh, backward: bool) -> Any:
    """The same without any collective; its results are nobody's."""
    return _by_hand(step, mesh, backward, Alone(), lambda value, _: value)


def _by_hand(
    step: Step,
    mesh: Mesh,
    backward: bool,
    comm: StepCommunication,
    total: Callable[[jax.Array, tuple[str, ...]], jax.Array],
) -> Any:
    """Gradients are taken on each device, and those of copies added up at the end."""
    function = step.function(comm, backward)
    axes = step.axes.names

    def part(*operands: jax.Array) -> Any:
        if not backward:
            return total(function(*operands), axes)
        loss, gradients = function(*operands)
        pairs = zip(gradients, step.specs, strict=True)
        return total(loss, axes), tuple(
            total(gradient, step.axes.unnamed(spec)) for gradient, spec in pairs
        )

    outs = step.out_specs(backward)
    return jax.jit(per_device(part, mesh, step.specs, outs, check=False))


def _summed(value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(value, axes) if axes else value


def _global(step: Step, mesh: Mesh, marked: bool = True) -> Global:
    rows, columns = step.axes.rows, step.axes.columns
    return Global(NamedSharding(mesh, rows), NamedSharding(mesh, columns), marked)


def hosted(pipeline: Any, *, marked: bool = True) -> Arm:
    """jhost around the whole step, as it chooses or as it is told."""

    def arm(step: Step, mesh: Mesh, backward: bool) -> Any:
        return jhost.jit(
            step.function(_global(step, mesh, marked), backward),
            mesh=mesh,
            in_shardings=step.specs,
            out_shardings=step.out_specs(backward),
            pipeline=pipeline,
        )

    return arm


ARMS: Mapping[str, Arm] = {
    "plain": plain,
    "gspmd": gspmd,
    "compute": compute,
    "jhost": hosted("auto"),
    "jhost_p2p": hosted("p2p"),
    "jhost_off": hosted("off"),
}
"""In the order in which they take turns; results are compared with the first."""

UNCHECKED = ("compute",)
