"""Tables of pages are what the cost model and the stored runs make now."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(ROOT))

from benchmarks import pages, report  # noqa: E402

pytestmark = pytest.mark.newest


SLOWLY = "when-it-pays.md"
"""Of this page each number is predicted anew."""


def check(name: str) -> None:
    what, table = pages.TABLES[name]
    page = (ROOT / "docs" / name).read_text()
    assert report.replaced(page, table(), what) == page, (
        "run python -m benchmarks.pages"
    )


@pytest.mark.parametrize("name", [name for name in pages.TABLES if name != SLOWLY])
def test_a_page_has_the_table_of_today(name: str) -> None:
    check(name)


@pytest.mark.slow
def test_the_page_of_predictions_has_those_of_today() -> None:
    check(SLOWLY)
