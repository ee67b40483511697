"""The examples run."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_the_mlp_runs_in_any_number_of_chunks(
    chunks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLES / "mlp.py"))["main"]
    main(["--chunks", str(chunks), "--rows", "8"])
    out = capsys.readouterr().out
    assert out.startswith("mlp: 1 loop" if chunks > 1 else "mlp: 0 loops")
    assert "AllGather" in out
    assert "gradient: (128, 512)" in out


@pytest.mark.slow
def test_several_processes_give_what_one_gives() -> None:
    # -P: beside the examples may stand what has the name of a package.
    script = str(EXAMPLES / "multi_process.py")
    command = [sys.executable, "-P", script, "--rows", "4", "--width", "16"]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "p2p pipeline: 4 chunks" in done.stdout
    for line in (
        "process 0: rows 0 to 8 are right",
        "process 1: rows 8 to 16 are right",
    ):
        assert line in done.stdout
