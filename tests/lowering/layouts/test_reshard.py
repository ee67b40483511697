"""The plans by which a value gets from one layout to another, and what they cost."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jhost.lowering.ir.layout import (
    Layout,
    Partial,
    axes_size,
    local_shape,
    replicated,
    used_axes,
)
from jhost.lowering.layouts.reshard import ReshardStep, plan_reshard, step_bytes
from jhost.lowering.rules.reducers import Reducer
from tests import budget
from tests.lowering.traced import reshard_bytes


def layout(*dims: str) -> Layout:
    """`layout("dp tp", "")`: the first dim over dp and tp, the second whole."""
    return tuple(tuple(dim.split()) for dim in dims)


SIZES = {"dp": 2, "tp": 4, "s": 3, "t": 3}


def plan(source: Layout, target: Layout, partial: Partial = ()) -> list[str]:
    """The steps in short: kind, axes, dim split or gathered, dim it comes from."""
    steps: list[str] = []
    for step in plan_reshard(source, target, partial, SIZES):
        text = f"{step.kind} {','.join(step.axes)}"
        text += "" if step.source_dim is None else f" {step.source_dim} to"
        text += "" if step.dim is None else f" {step.dim}"
        steps.append(text + (f" {step.reducer}" if step.reducer else ""))
    return steps


# --- The table of the design -------------------------------------------------------- #


def test_equal_layouts_need_nothing() -> None:
    assert plan(layout("tp", ""), layout("tp", "")) == []


def test_a_sharded_dim_wanted_whole_is_gathered() -> None:
    assert plan(layout("tp", ""), layout("", "")) == ["AllGather tp 0"]


def test_a_partial_sum_wanted_whole_is_reduced_everywhere() -> None:
    steps = plan(layout("", ""), layout("", ""), (("tp", "sum"),))
    assert steps == ["AllReduce tp sum"]


def test_a_partial_sum_wanted_sharded_is_reduced_and_scattered() -> None:
    steps = plan(layout("", ""), layout("", "tp"), (("tp", "max"),))
    assert steps == ["ReduceScatter tp 1 max"]


def test_a_dim_wanted_where_another_is_sharded_is_exchanged() -> None:
    assert plan(layout("tp", ""), layout("", "tp")) == ["AllToAll tp 0 to 1"]


def test_a_whole_dim_wanted_sharded_is_selected_by_rank() -> None:
    assert plan(layout("", ""), layout("", "tp")) == ["Select tp 1"]


def test_another_axis_of_the_size_takes_the_place_of_the_first() -> None:
    assert plan(layout("s"), layout("t")) == ["SwapAxes s,t"]
    assert plan(layout("s", "t"), layout("t", "s")) == ["SwapAxes s,t"]
    assert plan(layout("s t"), layout("t s")) == ["SwapAxes s,t"]


def test_another_axis_of_another_size_is_selected_after_a_gather() -> None:
    assert plan(layout("dp"), layout("tp")) == ["AllGather dp 0", "Select tp 0"]


def test_partial_sums_are_scattered_over_two_axes_at_once() -> None:
    partial: Partial = (("dp", "sum"), ("tp", "sum"))
    steps = plan(layout("", ""), layout("dp tp", ""), partial)
    assert steps == ["ReduceScatter dp,tp 0 sum"]
    partial = (("dp", "max"), ("tp", "sum"))
    steps = plan(layout("", ""), layout("dp tp", ""), partial)
    assert steps == ["ReduceScatter dp 0 max", "ReduceScatter tp 0 sum"]


# --- Several axes ------------------------------------------------------------------- #


@pytest.mark.parametrize(
    ("source", "target", "partial", "steps"),
    [
        # Each axis on its own, on dims of its own.
        (("dp", "tp"), ("dp", ""), {}, ["AllGather tp 1"]),
        (("dp", "tp"), ("", ""), {}, ["AllGather dp 0", "AllGather tp 1"]),
        (("dp", ""), ("dp", "tp"), {"tp": "sum"}, ["ReduceScatter tp 1 sum"]),
        # Two axes of one dim are gathered at once; the major one stays where it may.
        (("dp tp", ""), ("", ""), {}, ["AllGather dp,tp 0"]),
        (("dp tp", ""), ("dp", ""), {}, ["AllGather tp 0"]),
        # Only the minor-most axis of a dim can leave it.
        (("dp tp", ""), ("dp", "tp"), {}, ["AllToAll tp 0 to 1"]),
        # One all-reduce for one reducer, another for another.
        (("", ""), ("", ""), {"dp": "sum", "tp": "sum"}, ["AllReduce dp,tp sum"]),
        (
            ("", ""),
            ("", ""),
            {"dp": "sum", "tp": "max"},
            ["AllReduce dp sum", "AllReduce tp max"],
        ),
        # What makes the value smaller comes first.
        (
            ("", "dp"),
            ("tp", ""),
            {},
            ["Select tp 0", "AllGather dp 1"],
        ),
        (
            ("dp", ""),
            ("", "tp"),
            {"tp": "sum"},
            ["ReduceScatter tp 1 sum", "AllGather dp 0"],
        ),
    ],
)
def test_several_axes(
    source: tuple[str, ...],
    target: tuple[str, ...],
    partial: Mapping[str, Reducer],
    steps: list[str],
) -> None:
    assert plan(layout(*source), layout(*target), tuple(partial.items())) == steps


# --- Any layouts: the steps are carried out ----------------------------------------- #

Mesh = Mapping[str, int]
Device = tuple[int, ...]
Parts = Mapping[Device, np.ndarray]

COMBINE: dict[Reducer, Callable[..., np.ndarray]] = {"sum": np.add, "max": np.maximum}


def devices_of(mesh: Mesh) -> list[Device]:
    return list(itertools.product(*(range(size) for size in mesh.values())))


def rank(mesh: Mesh, device: Device, axes: Sequence[str]) -> int:
    """The position of `device` along `axes` together, the first one major."""
    position = 0
    for axis in axes:
        position = position * mesh[axis] + device[list(mesh).index(axis)]
    return position


def group(mesh: Mesh, device: Device, axes: Sequence[str]) -> list[Device]:
    """The devices that differ from `device` along `axes` only, by rank."""
    others = [number for number, axis in enumerate(mesh) if axis not in axes]
    members = [
        other
        for other in devices_of(mesh)
        if all(other[i] == device[i] for i in others)
    ]
    return sorted(members, key=lambda other: rank(mesh, other, axes))


def cut(
    mesh: Mesh, value: np.ndarray, dim: int, axes: Sequence[str], device: Device
) -> np.ndarray:
    """This device's part of a dim, which has to divide."""
    return np.split(value, axes_size(axes, mesh), dim)[rank(mesh, device, axes)]


def part_of(mesh: Mesh, value: np.ndarray, dims: Layout, device: Device) -> np.ndarray:
    for dim, axes in enumerate(dims):
        value = cut(mesh, value, dim, axes, device)
    return value


def distribute(mesh: Mesh, value: np.ndarray, dims: Layout, partial: Partial) -> Parts:
    """`value` over the devices; parts that are partial combine to it."""
    parts = {d: part_of(mesh, value, dims, d).copy() for d in devices_of(mesh)}
    for axis, reducer in partial:
        for device in parts:
            if rank(mesh, device, (axis,)) > 0:
                first = group(mesh, device, (axis,))[0]
                parts[device] = np.full_like(parts[first], -7)
                if reducer == "sum":
                    parts[first] = parts[first] + 7
    return parts


def combined(step: ReshardStep, members: Sequence[np.ndarray]) -> np.ndarray:
    assert step.reducer is not None
    return functools.reduce(COMBINE[step.reducer], members)


def result(mesh: Mesh, step: ReshardStep, parts: Parts, device: Device) -> np.ndarray:
    """What `device` has after `step`."""
    members = [parts[other] for other in group(mesh, device, step.axes)]
    match step:
        case ReshardStep(kind="Select", dim=int(dim)):
            return cut(mesh, parts[device], dim, step.axes, device)
        case ReshardStep(kind="AllGather", dim=int(dim)):
            return np.concatenate(members, dim)
        case ReshardStep(kind="AllReduce", dim=None):
            return combined(step, members)
        case ReshardStep(kind="ReduceScatter", dim=int(dim)):
            return cut(mesh, combined(step, members), dim, step.axes, device)
        case ReshardStep(kind="AllToAll", dim=int(dim), source_dim=int(source_dim)):
            received = [cut(mesh, part, dim, step.axes, device) for part in members]
            return np.concatenate(received, source_dim)
        case ReshardStep(kind="SwapAxes", axes=(one, other)):
            mirrored = list(device)
            first, second = list(mesh).index(one), list(mesh).index(other)
            mirrored[first], mirrored[second] = mirrored[second], mirrored[first]
            return parts[tuple(mirrored)]
        case _:
            pytest.fail(f"{step} lacks a dim")


def assert_leads_there(
    source: Layout, target: Layout, partial: Partial, mesh: Mesh
) -> None:
    """Carried out step by step on numbers, the plan gives every device its part."""
    size = axes_size(list(mesh), mesh)
    value = np.arange(size ** len(source)).reshape((size,) * len(source))
    parts = distribute(mesh, value, source, partial)
    here, left = source, dict(partial)
    for step in plan_reshard(source, target, partial, mesh):
        check_step(step, here, left)
        parts = {device: result(mesh, step, parts, device) for device in parts}
        here, left = step.layout, dict(step.partial)
        expected = local_shape(value.shape, here, mesh)
        assert {part.shape for part in parts.values()} == {expected}
    assert (here, left) == (target, {})
    for device, part in parts.items():
        np.testing.assert_array_equal(part, part_of(mesh, value, target, device))


def check_step(step: ReshardStep, here: Layout, left: Mapping[str, Reducer]) -> None:
    """The step is legal for a value in layout `here` with the reductions `left`."""
    assert step.axes
    reduces = step.kind in ("AllReduce", "ReduceScatter")
    assert (step.reducer is not None) == reduces
    if reduces:
        assert all(left[axis] == step.reducer for axis in step.axes)
    else:
        assert not left.keys() & set(step.axes)
    assert dict(step.partial) == {
        axis: reducer
        for axis, reducer in left.items()
        if not (reduces and axis in step.axes)
    }
    axes = [axis for dim in step.layout for axis in dim]
    assert len(axes) == len(set(axes))
    if step.kind in ("Select", "ReduceScatter"):
        assert used_axes(step.layout) == used_axes(here) | set(step.axes)


@st.composite
def layouts(draw: st.DrawFn, axes: Sequence[str], rank: int) -> Layout:
    """Each of `axes` on some dim, in any order, or on none."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in draw(st.permutations(axes)):
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            dims[place].append(axis)
    return tuple(map(tuple, dims))


@st.composite
def reshards(
    draw: st.DrawFn,
) -> tuple[Layout, Layout, Partial, Mesh]:
    names = ["dp", "fsdp", "tp"][: draw(st.integers(1, 3))]
    mesh = {name: draw(st.sampled_from([2, 3])) for name in names}
    rank = draw(st.integers(1, 2 if len(names) == 3 else 3))
    source, target = draw(layouts(names, rank)), draw(layouts(names, rank))
    reducer = draw(st.sampled_from(list(COMBINE)))
    free = [name for name in names if name not in used_axes(source)]
    partial: Partial = tuple((name, reducer) for name in free if draw(st.booleans()))
    return source, target, partial, mesh


@given(reshards())
def test_every_plan_leads_from_source_to_target(
    case: tuple[Layout, Layout, Partial, Mesh],
) -> None:
    assert_leads_there(*case)


def steps_along(
    source: Layout, target: Layout, partial: Partial, mesh: Mesh
) -> Iterator[tuple[ReshardStep, Layout]]:
    for step in plan_reshard(source, target, partial, mesh):
        yield step, source
        source = step.layout


@given(reshards())
@settings(max_examples=budget.examples(30))
def test_what_a_plan_costs_is_the_sum_of_its_steps(
    case: tuple[Layout, Layout, Partial, Mesh],
) -> None:
    source, target, partial, mesh = case
    shape = (axes_size(list(mesh), mesh),) * len(source)
    steps = steps_along(source, target, partial, mesh)
    wanted = sum(step_bytes(step, here, shape, 4, mesh) for step, here in steps)
    assert reshard_bytes(source, target, partial, shape, 4, mesh) == wanted


# --- What each step costs ----------------------------------------------------------- #


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize(
    ("source", "target", "partial", "received"),
    [
        # A value of n bytes on D devices: what each receives, by a ring.
        ("tp", "", None, lambda n, d: n // d * (d - 1)),
        ("", "", "sum", lambda n, d: 2 * n * (d - 1) // d),
        ("", "tp", "sum", lambda n, d: n * (d - 1) // d),
        ("", "tp", None, lambda n, d: 0),
    ],
)
def test_bytes_received(
    devices: int,
    source: str,
    target: str,
    partial: Reducer | None,
    received: Callable[[int, int], int],
) -> None:
    mesh, shape, itemsize = {"tp": devices}, (16, 24), 2
    reductions: Partial = () if partial is None else (("tp", partial),)
    cost = reshard_bytes(
        layout(source, ""), layout(target, ""), reductions, shape, itemsize, mesh
    )
    assert cost == received(16 * 24 * itemsize, devices)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_an_exchange_moves_all_of_a_shard_but_ones_own_part(devices: int) -> None:
    mesh, shape = {"tp": devices}, (16, 24)
    cost = reshard_bytes(layout("tp", ""), layout("", "tp"), (), shape, 4, mesh)
    shard = 16 * 24 * 4 // devices
    assert cost == shard * (devices - 1) // devices


def test_the_other_axes_make_every_step_cheaper() -> None:
    mesh, shape = {"dp": 2, "tp": 4}, (16, 24)
    cost = reshard_bytes(layout("dp", "tp"), layout("dp", ""), (), shape, 4, mesh)
    assert cost == (16 // 2) * (24 // 4) * 4 * (4 - 1)


def test_two_axes_are_one_larger_ring() -> None:
    mesh, shape = {"dp": 2, "tp": 4}, (16, 24)
    partial: Partial = (("dp", "sum"), ("tp", "sum"))
    cost = reshard_bytes(replicated(2), replicated(2), partial, shape, 4, mesh)
    assert cost == 2 * 16 * 24 * 4 * 7 // 8
