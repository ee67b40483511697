"""A plan that is handed on is the one that would be made anew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import programs
from jhost.lowering.ir.marks import Mark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.ir.statements import PipelineKind
from jhost.lowering.pipeline import passes, run_passes
from jhost.lowering.streams import plan
from tests.lowering.traced import built

ROWS = P("tp", None)


def gated(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """A gated block: its derivative computes cheap values again."""
    w, v = jhost.shard(w, P(None, "tp")), jhost.shard(v, P("tp", None))
    h = jhost.stream(jhost.shard(x, ROWS) @ w, axis=0)
    y = jhost.shard(jhost.stream((jax.nn.silu(h) * h) @ v, axis=0), ROWS)
    return jnp.sum(jhost.stream(y @ w, axis=0) ** 2)


def scaled(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Small sums beside a stream: they become one transfer."""
    w = w / jnp.sqrt(jnp.sum(w * w)) + v / jnp.sqrt(jnp.sum(v * v))
    return gated(x, w, v)


@pytest.mark.parametrize("pipeline", ["p2p", "collective"])
@pytest.mark.parametrize("function", [gated, scaled])
def test_statements_that_are_new_join_what_reaches_them(
    function: Callable[..., jax.Array],
    pipeline: PipelineKind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = StreamDefaults(chunks=2, pipeline=pipeline)
    program = settings.applied_to(
        built(jax.grad(function, (0, 1, 2)), (16, 8), (8, 8), (8, 8), tp=2)
    )
    handed_on: list[Program] = []
    plan_program = plan.plan_program

    def seen(program: Program) -> object:
        handed_on.extend([program] * plan.takes_plan(program))
        return plan_program(program)

    monkeypatch.setattr("jhost.lowering.loops.planned.plan_program", seen)
    every = passes(settings=settings, streams=4)
    run_passes(program, (*every.layouts, *every.loops))
    assert handed_on
    for each in (p for whole in handed_on for p in programs(whole) if p.marks):
        anew = dataclasses.replace(each)  # nothing is known of it
        assert plan_program(each)[1] == plan_program(anew)[1]


def asking(program: Program, change: Callable[[StreamChoice], Mark]) -> Program:
    """`program` with its last stream mark saying something else."""
    *others, last = program.marks
    assert isinstance(last, StreamChoice)
    return dataclasses.replace(program, marks=(*others, change(last)))


@pytest.mark.parametrize(
    ("said", "shared"),
    [
        (lambda mark: dataclasses.replace(mark, unpipelined=True), True),
        (lambda mark: mark.with_spec(pipeline=None), True),
        (lambda mark: mark.with_spec(pipeline="collective"), False),  # two streams
    ],
    ids=["unpipelined", "open", "collective"],
)
def test_marks_that_agree_alike_have_one_plan(
    said: Callable[[StreamChoice], Mark], shared: bool
) -> None:
    program = built(gated, (16, 8), (8, 8), (8, 8), tp=2)
    program = StreamDefaults(pipeline="p2p").applied_to(program)
    marks = [mark for mark in program.marks if isinstance(mark, StreamChoice)]
    program = dataclasses.replace(program, marks=tuple(marks))
    _, known = plan.plan_program(program)
    other = asking(program, said)
    assert not plan.take_known(other, [program])
    _, taken = plan.plan_program(other)
    assert (taken.participations is known.participations) == shared
    assert taken == plan.plan_program(asking(program, said))[1]


def test_a_plan_that_is_taken_over_has_the_statements_of_its_own_program() -> None:
    program = built(gated, (16, 8), (8, 8), (8, 8), tp=2)
    program = StreamDefaults(pipeline="p2p").applied_to(program)
    plan.plan_program(program)
    # As where marks in a body change: the statements around it are new ones.
    body = tuple(dataclasses.replace(stmt) for stmt in program.body)
    other = dataclasses.replace(program, body=body)
    assert not plan.take_known(other, [program])
    graph, taken = plan.plan_program(other)
    assert taken.participations is plan.plan_program(program)[1].participations
    stmts = [stmt for node in graph for stmt in node.stmts]
    assert {id(stmt) for stmt in body} <= {id(stmt) for stmt in stmts}
