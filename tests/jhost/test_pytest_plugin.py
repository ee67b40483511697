"""`jhost.pytest_plugin`, as a project of a user's turns it on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

import jhost
from jhost import pytest_plugin

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
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # so that others' take no time
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
        ("jhost_devices = 3\n", "", 3),
        pytest.param(
            "jhost_devices = 3\n",
            "--xla_force_host_platform_device_count=2",
            2,
            marks=pytest.mark.slow,
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


class Ini:
    """What pytest's configuration has in it."""

    def __init__(self, count: str) -> None:
        self.count = count

    def addinivalue_line(self, *_: str) -> None:
        pass

    def getini(self, name: str) -> str:
        assert name == "jhost_devices"
        return self.count


def test_a_count_that_is_none_is_said() -> None:
    with pytest.raises(pytest.UsageError, match="= many is no number of devices"):
        pytest_plugin.pytest_configure(cast(pytest.Config, Ini("many")))


def test_it_is_eight_devices_unless_more_or_fewer_are_asked_for(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(pytest_plugin, "ask_for_cpu_devices", asked.append)
    for count in (str(pytestconfig.getini("jhost_devices")), "3"):
        pytest_plugin.pytest_configure(cast(pytest.Config, Ini(count)))
    assert asked == [8, 3]
