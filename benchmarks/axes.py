"""The axes of a run's mesh: rows lie over all of them, features over tp alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from benchmarks.communication import AXIS

FSDP = "fsdp"


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axes by their sizes: tp, and before it those that rows are split over as well.

    Over dp each device has all of a weight that its tp leaves it, over fsdp a shard.
    """

    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.sizes)

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.sizes)

    @property
    def tp(self) -> int:
        """The devices that communicate for a layer."""
        return dict(self.sizes)[AXIS]

    @property
    def groups(self) -> int:
        """How many of such groups share the rows."""
        return self.devices // self.tp

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that rows are split over, and features are not."""
        return tuple(axis for axis in self.names if axis != AXIS)

    @property
    def shards(self) -> str | None:
        """The axis that a weight is sharded over in its other dim, if there is one."""
        return FSDP if FSDP in self.names else None

    @property
    def rows(self) -> P:
        """The layout of activations between blocks."""
        return P((*self.batch, AXIS), None)

    @property
    def columns(self) -> P:
        """The layout of activations within blocks."""
        return P(self.batch or None, AXIS)

    @property
    def stacked(self) -> P:
        """Of what has a part of each device along dim 0."""
        return P(self.names)

    @property
    def whole(self) -> P:
        """The layout of activations that each device of a group has all of."""
        return P(self.batch) if self.batch else P()

    def unnamed(self, spec: P) -> tuple[str, ...]:
        """The axes over whose devices what has this layout is copied."""
        entries = [each if isinstance(each, tuple) else (each,) for each in spec]
        return tuple(a for a in self.names if not any(a in each for each in entries))

    def part(self, shape: Sequence[int], spec: P) -> tuple[int, ...]:
        """The shape that each device has of a whole one."""
        mesh = AbstractMesh(tuple(size for _, size in self.sizes), self.names)
        return NamedSharding(mesh, spec).shard_shape(tuple(shape))

    def mesh(self) -> Mesh:
        """A mesh of the first devices; the last axis has the devices of a process.

        Raises:
            ValueError: there are not as many.
        """
        if self.devices > jax.device_count():
            raise ValueError(
                f"--mesh: {self} takes {self.devices} devices, but there are "
                f"{jax.device_count()} (JAX_NUM_CPU_DEVICES=4 makes four of any CPU)"
            )
        devices: Any = np.array(jax.devices()[: self.devices])
        devices = devices.reshape([size for _, size in self.sizes])
        return Mesh(devices, self.names, axis_types=(AxisType.Auto,) * len(self.sizes))


def along_tp(devices: int) -> Axes:
    """The axes of so many devices, all along tp."""
    return Axes(((AXIS, devices),))


def parsed(text: str, others: Sequence[str] = ("dp",)) -> Axes:
    """Those of "dp=2,tp=2": tp, and any of the `others` before it.

    Raises:
        ValueError: it names others, or has no sizes.
    """
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(size.isdigit() and int(size) for _, _, size in pairs):
        raise ValueError(f"--mesh: sizes of axes, as dp=2,tp=2, but got {text}")
    sizes = {name: int(size) for name, _, size in pairs}
    if set(sizes) - {*others, AXIS} or AXIS not in sizes:
        wanted = " or ".join(others)
        raise ValueError(f"--mesh: tp, and {wanted} if wanted, but not {text}")
    return Axes(tuple(sizes.items()))
