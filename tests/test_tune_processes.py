"""`jhost.tune` in several processes: all choose the same, and one writes it down."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.xla_flags import QUICKLY

SCRIPT = Path(__file__).parent / "tune_in_processes.py"


@pytest.mark.slow
def test_all_processes_take_the_same_choice(tmp_path: Path) -> None:
    """Each has a cache folder of its own; only that of process 0 is used."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "XLA_FLAGS": QUICKLY,
    }
    # -P: beside the script stands tests/jhost, which is not jhost.
    script = [sys.executable, "-P", str(SCRIPT)]
    processes = [
        subprocess.Popen(
            [*script, str(port), "2", str(number), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | {"JHOST_CACHE_DIR": str(tmp_path / f"cache-{number}")},
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    written = [path.read_text() for path in tmp_path.glob("tuning-*-of-*")]
    assert len(written) == 4
    assert len(set(written)) == 1
    caches = [len(list((tmp_path / f"cache-{n}").rglob("*.json"))) for n in range(2)]
    assert caches == [1, 0]
