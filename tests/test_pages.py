"""Tables of pages are what the cost model and the stored runs make now."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(ROOT))

from benchmarks import pages, report  # noqa: E402
from benchmarks.step import predicted  # noqa: E402

pytestmark = pytest.mark.newest


SLOWLY = "when-it-pays.md"
"""The numbers of this page are predicted anew, and not read from stored runs."""


def check(name: str) -> None:
    what, table = pages.TABLES[name]
    page = (ROOT / "docs" / name).read_text()
    assert report.replaced(page, table(), what) == page, (
        "run python -m benchmarks.pages"
    )


@pytest.mark.parametrize("name", [name for name in pages.TABLES if name != SLOWLY])
def test_a_page_has_the_table_of_today(name: str) -> None:
    check(name)


A_STEP = re.compile(r"\| \d+b, \d+ layers ")
A_GAIN = re.compile(r"\d+\.\d\d of \d+\.\d\d")


@pytest.mark.slow
def test_the_page_of_predictions_has_those_of_today(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of its layers each fifth cell, and a step of each form.

    Rows have six cells or two: of each layer one is predicted, and of each column some.
    The other steps have other sizes.
    """
    (two, _, _, four), what = itertools.islice(predicted._steps(), 4), "predicted"  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(predicted, "_steps", lambda: [two, four])
    page = (ROOT / "docs" / SLOWLY).read_text()
    _, _, there = page.partition(f"<!-- begin: {what} -->\n\n")
    there, _, _ = there.partition(f"\n\n<!-- end: {what} -->")
    shown, turns = iter(A_GAIN.findall(there)), itertools.count()
    anew = pages.gain

    def gain(case: Any, backward: bool = False) -> Any:
        cell = next(shown, "")
        return cell if next(turns) % 5 else anew(case, backward)

    monkeypatch.setattr(pages, "gain", gain)
    made = pages.predicted().splitlines()
    lines = there.splitlines()
    steps = [line for line in made if A_STEP.match(line)]
    assert len(steps) == 2
    assert made == [x for x in lines if not A_STEP.match(x) or x in steps], (
        "run python -m benchmarks.pages"
    )
