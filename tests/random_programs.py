"""Random programs of whole numbers, which hypothesis draws for the tests.

A program is a list of steps, each of which takes values made so far; inputs and results
have random shardings over random meshes, and some values are marked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jhost
from jhost import errors
from jhost.lowering import marks
from tests.lowering.hand_built import mesh_of
from tests.random_steps import Kinds, Step, alone, contraction, elementwise

MESHES = {
    "one device": {},
    "2": {"a": 2},
    "4": {"a": 4},
    "8": {"a": 8},
    "2 x 2": {"a": 2, "b": 2},
    "4 x 2": {"a": 4, "b": 2},
    "2 x 2 x 2": {"a": 2, "b": 2, "c": 2},
    "1 x 4": {"a": 1, "b": 4},
}

REFUSALS = (*marks.REFUSALS, errors.StreamConflictError)
"""What a mark at random may rightly run into."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays of whole numbers, its arguments, and where they are."""

    dtype: Any
    mesh: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[str, Step], ...]
    results: tuple[int, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    chunks: int | str

    def __repr__(self) -> str:
        steps = ", ".join(name for name, _ in self.steps)
        return (
            f"Case({self.mesh}, {self.shapes} -> {steps} -> {self.results}, "
            f"in={self.in_specs}, out={self.out_specs}, chunks={self.chunks})"
        )

    def function(self, *args: Any) -> tuple[Any, ...]:
        values = list(args)
        for _, step in self.steps:
            values.append(step(values))
        return tuple(values[i] for i in self.results)

    def arguments(self) -> list[np.ndarray]:
        random = np.random.default_rng(0)
        return [random.integers(-3, 4, s).astype(self.dtype) for s in self.shapes]

    def settings(self, results: bool = True) -> dict[str, Any]:
        """What `jhost.jit` is told, with or without where the results are to be."""
        if not self.mesh:
            return {"chunks": self.chunks}
        return {
            "chunks": self.chunks,
            "mesh": mesh_of(**self.mesh),
            "in_shardings": self.in_specs,
            **({"out_shardings": self.out_specs} if results else {}),
        }

    def placed(self) -> list[Any]:
        """The arguments, where the function takes them."""
        if not self.mesh:
            return self.arguments()
        mesh = mesh_of(**self.mesh)
        return [
            jax.device_put(argument, NamedSharding(mesh, spec))
            for argument, spec in zip(self.arguments(), self.in_specs, strict=True)
        ]


def random_spec(
    draw: Any, shape: tuple[int, ...], mesh: dict[str, int], uneven: bool = False
) -> PartitionSpec:
    """A sharding that JAX allows: each axis on a dim that it divides, or on none.

    Inside a function it need not divide the dim: `uneven`.
    """
    entries: list[list[str]] = [[] for _ in shape]
    for axis, size in mesh.items():
        fitting = [
            dim
            for dim, n in enumerate(shape)
            if uneven or n % (math.prod(mesh[a] for a in entries[dim]) * size) == 0
        ]
        dim = draw(st.sampled_from([*fitting, None]))
        if dim is not None:
            entries[dim].append(axis)
    return PartitionSpec(*(tuple(e) if e else None for e in entries))


def mark(
    draw: Any, shapes: Sequence[tuple[int, ...]], mesh: dict[str, int]
) -> tuple[str, Step]:
    """A stream on some value, or a sharding."""
    ranked = [i for i, shape in enumerate(shapes) if shape]
    i = draw(st.sampled_from(ranked))
    if mesh and draw(st.integers(0, 3)) == 0:
        spec = random_spec(draw, shapes[i], mesh, uneven=True)
        return f"shard({i}, {spec})", lambda values: jhost.shard(values[i], spec)
    dim = draw(st.integers(0, len(shapes[i]) - 1))
    # Of several pieces a device, where there are few enough devices.
    counts = [None, None, *(n for n in (4, 8) if n <= shapes[i][dim])]
    count = draw(st.sampled_from(counts))
    settings: dict[str, Any] = {"pipeline": "p2p", "chunks": count}
    if draw(st.booleans()):
        least, most = min(2, shapes[i][dim]), min(4, shapes[i][dim])
        settings = {"chunks": draw(st.integers(least, most))}
    return (
        f"stream({i}, {dim}, {settings})",
        lambda values: jhost.stream(values[i], dim, **settings),
    )


@st.composite
def cases(draw: st.DrawFn, kinds: Kinds) -> Case:
    mesh = MESHES[draw(st.sampled_from(sorted(MESHES)))]
    sizes = st.sampled_from([4, 8, 2, 6, 16, 12, 3, 5, 1, 10, 7])
    shape = st.lists(sizes, min_size=1, max_size=3).map(tuple)
    shapes = draw(st.lists(shape, min_size=1, max_size=3))
    inputs = tuple(shapes)
    steps: list[tuple[str, Step]] = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from([elementwise, alone, contraction, None, None]))
        made = kind(draw, shapes, kinds) if kind else mark(draw, shapes, mesh)
        result = jax.eval_shape(
            lambda *values, made=made: made[1](list(values)),
            *(jax.ShapeDtypeStruct(s, kinds.dtype) for s in shapes),
        )
        if result.size > 2000 or result.ndim > 4:
            continue
        steps.append(made)
        shapes.append(result.shape)
    results = draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=3))
    return Case(
        dtype=kinds.dtype,
        mesh=mesh,
        shapes=inputs,
        steps=tuple(steps),
        results=tuple(results),
        in_specs=tuple(random_spec(draw, s, mesh) for s in inputs),
        out_specs=tuple(random_spec(draw, shapes[i], mesh) for i in results),
        chunks=draw(st.sampled_from(["auto", "auto", 1, 2, 3])),
    )
