"""Streams that cannot be: what is refused, what is not, and by which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.errors import (
    ChunksError,
    JhostError,
    PipelineError,
    StreamConflictError,
    StreamDimError,
)
from jhost.lowering.explain import count_loops
from jhost.lowering.ir.remarks import StreamReport
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import exact, tp
from tests.lowering.traced import WHOLE, array, built, chunk_counts, lowered, remarks

stream = jhost.stream
X = (8, 4)


def refused(fun: Callable[..., Any], *args: Any, **mesh: int) -> JhostError:
    with pytest.raises(JhostError) as error:
        lowered(fun, *args, **mesh)
    assert "test_refusals.py" in str(error.value)
    return error.value


@pytest.mark.parametrize("name", WHOLE)
def test_a_mark_on_a_dim_that_is_whole_is_refused(name: str) -> None:
    error = refused(lambda x: stream(WHOLE[name](x), 0, chunks=2), X)
    assert isinstance(error, StreamDimError)
    assert name in str(error)


def test_a_mark_with_nothing_around_that_works_in_chunks_is_refused() -> None:
    error = refused(lambda x: lax.sort(stream(x, 0, chunks=2), dimension=0), X)
    assert isinstance(error, StreamDimError)
    assert "sort needs dim 0 whole" in str(error)


def test_all_marks_that_cannot_be_are_refused_at_once() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = stream(lax.sort(x, dimension=0), 0, chunks=2)
        return y, stream(lax.cumsum(x, axis=1), 1, chunks=2)

    error = refused(f, X)
    assert "sort needs dim 0 whole" in str(error)
    assert "cumsum needs dim 1 whole" in str(error)


@pytest.mark.parametrize(
    ("axis", "chunks", "named"), [(1, 2, "axis=1"), (0, 4, "chunks=4")]
)
def test_two_streams_that_differ_on_one_value_are_refused(
    axis: int, chunks: int, named: str
) -> None:
    error = refused(
        lambda x: stream(stream(x, 0, chunks=2), axis, chunks=chunks) * 2, X
    )
    assert isinstance(error, StreamConflictError)
    assert "axis=0, chunks=2" in str(error)
    assert named in str(error)


def test_more_chunks_than_a_device_has_steps_are_refused() -> None:
    def f(x: jax.Array) -> jax.Array:
        return stream(jnp.sin(jhost.shard(x, P("tp"))), 0, chunks=8)

    error = refused(f, X, tp=2)
    assert isinstance(error, ChunksError)
    assert "8 chunks" in str(error)
    assert "4 steps" in str(error)


def test_a_p2p_pipeline_where_nothing_moves_the_dim_is_refused() -> None:
    def f(x: jax.Array) -> jax.Array:
        return stream(jnp.sin(jhost.shard(x, P("tp"))), 0, pipeline="p2p")

    error = refused(f, X, tp=2)
    assert isinstance(error, PipelineError)
    assert "axis=0" in str(error)


def test_a_stream_that_is_off_is_never_refused() -> None:
    """Not even on a dim that is whole."""
    program = lowered(
        lambda x: stream(lax.sort(x, dimension=0), 0, chunks=2, pipeline="off"), X
    )
    assert chunk_counts(program) == []
    (report,) = remarks(program, StreamReport)
    assert "off, as asked" in report.text


@pytest.mark.parametrize("name", WHOLE)
def test_a_gradient_is_never_refused_for_a_mark_of_the_forward(name: str) -> None:
    """The transposed mark is on what the transposed operation makes whole."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(WHOLE[name](stream(jnp.sin(x), 0, chunks=2)) ** 2)

    given = jax.grad(jhost.jit(f))(array(*X))
    chex.assert_trees_all_close(given, jax.grad(f)(array(*X)), rtol=1e-5, atol=1e-5)


def test_marks_stand_in_the_first_program_alone() -> None:
    before = built(lambda x: stream(jnp.sin(x), 0, chunks=2), X)
    assert len(before.marks) == 1
    assert lowered(lambda x: stream(jnp.sin(x), 0, chunks=2), X).marks == ()


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("scan", [lax.cummax, lax.cumsum])
def test_a_stream_ends_where_a_gather_leaves_fewer_steps_than_chunks(
    scan: Callable[[Any], Any], chunks: int
) -> None:
    """A scan has a block for each device, which is one step in each group of rows."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(scan(stream(x @ w, 0, chunks=chunks, pipeline="collective")))

    columns = P(None, "tp")
    args = integers(32, 8), integers(8, 8)
    program = exact(f, *args, **tp(4, (P("tp"), columns), columns))
    assert count_loops(program) == 1
