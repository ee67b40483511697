"""The tables of a page in docs/ that names tests: its cells, and what they claim."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"

_ANSWER = re.compile(r"(yes|partly|not yet|no|as in JAX)\b")
_TEST = re.compile(r"\[([\w.]+)::(\w+)\]\(([^)]+)\)")


class Cell(NamedTuple):
    """What a page says of one thing, and the tests that it names for that."""

    of: str
    answer: str
    tests: str


def rows(page: Path) -> list[list[str]]:
    """The cells of each line of the page's tables but for their headings."""
    lines = page.read_text().splitlines()
    tables = [line for line in lines if line.startswith("|")]
    headings = {n - 1 for n, line in enumerate(tables) if line.startswith("|---")}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(tables)
        if number not in headings and not line.startswith("|---")
    ]


def names_tests_that_exist(page: Path, text: str) -> bool:
    """Whether every link in `text` is to a test function."""
    named = _TEST.findall(text)
    return len(named) == text.count("](") and all(
        (page.parent / link).name == file and test in _functions(page.parent / link)
        for file, test, link in named
    )


def is_shown(cell: Cell, *, refused: bool) -> bool:
    """Whether the cell answers, with a test where the answer needs one.

    `refused`: a no needs one too, which shows the error.
    """
    answer = _ANSWER.match(cell.answer)
    if answer is None:
        return False
    untested = {"not yet"} if refused else {"not yet", "no"}
    return answer[1] in untested or bool(_TEST.search(cell.tests))


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
