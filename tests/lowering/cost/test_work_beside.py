"""The work that can stand beside a transfer while all work keeps its order."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jhost.lowering.cost.work_beside import WorkBeside
from jhost.lowering.ir.graph import graph_of
from tests.lowering.traced import built


def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.sin(jnp.cos(x)) * jnp.exp(w) + v


def beside(carried: Mapping[str, str] | None = None) -> dict[str, float]:
    """The seconds beside each of its operations, of which each takes one."""
    graph = graph_of(built(f, (4,), (4,), (4,)))
    work = WorkBeside(graph, [1.0] * len(graph), carried)
    names = [node.stmt.unit.eqns[0].eqn.primitive.name for node in graph]  # type: ignore[union-attr]
    return {name: work.of(number) for number, name in enumerate(names)}


def carried(param: str) -> Mapping[str, str]:
    program = built(f, (4,), (4,), (4,))
    return {param: program.results[0].name}


def test_work_between_the_operands_and_the_reader_is_beside() -> None:
    found = beside()
    # In the order cos, sin, exp, mul and add, each of which is beside itself.
    assert found == {"cos": 1, "sin": 2, "exp": 3, "mul": 1, "add": 1}


def test_in_a_body_that_runs_again_all_is_beside_what_nothing_ties() -> None:
    found = beside(carried={})
    assert found["cos"] == found["exp"] == found["add"] == 5


def test_a_carried_value_ties_what_makes_it_to_what_reads_it_next() -> None:
    found = beside(carried=carried("x"))
    # The last operation makes what the first one reads.
    assert found["cos"] == found["add"] == 1
    assert found["exp"] == 5


def test_what_is_carried_and_read_late_can_be_made_until_then() -> None:
    found = beside(carried=carried("v"))
    # From the end of mul to the next add, which follows the next mul.
    assert found["add"] == 5
    assert found["cos"] == 5
