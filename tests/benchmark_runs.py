"""Benchmarks as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.xla_flags import QUICKLY


def in_two_processes(module: str, path: Path, *options: str) -> dict[str, Any]:
    """The run that two processes have measured, of which one writes and prints."""
    command = [sys.executable, "-m", module, *options]
    done = subprocess.run(
        [*command, "--processes", "2", "--json", str(path)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICKLY},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"written: {path.name}") == 1
    return json.loads(path.read_text())
