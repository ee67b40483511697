"""What passes remember of other candidates is what they would make anew."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jhost
from jhost.lowering import pipeline
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.cost.remembering import FollowingPass, Remembering, through
from jhost.lowering.ir.bodies import all_marks, all_remarks, programs, with_marks
from jhost.lowering.ir.marks import Mark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport, Search
from jhost.lowering.ir.requests import REFUSALS, StreamDefaults
from jhost.lowering.ir.statements import Scan
from jhost.lowering.layouts import propagate_layouts
from jhost.lowering.loops.lower_streams import LowerStreams
from jhost.lowering.pipeline import passes
from jhost.lowering.streams import plan
from tests.lowering.traced import built

ROWS = P("tp", None)


def block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    h = jnp.tanh(jhost.stream(jhost.shard(x, ROWS) @ w, axis=0))
    return jhost.shard(jhost.stream(h @ v, axis=0), ROWS)


def written(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    w, v = jhost.shard(w, P(None, "tp")), jhost.shard(v, P("tp", None))
    return jnp.sum(block(block(x, w, v), w, v) ** 2)


def scanned(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return block(x, w, v), None

    w, v = jhost.shard(w, P(None, "tp")), jhost.shard(v, P("tp", None))
    x, _ = jax.lax.scan(layer, x, None, 3)
    return jnp.sum(jhost.stream(x @ w, axis=0) ** 2)


def said(mark: Mark) -> Iterator[Mark]:
    """What candidates may say of one mark."""
    assert isinstance(mark, StreamChoice)
    p2p = dataclasses.replace(mark.with_spec(pipeline="p2p"), by_name=False)
    yield mark
    yield dataclasses.replace(mark, unpipelined=True, reason="plain is better")
    yield p2p
    yield dataclasses.replace(p2p.with_spec(sums="whole"), reason="sums later")
    yield p2p.with_spec(sums="beside transfers")
    yield p2p.with_spec(streams=2, zigzag=False)
    yield mark.with_spec(pipeline="collective", chunks=2)
    yield mark.with_spec(pipeline="off")
    yield p2p.with_spec(chunks=7)  # refused


def candidates(program: Program) -> Iterator[Program]:
    """Candidates for some marks, those before each as another candidate was."""
    marks = all_marks(program)
    for number in stream_marks(program)[::2]:
        every = [*said(marks[number])]
        for choice in every:
            marks[number] = choice
            yield with_marks(program, marks)
        marks[number] = every[number % 3]


def stream_marks(program: Program) -> list[int]:
    """The numbers of those among all marks, the program's own before its bodies'."""
    every = enumerate(all_marks(program))
    return [number for number, mark in every if isinstance(mark, StreamChoice)]


def made(program: Program, sequence: Sequence[FollowingPass]) -> tuple[str, ...]:
    """The program after some passes, with its remarks, or why there is none."""
    try:
        for step in sequence:
            program = step.apply(program)
    except REFUSALS as refusal:
        return ("refused", str(refusal))
    return (str(program), *map(str, all_remarks(program)))


def following(strict: bool = True) -> tuple[FollowingPass, ...]:
    every = passes(
        settings=StreamDefaults(),
        streams=4,
        strict=strict,
        rates=rates_of("NVIDIA H200"),
    )
    return (*every.layouts, *every.loops)


@pytest.mark.parametrize(
    "function", [pytest.param(written, marks=pytest.mark.slow), scanned]
)
def test_a_candidate_is_the_same_program_whatever_was_weighed_before(
    function: Callable[..., jax.Array],
) -> None:
    gradients = jax.grad(function, (0, 1, 2))
    program = StreamDefaults().applied_to(
        built(gradients, (16, 8), (8, 8), (8, 8), tp=2)
    )
    remembering = [Remembering(step) for step in following()]
    for candidate in candidates(program):
        assert made(candidate, remembering) == made(candidate, following())


def delayed(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Two partial products; the pass that adds them first drops what was said of both.

    It is the only one of these passes that drops remarks.
    """
    x, (w, v) = jhost.shard(x, P(None, "tp")), (jhost.shard(m, ROWS) for m in (w, v))
    return jhost.shard(x @ w + x @ v / 2, ROWS)


def test_a_program_with_one_more_remark_is_not_lowered_again() -> None:
    program = built(delayed, (16, 64), (64, 8), (64, 8), tp=4)
    remembering = [Remembering(step) for step in following()]
    noted = dataclasses.replace(program, remarks=(*program.remarks, Search()))
    first = through(remembering, program)
    reports = [r for r in first.remarks if isinstance(r, LayoutReport)]
    assert any("stayed partial" in report.text for report in reports)
    assert through(remembering, noted).body is first.body
    assert made(noted, remembering) == made(noted, following())


def test_a_body_is_not_lowered_for_each_candidate_for_what_is_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    change = LowerStreams.change

    def counted(self: LowerStreams, program: Program) -> Program:
        holds = any(isinstance(stmt, Scan) for stmt in program.body)
        counts[program.name if holds else "in a body"] += 1
        return change(self, program)

    monkeypatch.setattr(LowerStreams, "change", counted)
    program = StreamDefaults().applied_to(
        built(jax.grad(scanned), (16, 8), (8, 8), (8, 8), tp=2)
    )
    remembering = [Remembering(step) for step in following()]
    marks, number = all_marks(program), stream_marks(program)[0]
    for choice in itertools.islice(said(marks[number]), 6):
        marks[number] = choice
        made(with_marks(program, marks), remembering)
    assert counts.pop(program.name) <= 6
    # What a pipeline hides may bear on the layouts in bodies: at most two of them.
    bodies = len([*programs(program)]) - 1
    assert counts.pop("in a body") <= 2 * bodies


def test_a_gradient_is_built_planned_and_laid_out_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: Counter[str] = Counter()
    places = (
        (pipeline, "build"),
        (plan, "plan_streams"),
        (propagate_layouts, "solve_layouts"),
    )
    for module, name in places:
        _count(monkeypatch, counts, module, name)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    function = jhost.jit(written, mesh=mesh, pipeline="p2p")
    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 8), (8, 8), (8, 8))]
    jax.jit(jax.grad(function, (0, 1, 2))).lower(*types)
    # The whole forward, which is checked; what is left of it without the loss; and the
    # backward.  Streams are planned before values have layouts and with communications.
    assert counts["build"] <= 3
    assert counts["plan_streams"] <= 6
    assert counts["solve_layouts"] <= 3


def test_a_gradient_is_refused_in_the_user_s_words() -> None:
    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(jhost.stream(jnp.cumsum(x, 0), axis=0, chunks=2))

    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    function = jhost.jit(summed, mesh=mesh)
    with pytest.raises(jhost.errors.StreamDimError) as refusal:
        jax.jit(jax.grad(function)).lower(jax.ShapeDtypeStruct((16, 8), jnp.float32))
    assert str(refusal.value).startswith("summed asks for streams")


def _count(
    monkeypatch: pytest.MonkeyPatch, counts: Counter[str], module: object, name: str
) -> None:
    function = getattr(module, name)

    def counted(*args: object, **settings: object) -> object:
        counts[name] += 1
        return function(*args, **settings)

    monkeypatch.setattr(module, name, counted)
