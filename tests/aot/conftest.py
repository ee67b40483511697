"""H200s that are not there: XLA compiles for them, and nothing runs."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from tests.aot.on_h200 import MakeH200s

# By name: what JAX calls to ask for a GPU has no public name.
CUDNN: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")

# What XLA knows of an H200, as JAX 0.11.2 wrote it on one; 0.12 reads it as well.
TARGET = Path(__file__).parents[1] / "targets" / "h200.pbtxt"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX takes this machine for one with an H200 and cuDNN."""
    monkeypatch.setattr(CUDNN, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(CUDNN, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(CUDNN, "is_cuda_compute_capability_equal", lambda _: False)


@pytest.fixture(scope="session")
def h200s(request: pytest.FixtureRequest) -> MakeH200s:
    """`h200s({"tp": 4})`: a mesh of those axes, of the four; `compile` works on it."""
    return _maker(request, "1x1x4")


@pytest.fixture(scope="session")
def two_processes(request: pytest.FixtureRequest) -> MakeH200s:
    """The same, where the first two are of one process and the others of another."""
    return _maker(request, "1x2x2")


def _maker(request: pytest.FixtureRequest, topology: str) -> MakeH200s:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        if request.config.getoption("require_gpu_compiler"):
            pytest.fail("jax-cuda13-plugin is not installed")
        pytest.skip("needs jax-cuda13-plugin: pip install -e '.[test-gpu]'")
    found = topologies.get_topology_desc(
        platform="cuda", target_config=TARGET.read_text(), topology=topology
    )

    def make(axes: Mapping[str, int]) -> Mesh:
        devices = np.array(found.devices).reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    return make
