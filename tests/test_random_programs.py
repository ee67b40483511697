"""Random programs: jhost's results are the plain function's, exactly for integers.

A program is a list of steps drawn by hypothesis, each of which takes values made so
far; inputs and results have random shardings over random meshes, and some values are
marked.  What hypothesis ever found wrong stands below as an example of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jhost
from jhost import errors

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

REFUSALS = (
    errors.StreamDimError,
    errors.StreamConflictError,
    errors.ChunksError,
    errors.PipelineError,
)
"""What a mark at random may rightly run into."""

Values = list[Any]
Step = Callable[[Values], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of integer arrays, its arguments, and where they are."""

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
        return [random.integers(-3, 4, s, dtype=np.int32) for s in self.shapes]


# --- Steps -------------------------------------------------------------------- #


def elementwise(draw: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[str, Step]:
    """One of the primitives that work element by element, on values of one shape."""
    i = draw(st.integers(0, len(shapes) - 1))
    j = draw(st.sampled_from([k for k, s in enumerate(shapes) if s == shapes[i]]))
    name = draw(st.sampled_from(sorted(ELEMENTWISE)))
    function = ELEMENTWISE[name]
    return f"{name}({i}, {j})", lambda values: function(values[i], values[j])


ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "neg": lambda x, y: lax.neg(x),
    "sign": lambda x, y: lax.sign(x),
    "abs": lambda x, y: lax.abs(x),
    "not": lambda x, y: lax.bitwise_not(x),
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
    "xor": lax.bitwise_xor,
    "rem": lambda x, y: lax.rem(x, lax.abs(y) + np.int32(1)),
    "select_n": lambda x, y: lax.select(lax.lt(x, y), x, y),
    "clamp": lambda x, y: lax.clamp(np.int32(-2), x, np.int32(2)),
    "integer_pow": lambda x, y: lax.integer_pow(x, 2),
    "shift_left": lambda x, y: lax.shift_left(x, np.int32(1)),
    "convert_element_type": lambda x, y: (lax.gt(x, y)).astype(jnp.int32),
    "copy": lambda x, y: jnp.copy(x),
    "jit": lambda x, y: jax.jit(lambda a, b: a * np.int32(2) - b)(x, y),
    "remat2": lambda x, y: jax.checkpoint(lambda a, b: a + b * b)(x, y),
    "serial": lambda x, y: jhost.serial(x),
    "optimization_barrier": lambda x, y: lax.add(*lax.optimization_barrier((x, y))),
}


def alone(draw: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[str, Step]:
    """One of the primitives that rearrange or reduce a value."""
    i = draw(st.integers(0, len(shapes) - 1))
    shape = shapes[i]
    makers = [name for name in ALONE if shape or name == "broadcast_in_dim"]
    name = draw(st.sampled_from(makers))
    dim = draw(st.integers(0, max(len(shape) - 1, 0)))
    text, function = ALONE[name](draw, shape, dim)
    return f"{name}({i}{text})", lambda values: function(values[i])


def _reshape(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    sizes = list(shape)
    if len(sizes) > 1 and draw(st.booleans()):
        dim = min(dim, len(sizes) - 2)
        sizes[dim : dim + 2] = [sizes[dim] * sizes[dim + 1]]
    else:
        outer = draw(st.sampled_from([d for d in range(1, 13) if shape[dim] % d == 0]))
        sizes[dim : dim + 1] = [outer, shape[dim] // outer]
    return f", {tuple(sizes)}", lambda x: lax.reshape(x, tuple(sizes))


def _reduce(function: Any) -> Any:
    return lambda draw, shape, dim: (f", {dim}", lambda x: function(x, axis=dim))


def _along(function: Any) -> Any:
    return lambda draw, shape, dim: (f", {dim}", lambda x: function(x, axis=dim))


def _slice(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    start = draw(st.integers(0, shape[dim] - 1))
    stop = draw(st.integers(start + 1, shape[dim]))
    return f", {dim}, {start}:{stop}", lambda x: lax.slice_in_dim(
        x, start, stop, axis=dim
    )


def _dynamic_slice(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    size = draw(st.integers(1, shape[dim]))

    def function(x: Any) -> Any:
        start = lax.abs(lax.reshape(x, (x.size,))[0])
        return lax.dynamic_slice_in_dim(x, start, size, axis=dim)

    return f", {dim}, {size}", function


def _dynamic_update(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    def function(x: Any) -> Any:
        update = lax.slice_in_dim(x, 0, 1, axis=dim) + np.int32(7)
        return lax.dynamic_update_slice_in_dim(x, update, shape[dim] - 1, axis=dim)

    return f", {dim}", function


def _pad(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    config = [(0, 0, 0)] * len(shape)
    config[dim] = (draw(st.integers(0, 2)), draw(st.integers(0, 2)), 0)
    return f", {config}", lambda x: lax.pad(x, np.int32(5), config)


def _transpose(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    order = draw(st.permutations(range(len(shape))))
    return f", {order}", lambda x: lax.transpose(x, order)


def _broadcast(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    size = draw(st.integers(1, 4))
    return f", {size}", lambda x: jnp.broadcast_to(x, (size, *shape))


def _iota(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    return f", {dim}", lambda x: x + lax.broadcasted_iota(jnp.int32, shape, dim)


def _gather(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    rows = draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=5))
    return f", {rows}", lambda x: x[np.array(rows)]


def _scatter_add(draw: Any, shape: tuple[int, ...], dim: int) -> Any:
    rows = draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=5))
    return f", {rows}", lambda x: x.at[np.array(rows)].add(np.int32(3))


ALONE: dict[str, Callable[[Any, tuple[int, ...], int], Any]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "expand_dims": lambda draw, shape, dim: ("", lambda x: lax.expand_dims(x, [dim])),
    "squeeze": lambda draw, shape, dim: ("", jnp.squeeze),
    "concatenate": lambda draw, shape, dim: (
        f", {dim}",
        lambda x: lax.concatenate([x, x], dim),
    ),
    "pad": _pad,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "rev": lambda draw, shape, dim: (f", {dim}", lambda x: lax.rev(x, [dim])),
    "iota": _iota,
    "gather": _gather,
    "scatter-add": _scatter_add,
    "reduce_sum": _reduce(jnp.sum),
    "reduce_max": _reduce(jnp.max),
    "reduce_min": _reduce(jnp.min),
    "reduce_prod": _reduce(jnp.prod),
    "reduce_and": _reduce(lambda x, axis: jnp.all(x > 0, axis).astype(jnp.int32)),
    "reduce_or": _reduce(lambda x, axis: jnp.any(x > 0, axis).astype(jnp.int32)),
    "argmax": _reduce(lambda x, axis: lax.argmax(x, axis, jnp.int32)),
    "argmin": _reduce(lambda x, axis: lax.argmin(x, axis, jnp.int32)),
    "cumsum": _along(lax.cumsum),
    "cummax": _along(lax.cummax),
    "sort": _along(lambda x, axis: lax.sort(x, dimension=axis)),
    "top_k": lambda draw, shape, dim: ("", lambda x: lax.top_k(x, 1)[0]),
    "while": lambda draw, shape, dim: (
        "",
        lambda x: lax.fori_loop(0, 2, lambda i, y: y + x, x),
    ),
}


def contraction(draw: Any, shapes: Sequence[tuple[int, ...]]) -> tuple[str, Step]:
    """A dot_general over dims of equal size, with batch dims where they are too."""
    ranked = [i for i, shape in enumerate(shapes) if shape]
    i = draw(st.sampled_from(ranked))
    dim = draw(st.integers(0, len(shapes[i]) - 1))
    fitting = [
        (j, other)
        for j in ranked
        for other, size in enumerate(shapes[j])
        if size == shapes[i][dim] and len(shapes[i]) + len(shapes[j]) <= 5
    ]
    if not fitting:
        return f"neg({i})", lambda values: -values[i]
    j, other = draw(st.sampled_from(fitting))
    if draw(st.booleans()) and dim == other == 0 and len(shapes[i]) == 1:
        dims = (((), ()), ((dim,), (other,)))
    else:
        dims = (((dim,), (other,)), ((), ()))
    return f"dot_general({i}, {j}, {dims})", lambda v: lax.dot_general(v[i], v[j], dims)


# --- Cases -------------------------------------------------------------------- #


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
def cases(draw: st.DrawFn) -> Case:
    mesh = MESHES[draw(st.sampled_from(sorted(MESHES)))]
    sizes = st.sampled_from([4, 8, 2, 6, 16, 12, 3, 5, 1, 10, 7])
    shape = st.lists(sizes, min_size=1, max_size=3).map(tuple)
    shapes = draw(st.lists(shape, min_size=1, max_size=3))
    inputs = tuple(shapes)
    steps: list[tuple[str, Step]] = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from([elementwise, alone, contraction, None, None]))
        made = kind(draw, shapes) if kind else mark(draw, shapes, mesh)
        result = jax.eval_shape(
            lambda *values, made=made: made[1](list(values)),
            *(jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes),
        )
        if result.size > 2000 or result.ndim > 4:
            continue
        steps.append(made)
        shapes.append(result.shape)
    results = draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=3))
    return Case(
        mesh=mesh,
        shapes=inputs,
        steps=tuple(steps),
        results=tuple(results),
        in_specs=tuple(random_spec(draw, s, mesh) for s in inputs),
        out_specs=tuple(random_spec(draw, shapes[i], mesh) for i in results),
        chunks=draw(st.sampled_from(["auto", "auto", 1, 2, 3])),
    )


# --- The tests ---------------------------------------------------------------- #


def check(case: Case) -> None:
    """Emission and interpretation give what the plain function gives."""
    arguments = case.arguments()
    expected = jax.jit(case.function)(*arguments)
    settings: dict[str, Any] = {"chunks": case.chunks}
    placed: list[Any] = list(arguments)
    if case.mesh:
        names = tuple(case.mesh)
        types = (AxisType.Auto,) * len(names)
        mesh = jax.make_mesh(tuple(case.mesh.values()), names, axis_types=types)
        shardings = [NamedSharding(mesh, spec) for spec in case.in_specs]
        placed = [
            jax.device_put(a, s) for a, s in zip(arguments, shardings, strict=True)
        ]
        settings |= {
            "mesh": mesh,
            "in_shardings": case.in_specs,
            "out_shardings": case.out_specs,
        }
    try:
        result = jhost.jit(case.function, **settings)(*placed)
    except REFUSALS:
        return
    chex.assert_trees_all_equal(result, expected)
    interpreted = jhost.jit(case.function, interpret=True, **settings)(*placed)
    chex.assert_trees_all_equal(interpreted, expected)


@hypothesis.settings(hypothesis.settings.get_profile("programs"))
@given(cases())
def test_random_programs_equal_the_plain_function(case: Case) -> None:
    check(case)
