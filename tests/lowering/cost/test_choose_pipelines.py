"""What `auto` chooses, what it says about it, and what overrides it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost import errors
from jhost.lowering.cost import choose_permutes
from jhost.lowering.cost.choose_schedule import WholePrograms
from jhost.lowering.cost.rates import Rates, rates_of
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir.bodies import adds_up, all_marks
from jhost.lowering.ir.index import Index, LoopIndex, evaluate
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Prediction, StreamReport
from jhost.lowering.ir.requests import StreamDefaults, marks_alike, open_marks
from jhost.lowering.ir.statements import Communicate
from jhost.lowering.pipeline import passes, run_passes
from tests.lowering.traced import built, chunk_counts, loops, remarks

H200 = rates_of("NVIDIA H200")
assert H200 is not None
EASY = dataclasses.replace(
    H200, collective=dataclasses.replace(H200.collective, beside_compute=True)
)
SLOW = dataclasses.replace(
    H200, permute=dataclasses.replace(H200.permute, bandwidth=100e9)
)
BF16 = jnp.bfloat16


def lowered(
    fun: Callable[..., Any],
    *shapes: tuple[int, ...],
    rates: Rates | None = H200,
    kind: str = "NVIDIA H200",
    strict: bool = True,
    tp: int = 4,
    **settings: Any,
) -> Program:
    sequence = passes(
        settings=StreamDefaults(**settings),
        streams=4,
        strict=strict,
        rates=rates,
        device_kind=kind,
    )
    arrays = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    return run_passes(built(fun, *arrays, tp=tp), sequence.all)


def mlp(**mark: Any) -> Callable[..., jax.Array]:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = jhost.shard(x, P("tp", None))
        w, v = jhost.shard(w, P(None, "tp")), jhost.shard(v, P("tp", None))
        y = jhost.stream(jnp.tanh(x @ w) @ v, axis=0, **mark)
        return jhost.shard(y, P("tp", None))

    return f


def sizes(rows: int) -> tuple[tuple[int, int], ...]:
    """The MLP of an 8B model."""
    return (rows, 4096), (4096, 14336), (14336, 4096)


def report(program: Program) -> StreamReport:
    """That on its only stream."""
    (only,) = remarks(program, StreamReport)
    return only


def test_a_large_block_sends_each_chunk_straight_to_the_device_that_wants_it() -> None:
    """In each direction to every other device once: no ring of neighbours."""
    program = lowered(mlp(), *sizes(8192))
    chosen = report(program)
    assert (chosen.pipeline, chosen.chunks) == ("p2p", 4)
    (loop,) = loops(program)
    steps: list[dict[Index, int]] = [{LoopIndex(loop.index): i} for i in range(3)]
    shifts = [s.shift for s in loop.body if isinstance(s, Communicate) and s.shift]
    far = [[evaluate(shift, step) for step in steps] for shift in shifts]
    assert far == [[3, 2, 1], [1, 2, 3]]


@pytest.mark.parametrize(
    ("taken", "seconds", "pipeline"),
    [(0.8, [], "p2p"), (0.0, [None], "p2p"), (0.0, [1e-6], "off")],
)
def test_no_loop_is_weighed_as_xla_has_it_with_its_options(
    taken: float, seconds: list[float | None], pipeline: str
) -> None:
    """But only where the options could win, by what collectives take from matmuls."""
    left, early = iter(seconds), WholePrograms.early

    def predicted(self: WholePrograms, program: Program) -> float:
        said = next(left)  # raises if nobody was to ask
        return early(self, program) if said is None else said

    assert H200 is not None
    rates = dataclasses.replace(
        H200, collective=dataclasses.replace(H200.collective, taken=taken)
    )
    with mock.patch.object(WholePrograms, "early", predicted):
        found = report(lowered(mlp(), *sizes(8192), rates=rates))
    assert not [*left]
    assert found.pipeline == pipeline
    if pipeline == "off":
        assert found.reason.startswith("not pipelined, predicted to take 1 us")


def experts(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    x = jhost.shard(jhost.shard(x, P("tp")), P(None, "tp"))
    up, down = jhost.shard(up, P("tp")), jhost.shard(down, P("tp"))
    y = jnp.einsum(
        "gecf,efm->gecm", jnp.tanh(jnp.einsum("gecm,emf->gecf", x, up)), down
    )
    return jhost.shard(jhost.stream(y, axis=0), P("tp"))


@pytest.mark.parametrize("tp", [2, 4])
def test_tokens_go_straight_to_the_device_of_their_experts(tp: int) -> None:
    """64 experts of DeepSeek-V2's size; the more room each has, the more there is."""
    weights = (64, 5120, 1536), (64, 1536, 5120)
    large = report(lowered(experts, (16, 64, 120, 5120), *weights, tp=tp))
    assert (large.pipeline, large.chunks) == ("p2p", tp)
    assert large.reason.startswith("p2p with a chunk a device, predicted to take")
    assert "runner-up: not pipelined" in large.reason
    small = report(lowered(experts, (8, 64, 1, 5120), *weights, tp=tp))
    assert small.pipeline == "off"
    assert "runner-up: p2p with a chunk a device" in small.reason


def test_layers_alike_have_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by as many predictions as that for one of them."""
    predicted: list[Program] = []

    def counted(program: Program, rates: Rates, **how: Any) -> Prediction:
        predicted.append(program)
        return predict(program, rates, **how)

    monkeypatch.setattr(choose_permutes, "predict", counted)
    counts: list[int] = []
    for layers in (1, 3):

        def f(x: jax.Array, w: jax.Array, v: jax.Array, layers: int = layers) -> Any:
            for _ in range(layers):
                x = mlp()(x, w, v)
            return x

        program = lowered(f, *sizes(8192))
        streams = remarks(program, StreamReport)
        assert {stream.pipeline for stream in streams} == {"p2p"}
        assert len(loops(program)) == layers
        counts.append(len(predicted))
    assert counts[1] == 2 * counts[0]


def test_a_small_block_is_left_alone() -> None:
    program = lowered(mlp(), *sizes(256))
    assert report(program).pipeline == "off"
    assert not loops(program)


@pytest.mark.parametrize("rows", [256, 8192])
def test_the_numbers_behind_the_choice_are_said(rows: int) -> None:
    program = lowered(mlp(), *sizes(rows))
    predicted = report(program).predicted
    texts = {text for text, _ in predicted}
    assert texts == {"not pipelined", "p2p with a chunk a device"}
    assert "predicted to take" in report(program).text
    assert f"runner-up: {predicted[1][0]}" in report(program).text


def test_more_chunks_are_weighed_where_they_could_hide_more() -> None:
    program = lowered(mlp(), *sizes(8192), rates=SLOW)
    assert "p2p with 8 chunks" in dict(report(program).predicted)


def test_on_few_streams_a_transfer_is_launched_an_iteration_before_it_is_used() -> None:
    """Where the host is ahead of the devices, and nothing is sent; else all at once."""

    def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jhost.shard(x, P("tp", None)), jhost.shard(w, P(None, "tp"))
        return jhost.shard(jhost.stream(x @ w, axis=0), P(None, "tp"))

    large = lowered(gathered, (8192, 8192), (8192, 10240))
    assert report(large).predicted[0][0] == "p2p with a chunk a device on 2 queues"
    text = str(large)
    small = lowered(gathered, (4096, 4096), (4096, 14336))
    assert report(small).predicted[0][0] == "p2p with a chunk a device"
    block = lowered(mlp(), *sizes(8192))
    assert report(block).predicted[0][0] == "p2p with a chunk a device"
    assert "SetCurrentStream(stream[i mod 2])" in text
    # The second transfer is the first to wait: for the device's own chunk.
    assert "SetCurrentStream(stream[1])\n  Synchronize(own)\n" in text


def with_gradients(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    """The gradients of `mlp`, which lie as its operands do."""

    def loss(*args: jax.Array) -> jax.Array:
        return jnp.sum(mlp(pipeline="p2p")(*args).astype(jnp.float32) ** 2)

    found = jax.grad(loss, (0, 1, 2))(x, w, v)
    specs = P("tp", None), P(None, "tp"), P("tp", None)
    return [jhost.shard(g, spec) for g, spec in zip(found, specs, strict=True)]


@pytest.mark.parametrize(
    ("shapes", "whole"),
    [(sizes(4096), True), (((2**17, 512), (512, 4096), (4096, 512)), False)],
)
def test_gradients_of_weights_are_added_up_or_made_at_once(
    shapes: Sequence[tuple[int, int]], whole: bool
) -> None:
    """In chunks a sum is read and written for each, whole the chunks are copied."""
    program = lowered(with_gradients, *shapes)
    how = " and sums behind the loops" if whole else ""
    said = report(program).reason
    assert said.startswith(f"p2p with a chunk a device{how}, predicted")
    assert adds_up(program) != whole


def test_both_ways_are_measured() -> None:
    program = built(with_gradients, *sizes(64), tp=4)
    asked = StreamDefaults().applied_to(program)
    every = passes(settings=StreamDefaults(), streams=4)
    marks, (group, *_) = all_marks(asked), marks_alike(asked)
    mark = open_marks(asked)[group[0]]
    evaluation = every.choice.evaluation(asked, marks, group)
    texts = [outcome.text for outcome in evaluation.measurable(mark)]
    assert "p2p with a chunk a device and sums behind the loops" in texts
    assert len(texts) == len(set(texts))


def test_a_choice_is_among_the_fastest() -> None:
    for rows in (512, 1024, 2048, 4096):
        (_, chosen), *others = report(lowered(mlp(), *sizes(rows))).predicted
        assert all(chosen <= seconds / 0.97 for _, seconds in others)


def test_collectives_are_weighed_where_they_run_beside_matmuls() -> None:
    slow = dataclasses.replace(EASY.permute, host=1.0)
    program = lowered(
        mlp(), *sizes(8192), rates=dataclasses.replace(EASY, permute=slow)
    )
    assert report(program).pipeline == "collective"
    assert chunk_counts(program) == [report(program).chunks]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rates": None, "kind": "an abacus"}, "no rates of an abacus devices"),
        ({"rates": rates_of("cpu"), "kind": "cpu"}, "on cpu devices no transfer"),
        (
            {"rates": rates_of("NVIDIA H200", {"tp": "host"})},
            "the devices along tp are in several processes of a host",
        ),
        (
            {"rates": rates_of("NVIDIA H200", {"tp": "hosts"})},
            "an axis that is pipelined has to lie within a host, in one process",
        ),
        ({"tp": 1}, "there is one device"),
    ],
)
def test_where_nothing_can_win_nothing_is_weighed(
    settings: dict[str, Any], reason: str
) -> None:
    program = lowered(mlp(), *sizes(8192), **settings)
    assert reason in report(program).text
    assert not report(program).predicted


def test_by_estimates_a_tenth_is_to_be_gained() -> None:
    """What gains less by the very same rates is not taken."""
    seen: set[str] = set()
    for rows in (1024, 2048, 4096, 8192):
        known = report(lowered(mlp(), *sizes(rows)))
        assert H200 is not None
        estimated = dataclasses.replace(H200, estimated=True)
        chosen = report(lowered(mlp(), *sizes(rows), rates=estimated))
        times = dict(known.predicted)
        off = times.pop("not pipelined")
        seen.add(chosen.pipeline)
        assert (chosen.pipeline == "p2p") == (min(times.values()) < 0.9 * off)
        assert "estimated from data sheets to take" in chosen.reason
    assert seen == {"off", "p2p"}


# --- What the user says ------------------------------------------------------------- #

OVERRIDES = [
    ({"pipeline": "off"}, ("off", 1)),
    ({"pipeline": "p2p", "chunks": 8}, ("p2p", 8)),
    ({"pipeline": "collective", "chunks": 2}, ("collective", 2)),
    ({"pipeline": "collective"}, ("collective", 4)),
]


@pytest.mark.parametrize(("asked", "given"), OVERRIDES)
@pytest.mark.parametrize("where", ["mark", "function"])
def test_what_is_asked_for_holds(
    asked: dict[str, Any], given: tuple[str, int], where: str
) -> None:
    mark, function = (asked, {}) if where == "mark" else ({}, asked)
    chosen = report(lowered(mlp(**mark), *sizes(256), **function))
    assert (chosen.pipeline, chosen.chunks) == given


def test_a_count_alone_leaves_the_pipeline_open() -> None:
    chosen = report(lowered(mlp(chunks=4), *sizes(8192)))
    assert (chosen.pipeline, chosen.chunks) == ("p2p", 4)
    chosen = report(lowered(mlp(chunks=3), *sizes(8192)))
    assert (chosen.pipeline, chosen.chunks) == ("collective", 3)


def test_a_pipeline_alone_leaves_the_count_open() -> None:
    chosen = report(lowered(mlp(pipeline="p2p"), *sizes(256)))
    assert (chosen.pipeline, chosen.chunks) == ("p2p", 4)
    assert len(chosen.predicted) == 2


def test_the_stream_overrides_the_function() -> None:
    chosen = report(lowered(mlp(pipeline="off"), *sizes(8192), pipeline="p2p"))
    assert chosen.pipeline == "off"


@pytest.mark.parametrize("rows", [256, 8192])
@pytest.mark.parametrize(
    ("function", "mark"),
    [
        ({"chunks": 8}, {"chunks": "auto"}),
        ({"pipeline": "p2p"}, {"pipeline": "auto"}),
        ({"pipeline": "collective"}, {"pipeline": "auto"}),
        ({"pipeline": "off"}, {"pipeline": "auto"}),
        (
            {"pipeline": "collective", "chunks": 8},
            {"pipeline": "auto", "chunks": "auto"},
        ),
    ],
    ids=str,
)
def test_a_stream_s_auto_overrides_the_function(
    function: dict[str, Any], mark: dict[str, Any], rows: int
) -> None:
    """The choice and its reason are those of a function that says nothing."""
    chosen = report(lowered(mlp(**mark), *sizes(rows), **function))
    unasked = report(lowered(mlp(), *sizes(rows)))
    assert dataclasses.replace(chosen, lines=()) == dataclasses.replace(
        unasked, lines=()
    )
    assert "as asked" not in chosen.reason


def test_what_a_stream_leaves_out_the_function_says() -> None:
    """Its `auto` is about one of the two."""
    chosen = report(lowered(mlp(chunks="auto"), *sizes(256), pipeline="collective"))
    assert (chosen.pipeline, chosen.chunks) == ("collective", 4)
    chosen = report(lowered(mlp(pipeline="auto"), *sizes(8192), chunks=3))
    assert (chosen.pipeline, chosen.chunks) == ("collective", 3)


# --- Several marks, refusals -------------------------------------------------------- #


def test_streams_are_chosen_one_by_one() -> None:
    def f(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> Any:
        x, w = jhost.shard(x, P("tp", None)), jhost.shard(w, P(None, "tp"))
        y, v = jhost.shard(y, P("tp", None)), jhost.shard(v, P(None, "tp"))
        a, b = jhost.stream(x @ w, axis=0), jhost.stream(y @ v, axis=0)
        return jhost.shard(a, P(None, "tp")), jhost.shard(b, P(None, "tp"))

    shapes = (8192, 8192), (8192, 28672), (64, 64), (64, 64)
    streams = remarks(lowered(f, *shapes), StreamReport)
    assert [stream.pipeline for stream in streams] == ["p2p", "off"]


def test_marks_that_meet_are_chosen_together() -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = jhost.shard(x, P("tp", None))
        w, v = jhost.shard(w, P(None, "tp")), jhost.shard(v, P("tp", None))
        h = jhost.stream(jnp.tanh(x @ w), axis=0)
        return jhost.shard(jhost.stream(h @ v, axis=0), P("tp", None))

    program = lowered(f, *sizes(8192))
    assert report(program).pipeline == "p2p"
    assert len(loops(program)) == 1


def test_what_cannot_be_is_no_candidate_and_says_why() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jhost.shard(x, P(None, None)), jhost.shard(w, P(None, "tp"))
        return jhost.shard(jhost.stream(x @ w, axis=0), P(None, "tp"))

    program = lowered(f, (8192, 8192), (8192, 8192))
    assert report(program).pipeline == "off"
    assert "p2p with a chunk a device is left out" in report(program).text


@pytest.mark.parametrize("strict", [True, False])
def test_a_dim_that_cannot_be_streamed_is_refused_as_ever(strict: bool) -> None:
    def f(x: jax.Array) -> jax.Array:
        x = jhost.shard(x, P("tp", None))
        return jhost.shard(jhost.stream(jnp.sort(x, axis=0), axis=0), P("tp", None))

    if strict:
        with pytest.raises(errors.StreamDimError, match="sort"):
            lowered(f, (64, 64))
    else:
        assert not loops(lowered(f, (64, 64), strict=False))


def all_reduced(*shapes: tuple[int, int]) -> Program:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jhost.shard(x, P(None, "tp")), jhost.shard(w, P("tp", None))
        return jhost.shard(jhost.stream(x @ w, axis=0), P())

    return lowered(f, *shapes)


def test_an_all_reduce_comes_back_whole_where_launches_are_dear() -> None:
    """Reduced from neighbour to neighbour, gathered by a collective after the loop."""
    program = all_reduced((8192, 14336), (14336, 4096))
    assert (report(program).pipeline, report(program).chunks) == ("p2p", 4)
    assert len(loops(program)) == 1
    assert "AllGather" in str(program)


def test_a_large_all_reduce_goes_back_in_pieces() -> None:
    program = all_reduced((8192, 28672), (28672, 8192))
    assert (report(program).pipeline, report(program).chunks) == ("p2p", 8)
    assert len(loops(program)) == 1
    assert "AllGather" not in str(program)
