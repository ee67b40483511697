"""The work that no order ties to a transfer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jhost.lowering.cost.work_beside import WorkBeside
from jhost.lowering.ir.graph import graph_of
from tests.lowering.traced import built


def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.sin(jnp.cos(x)) * jnp.exp(w) + v


def beside(again: bool) -> dict[str, float]:
    """The seconds beside each of its operations, of which each takes one."""
    graph = graph_of(built(f, (4,), (4,), (4,)))
    work = WorkBeside(graph, [1.0] * len(graph), again)
    names = [node.stmt.unit.eqns[0].eqn.primitive.name for node in graph]  # type: ignore[union-attr]
    return {name: work.of(number) for number, name in enumerate(names)}


def test_what_neither_leads_to_a_node_nor_waits_for_it_is_beside() -> None:
    found = beside(again=False)
    # Beside cos: itself and exp.
    assert found["cos"] == 2
    assert found["sin"] == 2
    assert found["exp"] == 3


def test_in_a_body_that_runs_again_all_is_beside_its_first_and_last() -> None:
    found = beside(again=True)
    assert found["cos"] == found["exp"] == found["add"] == 5
    assert found["sin"] == 2
