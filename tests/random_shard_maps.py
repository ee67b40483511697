"""Steps of random programs that are a `jax.shard_map`: specs, a body, collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec

from jhost._annotate import spec_entries
from tests.lowering.hand_built import mesh_of
from tests.random_steps import Step

Entries: TypeAlias = list[tuple[str, ...]]
Body: TypeAlias = Callable[[Any, Any], Any]


class Made(NamedTuple):
    """A body on two parts, the axes of its result's dims, and those it speaks of."""

    name: str
    body: Body
    out: Entries
    over: tuple[str, ...] = ()


def mapped(
    draw: Any,
    shapes: Sequence[tuple[int, ...]],
    mesh: Mapping[str, int],
    specs: Callable[..., PartitionSpec],
) -> tuple[str, Step]:
    """A body on the parts of two values of one shape, each sharded at random."""
    full = [i for i, shape in enumerate(shapes) if shape and 0 not in shape]
    if not full or not mesh:
        return "neg(0)", lambda values: -values[0]
    i = draw(st.sampled_from(full))
    j = draw(st.sampled_from([k for k in full if shapes[k] == shapes[i]]))
    spec = specs(draw, shapes[i], mesh)
    entries = [entry or () for entry in spec_entries(spec)]
    part = [
        size // math.prod(mesh[a] for a in entry)
        for size, entry in zip(shapes[i], entries, strict=True)
    ]
    make = draw(st.sampled_from(_BODIES))
    made = make(draw, part, entries, mesh) or _alone(draw, part, entries, mesh)
    used = {*sum(entries, ()), *sum(made.out, ()), *made.over}
    how = _settings(draw, mesh, used)

    def step(values: Sequence[Any]) -> Any:
        map_over: Any = jax.shard_map
        out_spec = PartitionSpec(*(entry or None for entry in made.out))
        specs = (spec, spec)
        return map_over(made.body, in_specs=specs, out_specs=out_spec, **how)(
            values[i], values[j]
        )

    settings = {n: v for n, v in how.items() if n != "mesh"}
    return f"shard_map({i}, {j}, {spec}, {made.name}, {settings})", step


def _settings(draw: Any, mesh: Mapping[str, int], used: set[str]) -> dict[str, Any]:
    how: dict[str, Any] = {"mesh": mesh_of(**mesh), "check_vma": draw(st.booleans())}
    if used and draw(st.integers(0, 3)) == 0:
        how["axis_names"] = used
    return how


# --- Bodies ------------------------------------------------------------------------- #


def _alone(draw: Any, part: Sequence[int], entries: Entries, mesh: Any) -> Made:
    del draw, part, mesh
    return Made("twice", lambda x, y: x + y + y, entries)


def _along(draw: Any, part: Sequence[int], entries: Entries, mesh: Any) -> Made:
    """What the parts give alone is no part of what the whole would give."""
    del mesh
    dim = draw(st.integers(0, len(part) - 1))

    def body(x: Any, y: Any) -> Any:
        return lax.cumsum(x, dim) + lax.rev(y, [dim])

    return Made(f"cumsum {dim}", body, entries)


def _ranked(draw: Any, part: Sequence[int], entries: Entries, mesh: Any) -> Made | None:
    del part, mesh
    axes = sum(entries, ())
    if not axes:
        return None
    axis = draw(st.sampled_from(axes))

    def body(x: Any, y: Any) -> Any:
        return x + y * lax.axis_index(axis).astype(x.dtype)

    return Made(f"axis_index over {axis}", body, entries, (axis,))


def _reduced(draw: Any, part: Sequence[int], entries: Entries, mesh: Any) -> Made:
    axis = draw(st.sampled_from(sorted(mesh)))
    del part

    def body(x: Any, y: Any) -> Any:
        def again(_: Any, total: Any) -> Any:
            return total + lax.psum(x - y, axis)

        return lax.fori_loop(0, 2, again, lax.psum(y, axis))

    out = [tuple(a for a in entry if a != axis) for entry in entries]
    return Made(f"psum over {axis}", body, out, (axis,))


def _scalar(draw: Any, part: Sequence[int], entries: Entries, mesh: Any) -> Made:
    del draw, part, entries
    axes = tuple(mesh)

    def body(x: Any, y: Any) -> Any:
        total = (x - y).sum(dtype=x.dtype)
        for axis in axes:  # types may know of one that all have the same along it
            total = lax.psum(total, axis)
        return total

    return Made("total", body, [], axes)


def _gathered(
    draw: Any, part: Sequence[int], entries: Entries, mesh: Any
) -> Made | None:
    """Over the last axis of a dim, the most minor."""
    del part, mesh
    dims = [dim for dim, entry in enumerate(entries) if entry]
    if not dims:
        return None
    dim = draw(st.sampled_from(dims))
    (*rest, axis) = entries[dim]
    other = [*entries]
    other[dim] = tuple(rest)

    def body(x: Any, y: Any) -> Any:
        # Types take what each has gathered to differ, and what is added up to be alike.
        return lax.psum(lax.all_gather(x - y, axis, axis=dim, tiled=True), axis)

    return Made(f"all_gather over {axis}", body, other, (axis,))


def _scattered(
    draw: Any, part: Sequence[int], entries: Entries, mesh: Any
) -> Made | None:
    used = set(sum(entries, ()))
    free = [
        (axis, dim)
        for axis in sorted(set(mesh) - used)
        for dim, size in enumerate(part)
        if size % mesh[axis] == 0
    ]
    if not free:
        return None
    axis, dim = draw(st.sampled_from(free))
    out = [*entries]
    out[dim] = (*out[dim], axis)

    def body(x: Any, y: Any) -> Any:
        return lax.psum_scatter(x - y, axis, scatter_dimension=dim, tiled=True)

    return Made(f"psum_scatter over {axis}", body, out, (axis,))


def _handed_on(
    draw: Any, part: Sequence[int], entries: Entries, mesh: Any
) -> Made | None:
    del part
    axes = sum(entries, ())
    if not axes:
        return None
    axis = draw(st.sampled_from(axes))
    around = [(k, (k + 1) % mesh[axis]) for k in range(mesh[axis])]

    def body(x: Any, y: Any) -> Any:
        return x - lax.ppermute(y, axis, around)

    return Made(f"ppermute over {axis}", body, entries, (axis,))


def _exchanged(
    draw: Any, part: Sequence[int], entries: Entries, mesh: Any
) -> Made | None:
    """From the last axis of one dim to the end of another's."""
    ways = [
        (axis, dim, other)
        for dim, entry in enumerate(entries)
        for axis in entry[-1:]
        for other, size in enumerate(part)
        if other != dim and size % mesh[axis] == 0
    ]
    if not ways:
        return None
    axis, dim, other = draw(st.sampled_from(ways))
    out = [*entries]
    out[dim], out[other] = out[dim][:-1], (*out[other], axis)

    def body(x: Any, y: Any) -> Any:
        return lax.all_to_all(x + y, axis, other, dim, tiled=True)

    return Made(f"all_to_all over {axis}", body, out, (axis,))


_BODIES: list[Callable[..., Made | None]] = [
    _alone,
    _along,
    _ranked,
    _reduced,
    _scalar,
    _gathered,
    _scattered,
    _handed_on,
    _exchanged,
]
