"""The page of patterns names tests that exist; and a pattern tested nowhere else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.lowering.on_mesh import calls, each_size, exact, tp
from tests.lowering.traced import array, loops, work
from tests.tables import DOCS, Cell, is_shown, names_tests_that_exist, rows

PAGE = DOCS / "patterns.md"


def cells() -> list[Cell]:
    return [Cell(*row) for row in rows(PAGE)]


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.of)
def test_the_page_names_tests_that_exist(cell: Cell) -> None:
    assert names_tests_that_exist(PAGE, cell.tests)


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.of)
def test_what_the_page_claims_it_shows(cell: Cell) -> None:
    assert is_shown(cell, refused=False)


@each_size
@pytest.mark.parametrize("pipeline", ["collective", "p2p"])
def test_experts_between_two_exchanges_are_one_loop(
    devices: int, pipeline: str
) -> None:
    """Tokens go to their experts and come back, a chunk of them at a time."""
    chunks = 2 if pipeline == "collective" else devices

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        there = jhost.shard(x, P(None, "tp"))
        h = jnp.maximum(jnp.einsum("tek,ekf->tef", there, up), 0)
        return jhost.stream(jnp.einsum("tef,efk->tek", h, down), 0)

    x, up, down = array(devices * 4, 8, 4), array(8, 4, 16), array(8, 16, 4, seed=1)
    how = {"pipeline": pipeline, "chunks": chunks}
    program = exact(f, x, up, down, **tp(devices, (P("tp"),) * 3, P("tp"), **how))
    (loop,) = loops(program)
    move = "AllToAll" if pipeline == "collective" else "CollectivePermute"
    kinds = [word for word in work(loop.body) if word in (move, "dot_general")]
    assert kinds == [move, "dot_general", "dot_general", move]
    moved = 4 if pipeline == "collective" else 2 * (devices - 1)
    assert calls(program, "all_to_all", "ppermute").total() == moved


def test_one_mark_pipelines_both_sides_of_attention() -> None:
    """Of tokens in one dim: what comes before attention and what comes after it."""

    def f(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
        heads = (x @ w_in).reshape(1, 16, 4, 8)
        mixed = jax.nn.dot_product_attention(heads, heads, heads)
        return jhost.stream(mixed.reshape(16, 32) @ w_out, 0, chunks=2)

    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns = P("tp", None), P(None, "tp")
    g = jhost.jit(f, mesh=mesh, in_shardings=(rows, columns, rows), out_shardings=rows)
    found = jhost.explain(g, *(jnp.ones(s) for s in ((16, 32), (32, 32), (32, 32))))
    moved = [each.kind for each in found.communications]
    assert moved[:2] == ["AllGather", "ReduceScatter"]
    assert all(each.chunks == 2 for each in found.communications)
