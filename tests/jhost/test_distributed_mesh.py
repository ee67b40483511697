"""`jhost.distributed.make_mesh`, over GPUs of several processes that are not there."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from jax.sharding import AxisType

from jhost import distributed, errors
from jhost.runtime.devices import devices_of
from tests.runtime.test_devices import gpus


def test_of_one_process_it_is_as_jax_makes_it() -> None:
    axes = {"dp": 2, "tp": 4}
    mesh = distributed.make_mesh(axes)
    auto = (AxisType.Auto,) * 2
    assert mesh == jax.make_mesh((2, 4), ("dp", "tp"), axis_types=auto)
    explicit = (AxisType.Explicit, AxisType.Auto)
    assert distributed.make_mesh(axes, axis_types=explicit).axis_types == explicit


def test_axes_that_stay_within_a_process_need_not_be_last() -> None:
    eight = gpus(hosts=2, processes=1, each=4)
    mesh = distributed.make_mesh({"tp": 4, "dp": 2}, within="tp", devices=eight)
    assert np.vectorize(lambda d: d.id)(mesh.devices).tolist() == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert devices_of(mesh).reach == {"tp": "process", "dp": "hosts"}


def test_what_room_a_process_has_goes_to_the_other_axes() -> None:
    eight = gpus(hosts=2, processes=1, each=4)
    mesh = distributed.make_mesh({"dp": 4, "tp": 2}, devices=eight)
    hosts = np.vectorize(lambda d: d.process_index)(mesh.devices)
    assert hosts.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    each=st.integers(1, 8),
    data=st.data(),
)
def test_every_device_stands_once_and_inner_axes_within_a_process(
    sizes: list[int], each: int, data: st.DataObject
) -> None:
    count = math.prod(sizes)
    assume(count % each == 0)
    axes = {f"a{number}": size for number, size in enumerate(sizes)}
    within = data.draw(st.lists(st.sampled_from(sorted(axes)), unique=True))
    there = gpus(hosts=1, processes=count // each, each=each)
    fits = each % math.prod(axes[axis] for axis in within) == 0
    if not fits:
        with pytest.raises(errors.OptionError, match="within a process, which has"):
            distributed.make_mesh(axes, within=within, devices=there)
        return
    mesh = distributed.make_mesh(axes, within=within, devices=there)
    assert dict(mesh.shape) == axes
    assert {device.id for device in mesh.devices.flat} == set(range(count))
    reach = devices_of(mesh).reach
    assert {reach.get(axis, "process") for axis in within} <= {"process"}


FOUR = gpus(hosts=2, processes=1, each=2)


@pytest.mark.parametrize(
    ("axes", "how", "error", "text"),
    [
        ({"tp": 4}, {}, errors.OptionError, "lay tp=4 within a process, which has 2 "),
        (
            {"dp": 4, "tp": 2},
            {},
            errors.OptionError,
            "4 in all. JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8",
        ),
        ({"dp": 3}, {}, errors.OptionError, "2 of process 0, 1 of process 1"),
        ({"dp": 4}, {"within": "tp"}, errors.UnknownAxisError, "its axes are dp"),
        ({"dp": 0}, {}, errors.ArgumentError, "whole numbers above 0"),
        ({"dp": True}, {}, errors.ArgumentError, "whole numbers above 0"),
        ({1: 4}, {}, errors.ArgumentError, "a mapping from names"),
        ({}, {}, errors.ArgumentError, "a mapping from names"),
        ((2, 2), {}, errors.ArgumentError, r"but got \(2, 2\)"),
    ],
)
def test_what_cannot_be_laid_is_refused(
    axes: Any, how: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        distributed.make_mesh(axes, devices=FOUR, **how)


def test_across_processes_where_nothing_has_to_stay() -> None:
    mesh = distributed.make_mesh({"tp": 4}, within=(), devices=FOUR)
    assert devices_of(mesh).reach == {"tp": "hosts"}
