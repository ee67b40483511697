"""A loop that moves along two axes: what XLA makes of it for four H200s."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s

PAIRS = P("row", "column")
PART = 512 * 512 * 64 * 2
"""The bytes that a device has of pairs."""


@pytest.fixture
def pairs(h200s: MakeH200s) -> Mesh:
    return h200s({"row": 2, "column": 2})


def update(a: jax.Array, b: jax.Array) -> jax.Array:
    return jhost.stream(jnp.einsum("cik,cjk->cij", a, b), 2)


def compiled(mesh: Mesh, **how: Any) -> Any:
    spec = P(None, *PAIRS)
    sharding = NamedSharding(mesh, spec)
    one = jax.ShapeDtypeStruct((64, 1024, 1024), jnp.bfloat16, sharding=sharding)
    if not how:
        return jax.jit(update, out_shardings=sharding).lower(one, one).compile()
    settings = {"mesh": mesh, "in_shardings": (spec, spec), "out_shardings": spec}
    return jhost.jit(update, **settings, **how).lower(one, one).compile()


def test_both_moves_are_beside_matmuls(pairs: Mesh) -> None:
    """The first comes before any matmul, and the last goes behind all."""
    schedule = compiled(pairs, pipeline="p2p", chunks=4).schedule()
    moves = schedule.communications
    assert [each.kind for each in moves] == ["CollectivePermute"] * 8, str(schedule)
    assert all(each.asynchronous for each in moves), str(schedule)
    assert sum(not each.matmuls for each in moves) == 2, str(schedule)


def test_a_device_holds_no_more_than_by_collectives(pairs: Mesh) -> None:
    """A part that came, one at work, and the sums; `jax.jit` has the gathered whole."""
    p2p, collective, whole = (
        compiled(pairs, **how).memory_analysis().temp_size_in_bytes
        for how in ({"pipeline": "p2p"}, {"pipeline": "collective", "chunks": 4}, {})
    )
    assert p2p <= 1.001 * collective < whole
    assert p2p < 3.01 * PART
