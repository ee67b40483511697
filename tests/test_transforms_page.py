"""The page of transforms has a test that exists for each cell, refusals too."""

from __future__ import annotations

import pytest

from tests.tables import DOCS, Cell, is_shown, names_tests_that_exist, rows

PAGE = DOCS / "transforms.md"
PLACES = ("around", "inside", "composed")


def transforms() -> list[list[str]]:
    """The rows of transforms; those of rules have fewer cells."""
    return [row for row in rows(PAGE) if len(row) == 1 + len(PLACES)]


def cells() -> list[Cell]:
    return [
        Cell(f"{transform}, {place}", text, text)
        for transform, *texts in transforms()
        for place, text in zip(PLACES, texts, strict=True)
        if text != "·"  # makes no sense there
    ]


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.of)
def test_each_cell_has_a_test(cell: Cell) -> None:
    assert names_tests_that_exist(PAGE, cell.tests)
    assert is_shown(cell, refused=True)


def test_no_transform_has_two_rows() -> None:
    names = [row[0] for row in transforms()]
    assert len(names) == len(set(names)) > 20
