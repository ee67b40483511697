"""Where streams spread to, where they stop, and which statements share a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost import errors
from jhost.lowering.ir.remarks import StreamReport
from tests import budget
from tests.lowering.on_mesh import exact, tp
from tests.lowering.traced import (
    WHOLE,
    aliases,
    array,
    check,
    chunk_counts,
    loops,
    lowered,
    notes,
    remarks,
    work,
)

stream = jhost.stream
X = (8, 4)


def shape_of_work(fun: Callable[..., Any], *args: Any, **mesh: int) -> list[str]:
    """What `fun` does at the top level, loops with what they do."""
    return work(lowered(fun, *args, **mesh).body)


# --- How far a stream spreads ------------------------------------------------------- #


def test_a_stream_spreads_backward() -> None:
    program = lowered(lambda x: stream(jnp.tanh(jnp.sin(x) * 2), 0, chunks=2), X)
    assert work(program.body) == ["loop(sin, mul, tanh)"]
    assert aliases(program) == {"x": 0, "y": 0}


def test_a_stream_spreads_forward() -> None:
    program = lowered(lambda x: jnp.tanh(jnp.sin(stream(x, 0, chunks=2)) * 2), X)
    assert work(program.body) == ["loop(sin, mul, tanh)"]


def test_a_stream_follows_its_dim() -> None:
    """Through a transpose, and a matmul whose other dims it leaves alone."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return stream(jnp.swapaxes(jnp.tanh(x) @ w, 0, 1), 1, chunks=2)

    program = lowered(f, X, (4, 3))
    assert work(program.body) == ["loop(tanh, dot_general, transpose)"]
    assert aliases(program) == {"x": 0, "y": 1}


def test_a_stream_reaches_every_operand_and_every_reader() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = stream(jnp.sin(x) + jnp.cos(w), 0, chunks=2)
        return y * 2, jnp.sum(y, axis=1)

    assert shape_of_work(f, X, X) == ["loop(sin, cos, add, reduce_sum, mul)"]


@pytest.mark.parametrize(
    ("before", "after", "loop"),
    [
        ((8, 4), (2, 4, 4), "loop(sin, reshape, tanh)"),
        ((8, 4), (32,), "loop(sin, reshape, tanh)"),
        ((8, 4), (4, 8), "loop(sin, reshape, tanh)"),
        ((8, 4), (1, 8, 2, 2), "loop(sin, reshape, tanh)"),
    ],
)
def test_a_stream_goes_through_the_outermost_dim_of_a_reshape(
    before: tuple[int, ...], after: tuple[int, ...], loop: str
) -> None:
    """Split or merged; and split and merged at once, by the common factor."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.reshape(stream(jnp.sin(x), 0, chunks=2), after))

    (only,) = loops(check(f, array(*before), rtol=1e-6))
    assert f"loop({', '.join(work(only.body))})" == loop


def test_a_stream_stops_at_the_inner_dim_of_a_reshape() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.reshape(stream(jnp.sin(x), 1, chunks=2), (32,)))

    program = lowered(f, X)
    assert work(program.body) == ["loop(sin)", "reshape", "tanh"]
    (stop,) = notes(program, "streams stop")
    assert "streams stop before v_1: the reshape (8, 4) -> (32,)" in stop


@pytest.mark.parametrize("name", WHOLE)
def test_a_stream_stops_where_its_dim_is_whole(name: str) -> None:
    """A value made in chunks and needed whole is the border of a loop."""
    program = lowered(lambda x: WHOLE[name](stream(jnp.sin(x), 0, chunks=2)) * 2, X)
    assert "loop(sin)" in work(program.body)
    assert chunk_counts(program) == [2]
    (stop,) = notes(program, "streams stop")
    assert "streams stop before" in stop
    assert name in stop


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_whole_along_one_dim_is_streamed_along_another(name: str) -> None:
    def f(x: jax.Array) -> jax.Array:
        return WHOLE[name](stream(jnp.sin(x), 1, chunks=2)) * 2

    inside = name != "scan"
    (loop,) = loops(lowered(f, X))
    assert (name in work(loop.body)) == inside


def test_a_stream_stops_at_serial() -> None:
    program = lowered(
        lambda x: jnp.tanh(jhost.serial(stream(jnp.sin(x), 0, chunks=2))), X
    )
    assert work(program.body) == ["loop(sin)", "Set", "tanh"]
    (stop,) = notes(program, "streams stop")
    assert "jhost.serial" in stop


def test_a_stream_stops_at_another_on_another_dim() -> None:
    def f(x: jax.Array) -> jax.Array:
        return stream(jnp.tanh(stream(jnp.sin(x), 0, chunks=2)), 1, chunks=4)

    program = check(f, array(*X), rtol=1e-6)
    assert work(program.body) == ["loop(sin)", "loop(tanh)"]
    assert chunk_counts(program) == [2, 4]


# --- Marks that meet ---------------------------------------------------------------- #


def two_marks(**second: Any) -> Callable[..., jax.Array]:
    def f(x: jax.Array) -> jax.Array:
        return stream(jnp.tanh(stream(jnp.sin(x), 0, chunks=2)), 0, **second)

    return f


@pytest.mark.parametrize("second", [{}, {"chunks": 2}, {"pipeline": "collective"}])
def test_marks_that_agree_are_one_stream(second: dict[str, Any]) -> None:
    program = check(two_marks(**second), array(*X), rtol=1e-6)
    assert work(program.body) == ["loop(sin, tanh)"]
    (report,) = remarks(program, StreamReport)
    assert "2 chunks" in report.reason


def test_marks_that_ask_for_different_chunks_stay_two() -> None:
    program = check(two_marks(chunks=4), array(*X), rtol=1e-6)
    assert work(program.body) == ["loop(sin)", "loop(tanh)"]
    assert chunk_counts(program) == [2, 4]
    assert len(remarks(program, StreamReport)) == 2


def test_marks_on_two_branches_that_join_are_one_stream() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return stream(jnp.sin(x), 0, chunks=2) + stream(jnp.cos(w), 0, chunks=2)

    assert shape_of_work(f, X, X) == ["loop(sin, cos, add)"]


def test_marks_on_a_shard_and_on_the_gathered_value_are_one_stream() -> None:
    """Chunk s of the gathered dim is the s-th slice of every shard."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x = stream(jhost.shard(x, P("tp", None)), 0, chunks=2)
        return stream(jnp.tanh(x @ jhost.shard(w, P(None, "tp"))), 0, chunks=2)

    assert shape_of_work(f, (8, 6), (6, 32), tp=2) == [
        "loop(AllGather, dot_general, tanh)"
    ]


def test_a_mark_on_a_fill_is_on_all_that_is_made_of_it() -> None:
    """A device's rows of it are added, and all rows are multiplied."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        ones = stream(jnp.ones(X), 0, chunks=2)
        w = jhost.shard(w, P(None, "tp"))
        return jhost.shard(ones + (ones @ w) @ jnp.sin(w.T), P("tp", None)) + x

    *_, loop = shape_of_work(f, X, (4, 32), tp=2)
    assert loop.count("broadcast_in_dim") == 2


def test_marks_on_both_sides_of_a_reduce_scatter_are_one_stream() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jhost.shard(x, P(None, "tp")), jhost.shard(w, P("tp", None))
        y = stream(jnp.tanh(x), 0, chunks=2) @ w
        return stream(jnp.tanh(jhost.shard(y, P("tp", None))), 0, chunks=2)

    assert shape_of_work(f, (8, 6), (6, 4), tp=2) == [
        "loop(tanh, dot_general, ReduceScatter, tanh)"
    ]


# --- Which statements share a loop -------------------------------------------------- #


def test_loops_merge_on_the_graph_and_not_on_program_order() -> None:
    """nvFuser merges what stands side by side; the sort here is on no path between."""

    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = stream(jnp.sin(x), 0, chunks=2)
        z = lax.sort(w)
        return y, z, stream(jnp.tanh(x), 0, chunks=2)

    assert shape_of_work(f, X, X) == ["loop(sin, tanh)", "sort"]


def test_an_operation_outside_the_stream_splits_a_loop() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = lax.sort(stream(jnp.sin(x), 0, chunks=2), dimension=0)
        return stream(y * 2, 0, chunks=2)

    program = check(f, array(*X), rtol=1e-6)
    assert work(program.body) == ["loop(sin)", "sort", "loop(mul)"]


def test_a_value_needed_whole_beside_its_chunks_splits_a_loop(
    golden: Callable[..., None],
) -> None:
    """Attention: q and k by rows, but each row of scores needs all rows of k."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        k = x @ w
        scores = jnp.maximum(k @ jnp.swapaxes(k, 0, 1), 0)
        return stream(scores @ x, 0, chunks=3)

    program = check(f, array(6, 4), array(4, 4, seed=1))
    assert work(program.body) == [
        "loop(dot_general, transpose)",
        "loop(dot_general, max, dot_general)",
    ]
    golden(str(program))


def test_a_sum_over_the_streamed_dim_ends_its_loop() -> None:
    def f(x: jax.Array) -> jax.Array:
        x = stream(jnp.tanh(x), 0, chunks=2)
        return x - jnp.sum(x, axis=0)[None]

    program = check(f, array(*X), rtol=1e-6)
    first, *rest = work(program.body)
    assert first == "loop(tanh, reduce_sum)"
    assert rest[-1] == "loop(sub)"


# --- Dims that are split where they are gathered ------------------------------------ #


@given(
    devices=st.sampled_from([2, 4]),
    sequences=st.sampled_from([1, 2, 3, 4, 8]),
    marks=st.sets(st.sampled_from(["before", "inside", "behind"]), min_size=1),
    pipeline=st.sampled_from(["p2p", "collective", "auto"]),
)
@settings(max_examples=budget.examples(8))
def test_tokens_that_are_sequences_in_between_are_exact(
    devices: int, sequences: int, marks: set[str], pipeline: str
) -> None:
    """Rows are gathered, then split into sequences, each of which is taken whole.

    Chunks of all devices' rows need not be whole sequences: the stream then stops.
    """
    rows = 8 * sequences

    def marked(x: jax.Array, where: str) -> jax.Array:
        return stream(x, 0) if where in marks else x

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = marked(x @ up, "before").reshape(sequences, 8, 8)
        h = marked(jnp.cumsum(h, axis=1), "inside").reshape(rows, 8)
        return marked(h @ down, "behind")

    args = array(rows, 4), array(4, 8, seed=1), array(8, 4, seed=2)
    specs = (P("tp"), P(None, "tp"), P("tp")), P("tp")
    try:
        exact(f, *args, **tp(devices, *specs, pipeline=pipeline))
    except (errors.PipelineError, errors.ChunksError, errors.StreamDimError):
        assert pipeline != "auto"


def test_marks_on_both_sides_of_whole_sequences_make_two_loops() -> None:
    """Two sequences on four devices: a chunk is half of one."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = jnp.cumsum(stream(x @ up, 0).reshape(2, 16, 8), axis=1)
        return stream(h.reshape(32, 8) @ down, 0)

    args = array(32, 4), array(4, 8, seed=1), array(8, 4, seed=2)
    specs = (P("tp"), P(None, "tp"), P("tp")), P("tp")
    program = exact(f, *args, **tp(4, *specs, pipeline="p2p"))
    assert len(loops(program)) == 2
    said = "2 steps do not divide into the shards of a gathered dim"
    assert any(said in note for note in notes(program))
