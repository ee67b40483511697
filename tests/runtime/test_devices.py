"""What is known of the devices of a mesh."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from jhost.runtime.devices import all_devices, assumed, devices_of

KIND = jax.devices()[0].device_kind


def test_the_devices_of_a_mesh(
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
) -> None:
    devices = devices_of(make_mesh((2, 2), ("dp", "tp")))
    assert (devices.kind, devices.count, devices.processes) == (KIND, 4, 1)


def test_without_a_mesh_those_that_there_are() -> None:
    assert devices_of(None).count == jax.device_count()
    assert devices_of(AbstractMesh((2,), ("tp",))).count == 2


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a GPU of JAX's as tells where it is."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def gpus(hosts: int, processes: int, each: int) -> list[Device]:
    """GPUs of so many processes a host, in JAX's order."""
    places = itertools.product(range(hosts), range(processes), range(each))
    return [
        Device(number, host * processes + process, host)
        for number, (host, process, _) in enumerate(places)
    ]


class Laid(NamedTuple):
    """A mesh's axes, hosts, processes a host and GPUs a process; how far each lies."""

    shape: dict[str, int]
    gpus: tuple[int, int, int]
    reach: dict[str, str]
    copied: set[str]


@pytest.mark.parametrize(
    "laid",
    [
        Laid({"tp": 4}, (1, 1, 4), {"tp": "process"}, {"tp"}),
        Laid({"tp": 4}, (1, 4, 1), {"tp": "host"}, set()),
        Laid({"tp": 4}, (1, 2, 2), {"tp": "host"}, set()),
        Laid({"tp": 4}, (4, 1, 1), {"tp": "hosts"}, set()),
        Laid({"dp": 2, "tp": 2}, (2, 1, 2), {"dp": "hosts", "tp": "process"}, {"tp"}),
        Laid({"tp": 2, "dp": 2}, (1, 2, 2), {"tp": "host", "dp": "process"}, {"dp"}),
        Laid({"dp": 1, "tp": 2}, (1, 2, 1), {"tp": "host"}, set()),
        Laid(
            {"dp": 2, "fsdp": 2, "tp": 2},
            (2, 2, 2),
            {"dp": "hosts", "fsdp": "host", "tp": "process"},
            {"tp"},
        ),
        Laid({"tp": 1}, (1, 1, 1), {}, set()),
    ],
)
def test_permutes_are_copies_along_axes_within_a_process(laid: Laid) -> None:
    grid = np.empty(tuple(laid.shape.values()), dtype=object)
    grid.flat = gpus(*laid.gpus)
    devices = devices_of(Mesh(grid, tuple(laid.shape)))
    assert dict(devices.reach) == laid.reach
    assert devices.copied == laid.copied
    assert not dataclasses.replace(devices, platform="cpu").copied


def test_devices_that_are_not_here_are_taken_to_be_in_one_process() -> None:
    many = AbstractMesh((2 * jax.device_count(),), ("tp",))
    assert devices_of(many).reach == {"tp": "process"}


def test_all_devices_of_one_process_are_a_row() -> None:
    mesh = all_devices()
    assert dict(mesh.shape) == {"processes": 1, "devices": jax.device_count()}


def test_devices_that_are_not_there_can_be_assumed() -> None:
    with assumed("NVIDIA H200"):
        there = devices_of(None)
        assert (there.platform, there.kind) == ("gpu", "NVIDIA H200")
    assert devices_of(None).kind == KIND
