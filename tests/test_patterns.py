"""The page of patterns names tests that exist; and a pattern tested nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.lowering.on_mesh import calls, each_size, exact, tp
from tests.lowering.traced import array, loops, work

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "patterns.md"


class Row(NamedTuple):
    """A pattern, what the page says of it, and the tests that it names."""

    pattern: str
    answer: str
    tests: str


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(*row) for row in cells if row[0] != "pattern"]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.pattern)
def test_the_page_names_tests_that_exist(row: Row) -> None:
    named = re.findall(r"\[([\w.]+)::(\w+)\]\(([^)]+)\)", row.tests)
    assert len(named) == row.tests.count("](")
    for file, test, link in named:
        path = (PAGE.parent / link).resolve()
        assert path.name == file
        assert test in functions(path)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.pattern)
def test_what_the_page_claims_it_shows(row: Row) -> None:
    assert re.match(r"(yes|partly|not yet|no)\b", row.answer)
    if row.answer.startswith(("yes", "partly")):
        assert row.tests


@each_size
def test_experts_between_two_exchanges_are_one_loop(devices: int) -> None:
    """Tokens go to their experts and come back, a chunk of them at a time."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        there = jhost.shard(x, P(None, "tp"))
        h = jnp.maximum(jnp.einsum("tek,ekf->tef", there, up), 0)
        return jhost.stream(jnp.einsum("tef,efk->tek", h, down), 0, chunks=2)

    x, up, down = array(devices * 4, 8, 4), array(8, 4, 16), array(8, 16, 4, seed=1)
    program = exact(f, x, up, down, **tp(devices, (P("tp"),) * 3, P("tp")))
    (loop,) = loops(program)
    kinds = [word for word in work(loop.body) if word in ("AllToAll", "dot_general")]
    assert kinds == ["AllToAll", "dot_general", "dot_general", "AllToAll"]
    assert calls(program, "all_to_all").total() == 4
