"""A pytest plugin: virtual devices, a fixture that makes meshes, a marker for devices.

A project turns it on with `pytest_plugins = ["jhost.pytest_plugin"]` in its top
`conftest.py`, or with `-p jhost.pytest_plugin`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import jax
import pytest
from jax.sharding import AxisType, Mesh

from jhost.runtime.devices import ask_for_cpu_devices

_PATIENCE = "xla_cpu_collective_call_terminate_timeout_seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "jhost_devices",
        "the number of virtual devices of the CPU, unless XLA_FLAGS or JAX's "
        "configuration sets it",
        default="8",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "devices(count): skips the test if there are fewer devices"
    )
    count = str(config.getini("jhost_devices"))
    if not count.isdecimal() or int(count) < 1:
        raise pytest.UsageError(f"jhost_devices = {count} is no number of devices")
    flags = os.environ.get("XLA_FLAGS", "")
    if _PATIENCE not in flags:
        # Many devices on few cores: XLA ends the process when a collective has waited
        # 40 seconds for its last participant.
        os.environ["XLA_FLAGS"] = f"{flags} --{_PATIENCE}=600".strip()
    try:
        ask_for_cpu_devices(int(count))
    except RuntimeError as error:
        raise pytest.UsageError(
            "jhost.pytest_plugin cannot make virtual devices: JAX has started already. "
            "Something used a device while pytest was loading plugins or conftest.py."
        ) from error


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("devices"):
        (count,) = marker.args
        if count > jax.device_count():
            pytest.skip(f"needs {count} devices; there are {jax.device_count()}")


@pytest.fixture(scope="session")
def make_mesh() -> Callable[[Sequence[int], Sequence[str]], Mesh]:
    """`make_mesh((2, 4), ("dp", "tp"))` makes a mesh of the first devices, all Auto."""

    def make(sizes: Sequence[int], names: Sequence[str]) -> Mesh:
        axis_types = (AxisType.Auto,) * len(names)
        return jax.make_mesh(tuple(sizes), tuple(names), axis_types=axis_types)

    return make
