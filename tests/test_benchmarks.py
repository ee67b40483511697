"""The benchmarks run; their times are not asserted."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / name))


def test_the_overhead_of_a_call_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    main = script("call_overhead.py")["main"]
    main(["--blocks", "2", "--calls", "3", "--json", str(path)])
    figures = json.loads(path.read_text())
    table = capsys.readouterr().out
    assert len(figures["rows"]) == 4
    for row in figures["rows"]:
        assert row["case"] in table
        for name in ("plain", "jhost"):
            assert 0 < row["minimum_us"][name] <= row["median_us"][name]
        more = row["minimum_us"]["jhost"] - row["minimum_us"]["plain"]
        assert row["within_limit"] == (more <= figures["limit_us"])


def test_the_readme_lists_every_benchmark() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    assert [p.name for p in BENCHMARKS.glob("*.py") if f"`{p.name}`" not in text] == []
