"""In which section of a program a choice is evaluated, and what it then bears on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_pipelines import ChoosePipelines
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.cost.sections import Section, Sections
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir.bodies import all_marks, programs
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.fingerprint import fingerprint
from jhost.lowering.ir.pipelines import PipelineSpec
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import StreamReport
from jhost.lowering.ir.requests import StreamDefaults, Tuned, marks_alike
from jhost.lowering.ir.statements import Compute
from jhost.lowering.pipeline import passes, run_passes
from tests import budget
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import array, built, check, loops, remarks

ROWS, WIDTH, HIDDEN = 8192, 4096, 14336
OPERANDS = ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
BF16 = jnp.bfloat16
ROOT = P("tp", None)


def layer(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """A block that a pipeline is good for, and one that has too little work."""
    w, v = jhost.shard(w, P(None, "tp")), jhost.shard(v, P("tp", None))
    y = jhost.shard(jhost.stream(jnp.tanh(x @ w) @ v, axis=0), ROOT)
    z = jhost.stream(y @ jhost.shard(w[:, :64], P(None, "tp")), axis=0)
    return y + jhost.shard(jnp.sum(lax.cumsum(z), axis=1, keepdims=True), ROOT)


def written_out(count: int) -> Callable[..., jax.Array]:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = jhost.shard(x, ROOT)
        for _ in range(count):
            x = layer(x, w, v)
        return x

    return f


def held(
    fun: Callable[..., Any], *shapes: tuple[int, ...], **settings: Any
) -> list[Section]:
    """The section in which each group of marks alike is evaluated."""
    arrays = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    program = StreamDefaults(**settings).applied_to(built(fun, *arrays, tp=4))
    sections = Sections(program)
    marks = all_marks(program)
    return [sections.holding(numbers, marks) for numbers in marks_alike(program)]


def sections_of(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Program]:
    return [section.program for section in held(fun, *shapes)]


def gradients(layers: int) -> Callable[..., Any]:
    def loss(*operands: jax.Array) -> jax.Array:
        return jnp.sum(written_out(layers)(*operands))

    return jax.grad(loss, argnums=(0, 1, 2))


def work(program: Program) -> int:
    """How many matmuls it has, with those of its bodies."""
    return sum(
        eqn.eqn.primitive.name == "dot_general"
        for each in programs(program)
        for stmt in each.body
        if isinstance(stmt, Compute)
        for eqn in stmt.unit.eqns
    )


@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_of_layers_written_out_one_is_weighed(layers: int) -> None:
    evaluated = [
        work(section) for section in sections_of(written_out(layers), *OPERANDS)
    ]
    whole = 3 * layers
    assert evaluated == [whole, whole] if layers < 3 else [3, 3]


def test_a_backward_has_layers_of_its_own() -> None:
    sections = sections_of(gradients(6), *OPERANDS)
    assert max(map(work, sections)) <= 2 * 6  # forward 3 a layer, backward 6


def test_a_layer_hands_on_what_is_kept_of_it() -> None:
    """Of x, tanh(x) and its derivative one; and it stays in pieces between layers."""
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    following = passes(settings=StreamDefaults(), streams=4, strict=False)
    for section in held(gradients(6), *OPERANDS, pipeline="p2p"):
        border = (*section.program.params, *section.program.results)
        wide = [b.name for b in border if b.shape == (ROWS, HIDDEN)]
        assert len(wide) == 1
        assert wide[0] in section.in_pieces
        assert not section.in_pieces & {"x", "w", "v"}
        lowered = run_passes(section.program, (*following.layouts, *following.loops))
        apart = predict(lowered, rates, in_pieces=section.in_pieces)
        assert apart.compute < predict(lowered, rates).compute


@budget.first_is_quick(("layers", "off"), [(written_out, 1e-9), (gradients, 0.04)])
def test_a_layer_takes_what_one_more_adds_to_a_program(
    layers: Callable[[int], Callable[..., Any]], off: float
) -> None:
    """Its last transfers go beside what the next layer begins with.

    Those outside of loops stay collectives here: what a layer gathers first comes
    beside the layer before, which a section alone has not got.
    """
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    settings = StreamDefaults(pipeline="p2p")
    following = passes(settings=settings, streams=4, strict=False)
    loops = [each for each in following.loops if each.name != "choose_schedule"]

    def seconds(program: Program, **how: Any) -> float:
        program = run_passes(program, (*following.layouts, *loops))
        return predict(program, rates, **how).total

    sections = held(layers(6), *OPERANDS, pipeline="p2p")
    sections.sort(key=lambda section: work(section.program))
    passed = {
        work(section.program): section for section in sections
    }  # forward, and backward
    in_row = sum(
        seconds(section.program, in_pieces=section.in_pieces, carried=section.carried)
        for section in passed.values()
    )
    arrays = [jax.ShapeDtypeStruct(shape, BF16) for shape in OPERANDS]
    wholes = [built(layers(count), *arrays, tp=4) for count in (5, 4)]
    more, fewer = (seconds(settings.applied_to(whole)) for whole in wholes)
    assert in_row == pytest.approx(more - fewer, rel=off)


def test_a_body_is_weighed_by_itself() -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x, _ = lax.scan(
            lambda x, _: (layer(x, w, v), None), jhost.shard(x, ROOT), length=5
        )
        return layer(x, w, v)

    assert [work(section) for section in sections_of(f, *OPERANDS)] == [6, 6, 3, 3]


def test_a_part_reads_what_it_has_not_made_and_marks_what_it_makes() -> None:
    for section in sections_of(written_out(4), *OPERANDS):
        read = {b.name for stmt in section.body for b in reads_writes(stmt)[0]}
        made = {b.name for stmt in section.body for b in reads_writes(stmt)[1]}
        border = {buffer.name for buffer in (*section.params, *section.results)}
        assert {buffer.name for buffer in section.params} == read - made
        assert {mark.buffer for mark in section.marks} <= made | border


def test_a_plain_mark_keeps_its_loop_from_being_made() -> None:
    """Though one stream reaches both marks of a layer, and the first is pipelined."""
    fun, arrays = written_out(2), [jax.ShapeDtypeStruct(s, BF16) for s in OPERANDS]
    every = passes(settings=StreamDefaults(), streams=4)
    program = every.choice.settings.applied_to(built(fun, *arrays, tp=4))
    first, second = marks_alike(program)
    for tuned, made in (({}, 6), (dict.fromkeys(second, PLAIN), 4)):
        p2p = dict.fromkeys(first, P2P)
        known = {fingerprint(program): {**p2p, **tuned}}
        choice = dataclasses.replace(every.choice, tuned=known)
        chosen = run_passes(program, (choice, *every.layouts, *every.loops))
        assert len(loops(chosen)) == made
        pipelines = {r.lines: r.pipeline for r in remarks(chosen, StreamReport)}
        assert list(pipelines.values()) == ["p2p", "off"][: 1 + len(tuned) // 2]


PLAIN = Tuned(spec=PipelineSpec(pipeline=None, chunks=None))
P2P = Tuned(spec=PipelineSpec(pipeline="p2p", chunks=None))
COLLECTIVE = Tuned(spec=PipelineSpec(pipeline="collective", chunks=2))


@pytest.mark.parametrize("root", [ROOT, P()], ids=["scattered", "whole"])
@pytest.mark.parametrize(
    "tuned", [(P2P, PLAIN), (PLAIN, P2P), (COLLECTIVE, PLAIN), (COLLECTIVE, P2P)]
)
def test_plain_marks_change_no_number(
    tuned: tuple[Tuned, Tuned], root: P, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of sums that come back whole, whose two halves are in different loops."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(2):
            y = jhost.shard(jhost.stream(jnp.sign(x @ w) @ v, axis=0), root)
            x = jhost.shard(jhost.stream(jnp.sin(y) @ w @ v, axis=0), root)
        return x

    def measured(_: ChoosePipelines, program: Program) -> dict[int, Tuned]:
        alike = zip(marks_alike(program), tuned, strict=True)
        return {number: best for numbers, best in alike for number in numbers}

    monkeypatch.setattr(ChoosePipelines, "tuned_marks", measured)
    program = check(
        f,
        *(array(8, 8), array(8, 4), array(4, 8)),
        rtol=1e-5,
        mesh=mesh_of(tp=4),
        in_shardings=(root, P(None, "tp"), P("tp", None)),
    )
    assert loops(program)
