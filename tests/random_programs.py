"""Random programs of whole numbers, which hypothesis draws for the tests.

A program is a list of steps, each of which takes values made so far; inputs and results
have random shardings over random meshes, and some values are marked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import jax
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jhost
from jhost import errors
from jhost.lowering.ir import requests
from tests.lowering.hand_built import mesh_of
from tests.random_bodies import Draw, holding
from tests.random_shard_maps import mapped
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

OF_MORE_AXES = tuple(sorted(name for name, axes in MESHES.items() if len(axes) > 1))

REFUSALS = (*requests.REFUSALS, errors.StreamConflictError)
"""What a mark at random may rightly run into."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of arrays of whole numbers, its arguments, and where they are.

    `kinds` says of each argument whether it is an array, one of weak type, or a number
    of Python's; `numbers` are more results.  `static` are the places at which static
    arguments stand among the others.
    """

    dtype: Any
    mesh: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]
    steps: tuple[tuple[str, Step], ...]
    results: tuple[int, ...]
    numbers: tuple[Any, ...]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    chunks: int | str
    called: str
    static: tuple[int, ...]
    pipeline: str = "auto"

    def __repr__(self) -> str:
        steps = ", ".join(name for name, _ in self.steps)
        return (
            f"Case({self.mesh}, {self.shapes} {self.kinds} -> {steps} -> "
            f"{self.results}, {self.numbers}, in={self.in_specs}, "
            f"out={self.out_specs}, chunks={self.chunks}, {self.called}, "
            f"static={self.static}, pipeline={self.pipeline})"
        )

    def count(self) -> None:
        """Tells hypothesis's statistics of what kind the case is."""
        steps = {f"step {name.partition('(')[0]}" for name, _ in self.steps}
        kinds = {f"argument {kind}" for kind in self.kinds}
        ways = {f"called {self.called or 'as a function'}", f"wish {self.pipeline}"}
        for kind in {*steps, *kinds, *ways}:
            hypothesis.event(kind)
        for size in {0, 1}.intersection(sum(self.shapes, ())):
            hypothesis.event(f"a dim of {size}")

    def function(self, *args: Any) -> tuple[Any, ...]:
        values = list(args)
        for _, step in self.steps:
            values.append(step(values))
        return (*(values[i] for i in self.results), *self.numbers)

    def compiled(self, jit: Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled by `jit` in the way that it is called."""
        match self.called:
            case "with static arguments":
                return self._with_static(jit)
            case "as a method":
                return self._as_method(jit)
            case _:
                return jit(self.function)

    def _with_static(self, jit: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            held = [arg for n, arg in enumerate(args) if n in self.static]
            assert all(isinstance(name, str) for name in held)
            return self.function(*(a for a in args if not isinstance(a, str)))

        def call(*args: Any) -> Any:
            given = list(args)
            for place in self.static:
                given.insert(place, f"argument {place}")
            return compiled(*given)

        compiled = jit(function, static_argnums=self.static)
        return call

    def _as_method(self, jit: Callable[..., Any]) -> Callable[..., Any]:
        """Of an object that holds the first argument."""

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass(frozen=True)
        class Holder:
            first: Any
            run = jit(lambda holder, *rest: self.function(holder.first, *rest))

        return lambda first, *rest: Holder(first).run(*rest)

    def arguments(self, most: int = 3, special: Sequence[float] = ()) -> list[Any]:
        """The same on every call: whole numbers, or some `special` ones among them."""
        random = np.random.default_rng(0)
        given: list[Any] = []
        for shape, kind in zip(self.shapes, self.kinds, strict=True):
            # By way of an int8: numpy makes no int4 of anything wider.
            array = random.integers(-most, most + 1, shape).astype(np.int8)
            array = array.astype(self.dtype)
            if special:
                others = random.choice(special, shape)
                array = np.where(random.random(shape) < 0.2, others, array)
            given.append(_as_kind(kind, array.astype(self.dtype)))
        return given

    def settings(self, results: bool = True) -> dict[str, Any]:
        """What `jhost.jit` is told, with or without where the results are to be."""
        wishes = {"chunks": self.chunks, "pipeline": self.pipeline}
        if not self.mesh:
            return wishes
        return {
            **wishes,
            "mesh": mesh_of(**self.mesh),
            "in_shardings": self.in_specs,
            **({"out_shardings": self.out_specs} if results else {}),
        }

    def placed(self, arguments: Sequence[Any] | None = None) -> list[Any]:
        """The arguments, where the function takes them."""
        arguments = self.arguments() if arguments is None else arguments
        if not self.mesh:
            return [*arguments]
        mesh = mesh_of(**self.mesh)
        return [
            jax.device_put(argument, NamedSharding(mesh, spec))
            if hasattr(argument, "shape")
            else argument
            for argument, spec in zip(arguments, self.in_specs, strict=True)
        ]


def _as_kind(kind: str, array: np.ndarray) -> Any:
    scalar = type(array.dtype.type(0).item())
    match kind:
        case "number":
            return array.item()
        case "weak":
            return lax.convert_element_type(array, scalar)
        case _:
            return array


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
        least, most = (max(1, min(n, shapes[i][dim])) for n in (2, 4))
        settings = {"chunks": draw(st.integers(least, most))}
    return (
        f"stream({i}, {dim}, {settings})",
        lambda values: jhost.stream(values[i], dim, **settings),
    )


def _marking(mesh: dict[str, int]) -> Draw:
    """Draws a mark, or where there is no dim to mark another step."""

    def drawn(
        draw: Any, shapes: Sequence[tuple[int, ...]], kinds: Kinds
    ) -> tuple[str, Step]:
        if not any(shapes):
            return elementwise(draw, shapes, kinds)
        return mark(draw, shapes, mesh)

    return drawn


@st.composite
def cases(
    draw: st.DrawFn,
    kinds: Kinds,
    most_steps: int = 8,
    meshes: Sequence[str] = tuple(sorted(MESHES)),
) -> Case:
    mesh = MESHES[draw(st.sampled_from(meshes))]
    sizes = st.sampled_from([4, 8, 2, 6, 16, 12, 3, 5, 1, 10, 7, 0])
    shape = st.lists(sizes, min_size=1, max_size=3).map(tuple)
    inputs = draw(st.lists(shape, min_size=1, max_size=3))
    # Python's numbers, and what has a weak type, are as wide as JAX's own.
    weak = ["weak"] if np.dtype(kinds.dtype).name in ("int32", "float32") else []
    array = st.sampled_from(["array", "array", *weak])
    of_inputs = [draw(array) for _ in inputs]
    if draw(st.integers(0, 3)) == 0:
        inputs.append(())
        of_inputs.append(
            draw(st.sampled_from([*(["number"] if weak else []), "array"]))
        )
    shapes = list(inputs)
    steps: list[tuple[str, Step]] = []
    flat: list[Draw] = [elementwise, alone, contraction, _marking(mesh)]
    if kinds.mapped:
        flat.append(lambda d, s, k: mapped(d, s, mesh, random_spec))
    # Alone, a function that is called has no mesh.
    in_calls: list[Draw] = [elementwise, alone, contraction, _marking({})]
    inner: list[Draw] = [*flat, lambda d, s, k: holding(d, s, k, flat, in_calls)]
    for _ in range(draw(st.integers(1, most_steps))):
        drawn = draw(st.sampled_from([*flat, _marking(mesh), None]))
        try:
            made = (
                drawn(draw, shapes, kinds)
                if drawn
                else holding(draw, shapes, kinds, inner, in_calls)
            )
            result = jax.eval_shape(
                lambda *values, made=made: made[1](list(values)),
                *(jax.ShapeDtypeStruct(s, kinds.dtype) for s in shapes),
            )
        except REFUSALS:  # a jhost function within, lowered alone
            continue
        if result.size > 2000 or result.ndim > 4:
            continue
        steps.append(made)
        shapes.append(result.shape)
    results = draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=3))
    numbers = draw(st.sampled_from([(), (), (2,), (2.0, True)]))
    called = draw(st.sampled_from(["", "", "with static arguments", "as a method"]))
    places = st.lists(st.integers(0, len(inputs)), max_size=2, unique=True)
    return Case(
        dtype=kinds.dtype,
        mesh=mesh,
        shapes=tuple(inputs),
        kinds=tuple(of_inputs),
        steps=tuple(steps),
        results=tuple(results),
        numbers=numbers,
        in_specs=tuple(random_spec(draw, s, mesh) for s in inputs),
        out_specs=(
            *(random_spec(draw, shapes[i], mesh) for i in results),
            *(PartitionSpec() for _ in numbers),
        ),
        chunks=draw(st.sampled_from(["auto", "auto", 1, 2, 3])),
        called=called,
        static=tuple(sorted(draw(places))),
        pipeline=draw(st.sampled_from(["auto", "auto", "p2p", "collective", "off"])),
    )
