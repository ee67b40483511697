"""How to get from one layout to another: the communications that move the fewest bytes.

The table is in `docs/design.md`, "Communications".  Each mesh axis is handled by
itself, so any number of axes works.  Dijkstra's search finds the cheapest way.  The
solver asks what a reshard costs, and `convert_to_communications` asks for its steps.
Both use `plan_reshard`, so they never disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeAlias

from jhost.lowering.ir.layout import (
    Layout,
    Partial,
    axes_size,
    is_layout,
    local_shape,
    swapped,
    used_axes,
)
from jhost.lowering.ir.transfers import received_bytes
from jhost.lowering.rules.reducers import Reducer

ReshardKind: TypeAlias = Literal[
    "Select", "ReduceScatter", "AllReduce", "AllToAll", "AllGather", "SwapAxes"
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReshardStep:
    """One communication, or the local Select that keeps this device's part of a dim.

    `layout` and `partial` are what the value has afterwards.  AllToAll splits `dim`
    and puts `source_dim` together.
    """

    kind: ReshardKind
    axes: tuple[str, ...]
    layout: Layout
    partial: Partial
    dim: int | None = None
    source_dim: int | None = None
    reducer: Reducer | None = None


def plan_reshard(
    source: Layout, target: Layout, partial: Partial, mesh: Mapping[str, int]
) -> tuple[ReshardStep, ...]:
    """The steps that turn a value from `source` into `target`, reducing `partial`.

    They receive the fewest bytes of all ways, then are the fewest communications, and
    then make the least on the way.  So where rows and columns trade places and one of
    them comes together, the gather is last, and a loop can take it in.
    """
    return _cheapest(source, target, partial, tuple(mesh.items()))


_Entry: TypeAlias = tuple[int, int, int, int, Layout, Partial, tuple[ReshardStep, ...]]
"""Bytes, communications, what is made, order of arrival; where that leads, and how."""


# Asked for every candidate of every operation, and mostly for the same layouts.
@functools.lru_cache(maxsize=4096)
def _cheapest(
    source: Layout,
    target: Layout,
    partial: Partial,
    sizes: tuple[tuple[str, int], ...],
) -> tuple[ReshardStep, ...]:
    """Dijkstra's search over layouts.

    A dim only takes axes that shard it at the source or at the target, so it divides.
    """
    for layout in (source, target):
        assert is_layout(layout), f"an axis shards two dims of {layout}"
    mesh, ticket = dict(sizes), itertools.count()
    # A shape that every layout divides: only the ratios of bytes matter.
    shape = (math.prod(mesh.values()) ** 2,)
    queue: list[_Entry] = [(0, 0, 0, next(ticket), source, partial, ())]
    seen: set[tuple[Layout, frozenset[tuple[str, Reducer]]]] = set()
    while queue:
        cost, count, made, _, here, left, steps = heapq.heappop(queue)
        # Dijkstra's search takes the cheapest first, so the first to arrive is best.
        if here == target and not left:
            return steps
        if (here, frozenset(left)) in seen:
            continue
        seen.add((here, frozenset(left)))
        for step in _steps(here, target, left, mesh):
            more = step_bytes(step, (tuple(itertools.chain(*here)),), shape, 1, mesh)
            size = local_shape(shape, (tuple(itertools.chain(*step.layout)),), mesh)[0]
            rank = cost + more, count + (step.kind != "Select"), made + size
            entry = (*rank, next(ticket), step.layout, step.partial, (*steps, step))
            heapq.heappush(queue, entry)
    raise AssertionError(f"no steps lead from {source} to {target}")


def step_bytes(
    step: ReshardStep,
    source: Layout,
    shape: Sequence[int],
    itemsize: int,
    mesh: Mapping[str, int],
) -> int:
    """The bytes that each device receives in `step`, coming from layout `source`."""
    held = math.prod(local_shape(shape, source, mesh)) * itemsize
    if step.kind == "Select":
        return 0
    return received_bytes(step.kind, held, axes_size(step.axes, mesh))


# --- One step each ------------------------------------------------------------ #


def _steps(
    here: Layout, target: Layout, left: Partial, mesh: Mapping[str, int]
) -> Iterator[ReshardStep]:
    """The possible next steps; those that make the value smaller come first."""
    yield from _selects(here, target, left)
    yield from _reduce_scatters(here, target, left)
    yield from _all_reduces(here, left)
    yield from _all_to_alls(here, target, left)
    yield from _all_gathers(here, target, left)
    yield from _swaps(here, left, mesh)


def _lacking(source: Layout, target: Layout, dim: int) -> tuple[str, ...]:
    """The axes that `dim` still needs, if it keeps all axes that it has."""
    have, want = source[dim], target[dim]
    return want[len(have) :] if want[: len(have)] == have else ()


def _append(layout: Layout, dim: int, axes: tuple[str, ...]) -> Layout:
    return (*layout[:dim], (*layout[dim], *axes), *layout[dim + 1 :])


def _truncate(layout: Layout, dim: int, length: int) -> Layout:
    return (*layout[:dim], layout[dim][:length], *layout[dim + 1 :])


def _selects(source: Layout, target: Layout, partial: Partial) -> Iterator[ReshardStep]:
    # An axis can shard only one dim, and no dim while the value is partial over it.
    busy = used_axes(source) | {axis for axis, _ in partial}
    for dim in range(len(source)):
        axes = _lacking(source, target, dim)[:1]
        if axes and axes[0] not in busy:
            layout = _append(source, dim, axes)
            yield ReshardStep(
                kind="Select", axes=axes, dim=dim, layout=layout, partial=partial
            )


def _reduce_scatters(
    source: Layout, target: Layout, partial: Partial
) -> Iterator[ReshardStep]:
    """Onto one axis, or onto several at once that have one reducer."""
    reducers: dict[str, Reducer] = dict(partial)
    for dim, axes in _placed(source, target):
        found: set[Reducer | None] = {reducers.get(axis) for axis in axes}
        reducer = found.pop()
        # One collective has one reducer.
        if reducer is not None and not found:
            yield ReshardStep(
                kind="ReduceScatter",
                axes=axes,
                dim=dim,
                reducer=reducer,
                layout=_append(source, dim, axes),
                partial=tuple(entry for entry in partial if entry[0] not in axes),
            )


def _all_reduces(source: Layout, partial: Partial) -> Iterator[ReshardStep]:
    reducers: list[Reducer] = [reducer for _, reducer in partial]
    for reducer in dict.fromkeys(reducers):
        axes = tuple(axis for axis, other in partial if other == reducer)
        yield ReshardStep(
            kind="AllReduce",
            axes=axes,
            reducer=reducer,
            layout=source,
            partial=tuple(entry for entry in partial if entry[0] not in axes),
        )


def _all_to_alls(
    source: Layout, target: Layout, partial: Partial
) -> Iterator[ReshardStep]:
    """Along one axis, or along several at once that are the minor ones of a dim."""
    for dim, axes in _placed(source, target):
        for other, have in enumerate(source):
            # Other axes cannot leave a dim without reordering its elements.
            if have[-len(axes) :] == axes and other != dim:
                left = _truncate(source, other, len(have) - len(axes))
                yield ReshardStep(
                    kind="AllToAll",
                    axes=axes,
                    dim=dim,
                    source_dim=other,
                    layout=_append(left, dim, axes),
                    partial=partial,
                )


def _placed(source: Layout, target: Layout) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The dims that lack axes, each with the next axis and with several at once."""
    for dim in range(len(source)):
        lacking = _lacking(source, target, dim)
        for count in range(1, len(lacking) + 1):
            yield dim, lacking[:count]


def _all_gathers(
    source: Layout, target: Layout, partial: Partial
) -> Iterator[ReshardStep]:
    for dim, (have, want) in enumerate(zip(source, target, strict=True)):
        common = 0
        while common < min(len(have), len(want)) and have[common] == want[common]:
            common += 1
        # Axes leave from the minor end, so that the rest keeps its order.
        for kept in range(common, len(have)):
            yield ReshardStep(
                kind="AllGather",
                axes=have[kept:],
                dim=dim,
                layout=_truncate(source, dim, kept),
                partial=partial,
            )


def _swaps(
    source: Layout, partial: Partial, mesh: Mapping[str, int]
) -> Iterator[ReshardStep]:
    """Two axes of one size trade places, in one permutation of the shards."""
    used = used_axes(source)
    free = [axis for axis in mesh if axis not in dict(partial)]
    for axes in itertools.combinations(free, 2):
        # Axes of different sizes would change the sizes of shards.
        if mesh[axes[0]] == mesh[axes[1]] > 1 and not used.isdisjoint(axes):
            layout = swapped(source, axes)
            yield ReshardStep(
                kind="SwapAxes", axes=axes, layout=layout, partial=partial
            )
