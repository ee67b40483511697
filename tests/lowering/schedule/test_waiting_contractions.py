"""Contractions that wait for transfers to stand beside, and what waits with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax.numpy as jnp

from jhost.lowering.ir.graph import Graph, graph_of
from jhost.lowering.schedule.waiting_contractions import WaitingContractions
from tests.lowering.hand_built import buffer, compute, mesh_of, program


def test_a_contraction_waits_behind_another_of_whose_result_it_is_made() -> None:
    """Whether a reader or the end takes them, with cheap work between the two."""
    names = "x first cheap second read last".split()
    x, first, cheap, second, read, last = (buffer(f"{n}: f32[4, 4]") for n in names)
    chain = [
        compute(jnp.dot, [x, x], [first]),
        compute(jnp.tanh, [first], [cheap]),
        compute(jnp.dot, [cheap, x], [second]),
    ]
    reader = compute(lambda a: jnp.cumsum(a, 0), [second], [read])
    end = compute(lambda a: jnp.cumsum(a, 1), [x], [last])
    for body in ([*chain, reader], [*chain, end]):
        graph = graph_of(program(mesh_of(d=2), [x], [second], *body))
        written = in_order(graph, (0, 2), given={"x"})
        assert len(written) == len(graph)


def test_cheap_values_that_only_late_values_read_are_written_with_them() -> None:
    """As the decayed moments of an optimizer, which would be kept until its update."""
    names = "x moment gradient clipped decayed half updated last scaled both"
    x, moment, gradient, clipped, decayed, half, updated, last, scaled, both = (
        buffer(f"{n}: f32[4, 4]") for n in names.split()
    )
    body = [
        compute(jnp.dot, [x, x], [gradient]),
        compute(jnp.tanh, [gradient], [clipped]),
        compute(lambda a: 0.9 * a, [moment], [decayed]),
        compute(lambda a: 0.5 * a, [decayed], [half]),
        # This one is read by work too, so it stays.
        compute(lambda a: 2.0 * a, [moment], [scaled]),
        compute(jnp.add, [clipped, half], [updated]),
        compute(jnp.add, [clipped, scaled], [both]),
        compute(lambda a: jnp.cumsum(a, 1), [scaled], [last]),
    ]
    results = [updated, both, last]
    graph = graph_of(program(mesh_of(d=2), [x, moment], results, *body))
    written = in_order(graph, (0,), given={"x", "moment"})
    late = "gradient clipped decayed half updated both"
    assert written == f"scaled last {late}".split()


def in_order(graph: Graph, numbers: Iterable[int], given: set[str]) -> list[str]:
    """The values in the order in which they are written, each behind its operands."""
    waiting = WaitingContractions(graph, numbers, ())
    groups = waiting.in_order([(node,) for node in graph])
    made = list[str]()
    for node in itertools.chain(*groups):
        assert {b.name for b in node.reads} <= {*given, *made}
        made += [b.name for b in node.writes]
    return made
