"""How to get from one layout to another: a list of communications, cheapest first.

The table is section 6 of `docs/design.md`.  Each mesh axis is handled on its own, so
any number of axes works.  Propagation asks what a reshard costs, and
`convert_to_communications` what it consists of; both use `plan_reshard`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from jhost.lowering.ir import CommunicationKind
from jhost.lowering.layout import Layout, local_shape, size_in_bytes, used_axes
from jhost.lowering.rules import Reducer, axes_size

Partial: TypeAlias = tuple[tuple[str, Reducer], ...]
StepKind: TypeAlias = Literal[
    "Select", "ReduceScatter", "AllReduce", "AllToAll", "AllGather"
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One communication, or the local Select that keeps this device's part of a dim.

    `layout` and `partial` are what the value has afterwards.  AllToAll splits `dim`
    and puts `source_dim` together.
    """

    kind: StepKind
    axes: tuple[str, ...]
    layout: Layout
    partial: Partial
    dim: int | None = None
    source_dim: int | None = None
    reducer: Reducer | None = None


@functools.lru_cache(maxsize=4096)
def plan_reshard(source: Layout, target: Layout, partial: Partial) -> tuple[Step, ...]:
    """The steps that turn a value from `source` into `target`, reducing `partial`.

    What makes the value smaller comes first, so that later steps move less.
    """
    steps: list[Step] = []
    while source != target or partial:
        step = (
            _select(source, target, partial)
            or _reduce_scatter(source, target, partial)
            or _all_reduce(source, partial)
            or _all_to_all(source, target)
            or _all_gather(source, target)
        )
        steps.append(step)
        source, partial = step.layout, step.partial
    return tuple(steps)


def step_bytes(
    step: Step,
    source: Layout,
    shape: Sequence[int],
    itemsize: int,
    mesh: Mapping[str, int],
) -> int:
    """The bytes that each device receives in `step`, coming from layout `source`."""
    held = size_in_bytes(local_shape(shape, source, mesh), itemsize)
    if step.kind == "Select":
        return 0
    return received_bytes(step.kind, held, axes_size(step.axes, mesh))


def received_bytes(kind: CommunicationKind, held: int, devices: int) -> int:
    """The bytes that each device receives, of a value of which each holds `held` bytes.

    A ring moves (D-1)/D of the whole for a gather or a scatter and twice that for an
    all-reduce (Thakur, Rabenseifner and Gropp, 2005).
    """
    match kind:
        case "AllGather" | "Gather":
            return held * (devices - 1)
        case "AllReduce":
            return 2 * held * (devices - 1) // devices
        case "ReduceScatter" | "AllToAll" | "Scatter":
            return held * (devices - 1) // devices
        case "Broadcast" | "Reduce" | "CollectivePermute":
            return held


def reshard_bytes(
    source: Layout,
    target: Layout,
    partial: Partial,
    shape: Sequence[int],
    itemsize: int,
    mesh: Mapping[str, int],
) -> int:
    """The bytes that each device receives on the way from `source` to `target`."""
    total = 0
    for step in plan_reshard(source, target, partial):
        total += step_bytes(step, source, shape, itemsize, mesh)
        source = step.layout
    return total


# --- One step each ------------------------------------------------------------ #


def _next_axis(source: Layout, target: Layout, dim: int) -> str | None:
    """The axis that `dim` lacks next, if it has only axes that it shall keep."""
    have, want = source[dim], target[dim]
    if len(have) < len(want) and want[: len(have)] == have:
        return want[len(have)]
    return None


def _append(layout: Layout, dim: int, axis: str) -> Layout:
    return (*layout[:dim], (*layout[dim], axis), *layout[dim + 1 :])


def _truncate(layout: Layout, dim: int, length: int) -> Layout:
    return (*layout[:dim], layout[dim][:length], *layout[dim + 1 :])


def _select(source: Layout, target: Layout, partial: Partial) -> Step | None:
    busy = used_axes(source) | {axis for axis, _ in partial}
    for dim in range(len(source)):
        axis = _next_axis(source, target, dim)
        if axis is not None and axis not in busy:
            return Step(
                kind="Select",
                axes=(axis,),
                dim=dim,
                layout=_append(source, dim, axis),
                partial=partial,
            )
    return None


def _reduce_scatter(source: Layout, target: Layout, partial: Partial) -> Step | None:
    reducers = dict(partial)
    for dim in range(len(source)):
        axis = _next_axis(source, target, dim)
        if axis is not None and axis in reducers:
            return Step(
                kind="ReduceScatter",
                axes=(axis,),
                dim=dim,
                reducer=reducers[axis],
                layout=_append(source, dim, axis),
                partial=tuple(entry for entry in partial if entry[0] != axis),
            )
    return None


def _all_reduce(source: Layout, partial: Partial) -> Step | None:
    if not partial:
        return None
    reducer = partial[0][1]
    axes = tuple(axis for axis, other in partial if other == reducer)
    return Step(
        kind="AllReduce",
        axes=axes,
        reducer=reducer,
        layout=source,
        partial=tuple(entry for entry in partial if entry[0] not in axes),
    )


def _all_to_all(source: Layout, target: Layout) -> Step | None:
    for dim in range(len(source)):
        axis = _next_axis(source, target, dim)
        for other, have in enumerate(source):
            # Only the minor-most axis of a dim can leave it without a reordering.
            if axis is not None and have[-1:] == (axis,) and other != dim:
                moved = _append(_truncate(source, other, len(have) - 1), dim, axis)
                return Step(
                    kind="AllToAll",
                    axes=(axis,),
                    dim=dim,
                    source_dim=other,
                    layout=moved,
                    partial=(),
                )
    return None


def _all_gather(source: Layout, target: Layout) -> Step:
    for dim, (have, want) in enumerate(zip(source, target, strict=True)):
        kept = 0
        while kept < min(len(have), len(want)) and have[kept] == want[kept]:
            kept += 1
        if kept < len(have):
            return Step(
                kind="AllGather",
                axes=have[kept:],
                dim=dim,
                layout=_truncate(source, dim, kept),
                partial=(),
            )
    raise AssertionError(f"no step leads from {source} to {target}")
