"""`jhost.pytest_plugin`, as a project of a user's turns it on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jhost

CONFTEST = 'pytest_plugins = ["jhost.pytest_plugin"]\n'

TESTS = """
import jax
import pytest

def test_devices(make_mesh):
    assert jax.device_count() == {count}
    assert make_mesh(({count},), ("tp",)).shape == {{"tp": {count}}}

@pytest.mark.devices({count})
def test_enough():
    pass

@pytest.mark.devices({count} + 1)
def test_too_few():
    raise AssertionError
"""


def run(
    folder: Path, conftest: str, ini: str = "", flags: str = "", count: int = 8
) -> str:
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(TESTS.format(count=count))
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\n{ini}")
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"],
        cwd=folder,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTEST_ADDOPTS": "",  # options of our tests, which others do not have
            "XLA_FLAGS": flags,
            "PYTHONPATH": str(Path(jhost.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
    )
    return finished.stdout + finished.stderr


@pytest.mark.parametrize(
    ("ini", "flags", "count"),
    [
        pytest.param("", "", 8, marks=pytest.mark.slow),
        ("jhost_devices = 3\n", "", 3),
        pytest.param(
            "", "--xla_force_host_platform_device_count=2", 2, marks=pytest.mark.slow
        ),
    ],
)
def test_the_cpu_is_as_many_devices_as_asked(
    tmp_path: Path, ini: str, flags: str, count: int
) -> None:
    said = run(tmp_path, CONFTEST, ini, flags, count=count)
    assert "2 passed, 1 skipped" in said
    assert f"needs {count + 1} devices; there are {count}" in said


@pytest.mark.slow
def test_a_backend_that_runs_already_is_said(tmp_path: Path) -> None:
    said = run(tmp_path, f"import jax\njax.devices()\n{CONFTEST}", count=8)
    assert "cannot make virtual devices: JAX has started already" in said


@pytest.mark.slow
def test_a_count_that_is_none_is_said(tmp_path: Path) -> None:
    said = run(tmp_path, CONFTEST, "jhost_devices = many\n", count=8)
    assert "jhost_devices = many is no number of devices" in said
