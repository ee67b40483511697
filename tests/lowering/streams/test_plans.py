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
from jhost.lowering.ir.operation import has_contraction
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


def attending(x: jax.Array, w: jax.Array) -> jax.Array:
    """Attention in plain JAX, between two products that are marked."""
    rows = jhost.stream(x @ w, axis=0)
    q, k, v = jnp.reshape(rows, (3, *rows.shape[:1], 2, -1), order="F")
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    mixed = jnp.einsum("hqk,khd->qhd", weights, v)
    return jhost.stream(jnp.reshape(mixed, (len(x), -1)) @ w, axis=0)


def gradients(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    result, pull = jax.vjp(attending, x, w)
    return pull(result)


def in_batches(x: jax.Array, w: jax.Array) -> jax.Array:
    """Products of rows with a weight for each batch, of rows that are marked."""
    rows = jhost.stream(jnp.einsum("rbi,bio->rbo", x, w), axis=0)
    return jnp.einsum("rbi,bio->rbo", rows, w)


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize(
    ("function", "shapes", "whole"),
    [
        (attending, ((6, 4), (4, 12)), True),
        (gradients, ((6, 4), (4, 12)), True),
        (in_batches, ((6, 2, 4), (2, 4, 4)), False),
    ],
)
def test_a_found_stream_ends_where_rows_are_multiplied_by_rows(
    function: Callable[..., jax.Array],
    shapes: tuple[tuple[int, ...], ...],
    whole: bool,
    found: bool,
) -> None:
    program = built(function, *shapes, tp=2)
    program = StreamDefaults(pipeline="p2p").applied_to(program)
    marks = [m for m in program.marks if isinstance(m, StreamChoice)]
    marks = [dataclasses.replace(m, found=found) for m in marks]
    graph, made = plan.plan_program(dataclasses.replace(program, marks=tuple(marks)))
    batched = [
        number
        for number, node in enumerate(graph)
        if has_contraction(node.stmt) and len(node.writes[0].shape) > 2
    ]
    cut = made.participations.keys() & set(batched)
    assert batched
    assert bool(cut) != (whole and found)
