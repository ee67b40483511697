"""Contractions that wait for transfers to stand beside, and what waits with them."""

from __future__ import annotations

import jax.numpy as jnp

from jhost.lowering.ir.graph import graph_of
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
        waiting = WaitingContractions(graph, (0, 2), ())
        written = [
            node for group in waiting.in_order([(n,) for n in graph]) for node in group
        ]
        assert len(written) == len(graph)
        made = {"x"}
        for node in written:
            assert {b.name for b in node.reads} <= made
            made |= {b.name for b in node.writes}
