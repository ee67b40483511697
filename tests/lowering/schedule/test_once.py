"""Gathers of what no iteration changes stand in front of the scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Scan
from tests import sums
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import exact, on, program_of
from tests.lowering.outside import layer

WEIGHTS = integers(3, 4, 8, seed=1), integers(3, 8, 4, seed=2)
SPECS = P(None, "d"), P(None, None, "d")


@pytest.fixture(autouse=True)
def moved() -> Iterator[None]:
    with sums.moving("collective"):
        yield


def layers(x: jax.Array, weights: Any) -> jax.Array:
    def both(x: jax.Array, w: Any) -> Any:
        return layer(layer(x, w[0]), w[1]), None

    return lax.scan(both, x, weights)[0]


def microbatches(weights: Any, batches: jax.Array) -> Any:
    """The gradients of all, one after another."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(layers(x, weights))

    def one(total: Any, x: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

    return lax.scan(one, jax.tree.map(jnp.zeros_like, weights), batches)[0]


def operands(count: int) -> tuple[Any, np.ndarray]:
    return WEIGHTS, integers(count, 8, 4)


HOW: Any = on({"d": 2}, (SPECS, P(None, "d")), SPECS)


def gathered(program: Program) -> list[tuple[int, ...]]:
    every = statements(program)
    return [
        stmt.out.shape
        for stmt in every
        if isinstance(stmt, Communicate) and stmt.kind == "AllGather"
    ]


def test_microbatches_gather_their_first_weight_once() -> None:
    program = exact(microbatches, *operands(3), **HOW)
    (scan,) = (stmt for stmt in program.body if isinstance(stmt, Scan))
    outside = [s.out.shape for s in program.body if isinstance(s, Communicate)]
    assert outside == [(4, 8)]
    # In an iteration, for the second layer and those behind, and for the backward.
    first = gathered(scan.body).count((4, 8))
    with sums.moving(None):
        (plain,) = (
            stmt
            for stmt in program_of(microbatches, *operands(3), **HOW).body
            if isinstance(stmt, Scan)
        )
    assert first <= gathered(plain.body).count((4, 8))
    assert any("gathered once for all" in str(note) for note in program.remarks)


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_gathered_in_front_of_at_most_one_iteration(count: int) -> None:
    program = exact(microbatches, *operands(count), **HOW)
    assert not any(isinstance(stmt, Communicate) for stmt in program.body)


def test_what_each_layer_has_of_its_own_comes_an_iteration_early() -> None:
    """Scans of groups of layers: of the next group the first weight."""

    def groups(x: jax.Array, weights: Any) -> jax.Array:
        return lax.scan(lambda x, group: (layers(x, group), None), x, weights)[0]

    weights = jax.tree.map(lambda w: np.stack([w, -w, w]), WEIGHTS)
    specs = tuple(P(None, *spec) for spec in SPECS)
    program = exact(
        groups, integers(8, 4), weights, **on({"d": 2}, (P("d"), specs), P("d"))
    )
    of_groups, of_the_last = (s for s in program.body if isinstance(s, Scan))
    assert any(isinstance(stmt, Scan) for stmt in of_groups.body.body)
    assert not any(isinstance(stmt, Scan) for stmt in of_the_last.body.body)
    assert any("an iteration early" in str(note) for note in program.remarks)
