"""Four H200s that are not there: XLA compiles for them, and nothing runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from tests.aot.on_h200 import MakeH200s

# What XLA knows of an H200, as JAX 0.11.2 wrote it on one; 0.12 reads it as well.
TARGET = Path(__file__).parents[1] / "targets" / "h200.pbtxt"


@pytest.fixture(scope="session")
def h200s(request: pytest.FixtureRequest) -> MakeH200s:
    """`h200s({"tp": 4})`: a mesh of those axes, of the four; `compile` works on it."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        if request.config.getoption("require_gpu_compiler"):
            pytest.fail("jax-cuda13-plugin is not installed")
        pytest.skip("needs jax-cuda13-plugin: pip install -e '.[test-gpu]'")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology="1x1x4"
    )

    def make(axes: Mapping[str, int]) -> Mesh:
        devices = np.array(topology.devices).reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    return make
