"""The examples run."""

from __future__ import annotations

import runpy
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
