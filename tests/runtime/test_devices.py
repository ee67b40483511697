"""What is known of the devices of a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import pytest
from jax.sharding import AbstractMesh, Mesh

from jhost.runtime.devices import Devices, devices_of

KIND = jax.devices()[0].device_kind


def test_the_devices_of_a_mesh(
    make_mesh: Callable[[Sequence[int], Sequence[str]], Mesh],
) -> None:
    devices = devices_of(make_mesh((2, 2), ("dp", "tp")))
    assert (devices.kind, devices.count, devices.processes) == (KIND, 4, 1)


def test_without_a_mesh_those_that_there_are() -> None:
    assert devices_of(None).count == jax.device_count()
    assert devices_of(AbstractMesh((2,), ("tp",))).count == 2


@pytest.mark.parametrize(
    ("platform", "count", "processes", "copies"),
    [
        ("gpu", 4, 1, True),
        ("gpu", 4, 4, False),
        ("gpu", 1, 1, False),
        ("cpu", 4, 1, False),
    ],
)
def test_permutes_are_copies_among_the_gpus_of_one_process(
    platform: str, count: int, processes: int, copies: bool
) -> None:
    devices = Devices(platform=platform, kind="", count=count, processes=processes)
    assert devices.copies_between_peers is copies
    assert dataclasses.replace(devices, processes=2).copies_between_peers is False
