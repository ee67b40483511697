"""Where a program holds most, the gradient of a weight comes behind what frees it."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost import choose_forms
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.ir.statements import Compute, walk
from jhost.lowering.pipeline import passes, run_passes
from jhost.lowering.schedule.held import held
from tests.lowering.traced import built

ROWS, WIDTH, VOCABULARY = 2048, 512, 8192


def step(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    """A layer and an output weight that is much larger."""

    def loss(w: jax.Array, v: jax.Array) -> jax.Array:
        h = jnp.sin(jhost.shard(x, P("d")) @ jhost.shard(w, P("d")))
        return jnp.sum(jnp.square(h @ jhost.shard(v, P("d"))).astype(jnp.float32))

    return [jhost.shard(each, P("d")) for each in jax.grad(loss, (0, 1))(w, v)]


def lowered(*, between: bool) -> Program:
    """The program along an axis over several processes, or within one."""
    rates = rates_of("NVIDIA H200", {"d": "host"} if between else {})
    x, w, v = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((2 * ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, VOCABULARY))
    )
    settings = StreamDefaults(pipeline="auto" if between else "p2p")
    axes = {"d"} if between else set[str]()
    sequence = passes(settings=settings, streams=4, rates=rates, between=axes)
    return run_passes(built(step, x, w, v, d=2), sequence.all)


def products(program: Program) -> list[tuple[int, ...]]:
    """The shapes that products make, in the order in which they are computed."""
    return [
        cast(Any, out.aval).shape
        for stmt in walk(program.body)
        if isinstance(stmt, Compute)
        for eqn in stmt.unit.eqns
        if eqn.eqn.primitive.name == "dot_general"
        for out in eqn.eqn.outvars
    ]


ACTIVATIONS, GRADIENT = (2 * ROWS, WIDTH), (VOCABULARY, WIDTH)


def in_order_of_jax() -> Any:
    return mock.patch.object(choose_forms, "with_less_held", lambda program, _: program)


def test_the_gathered_weight_ends_before_its_gradient_is_made() -> None:
    program = lowered(between=True)
    *_, first, second, _ = products(program)
    assert (first, second) == (ACTIVATIONS, GRADIENT)
    with in_order_of_jax():
        other = lowered(between=True)
    *_, first, second, _ = products(other)
    assert (first, second) == (GRADIENT, ACTIVATIONS)
    assert max(held(program)) < max(held(other))


def test_a_sum_that_is_sent_in_parts_keeps_its_place() -> None:
    """Its product is made in these parts, so less is held anyway."""
    program = lowered(between=False)
    with in_order_of_jax():
        assert str(program) == str(lowered(between=False))
