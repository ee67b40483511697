"""One program in several processes, as `jax.distributed` runs it, on CPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "run_in_processes.py"


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_all_processes_get_what_the_plain_function_gives(count: int) -> None:
    """Two devices each; forward and backward, integers, exactly."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "XLA_FLAGS": "",
    }
    processes = [
        subprocess.Popen(
            # -P: beside the script stands tests/jhost, which is not jhost.
            [sys.executable, "-P", str(SCRIPT), str(port), str(count), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err in outputs:
        said = [line for line in out.splitlines() if "True" in line or "False" in line]
        assert said == [
            "p2p: (True, True)",
            "collective: (True, True)",
            "off: (True, True)",
        ], err
