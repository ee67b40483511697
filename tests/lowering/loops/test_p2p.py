"""P2P pipelines: whose chunk a step works on, what moves, and in which order sums add.

The parity rows stand in `test_blocks.py`; here is what they rest on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.errors import ChunksError, JhostError, PipelineError
from jhost.lowering.ir.index import Index, LoopIndex, Rank, evaluate
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note, StreamReport
from jhost.lowering.ir.statements import Communicate, Compute, Select
from tests.lowering.on_mesh import (
    calls,
    communications,
    every_size,
    exact,
    on,
    program_of,
    tp,
)
from tests.lowering.traced import array, interpreted, loops, remarks, work

Function = Callable[..., jax.Array]

GATHER = (P("tp"), P(None, "tp")), P(None, "tp")
SCATTER = (P(None, "tp"), P("tp")), P("tp")
BLOCK = (P("tp"), P(None, "tp"), P("tp")), P("tp")


def p2p(x: jax.Array, axis: int = 0, chunks: int | None = None) -> jax.Array:
    return jhost.stream(x, axis, chunks=chunks, pipeline="p2p")


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return p2p(x @ w)


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return p2p(jnp.maximum(x @ up, 0) @ down)


def gathering(devices: int) -> tuple[jax.Array, jax.Array]:
    return array(devices * 4, 8), array(8, 64, seed=1)


def scattering(devices: int) -> tuple[jax.Array, jax.Array]:
    return array(devices * 4, devices * 8), array(devices * 8, 2, seed=1)


def weights() -> tuple[jax.Array, jax.Array]:
    return array(8, 64, seed=1), array(64, 8, seed=2)


# --- Rotation ----------------------------------------------------------------------- #


def rotation(program: Program, devices: int) -> Iterator[tuple[int, int, Any, Any]]:
    """Iteration, rank, and the loop's chunk and communication there."""
    (loop,) = loops(program)
    (chunk,) = [s.chunk for s in loop.body if isinstance(s, Compute) and s.chunk]
    (moved,) = [s.shift for s in loop.body if isinstance(s, Communicate)]
    assert moved is not None
    for i in range(loop.extent):
        for rank in range(devices):
            at: dict[Index, int] = {LoopIndex(loop.index): i, Rank("tp"): rank}
            yield i, rank, evaluate(chunk.start, at), evaluate(moved, at)


@every_size
def test_step_k_works_on_the_chunk_that_comes_from_rank_r_plus_k(devices: int) -> None:
    program = program_of(matmul, *gathering(devices), **tp(devices, *GATHER))
    for i, rank, start, shift in rotation(program, devices):
        owner = (rank + i + 1) % devices
        assert start == owner * 4
        assert (rank - shift) % devices == owner  # who sends to this rank


@every_size
def test_step_k_sends_the_partial_result_to_rank_r_plus_k(devices: int) -> None:
    program = program_of(matmul, *scattering(devices), **tp(devices, *SCATTER))
    for i, rank, start, shift in rotation(program, devices):
        owner = (rank + i + 1) % devices
        assert start == owner * 4
        assert (rank + shift) % devices == owner


@every_size
def test_at_every_step_each_rank_sends_one_chunk_and_receives_one(devices: int) -> None:
    """No two ranks send to the same one; and all steps together reach every rank."""
    program = program_of(matmul, *gathering(devices), **tp(devices, *GATHER))
    targets: dict[int, set[int]] = {}
    owners: dict[int, set[int]] = {rank: {rank} for rank in range(devices)}
    for i, rank, start, shift in rotation(program, devices):
        targets.setdefault(i, set()).add((rank + shift) % devices)
        owners[rank].add(start // 4)
    everyone = set(range(devices))
    assert list(targets.values()) == [everyone] * (devices - 1)
    assert list(owners.values()) == [everyone] * devices


# --- The device's own chunk --------------------------------------------------------- #


def test_the_own_chunk_comes_first_where_the_loop_receives() -> None:
    program = program_of(matmul, *gathering(4), **tp(4, *GATHER))
    *first, loop = work(program.body)
    assert first == ["Set", "dot_general"]
    assert loop == "loop(CollectivePermute, dot_general)"


def test_the_own_chunk_comes_last_where_the_loop_sends() -> None:
    program = program_of(matmul, *scattering(4), **tp(4, *SCATTER))
    loop, *last = work(program.body)
    assert loop == "loop(dot_general, CollectivePermute)"
    assert last == ["dot_general", "Set", "add", "add", "add"]


def test_the_own_chunk_is_split_where_the_loop_does_both() -> None:
    """At the last contraction: the first half hides a receive, the second a send."""
    program = program_of(block, array(16, 8), *weights(), **tp(4, *BLOCK))
    assert work(program.body) == [
        *["Set", "dot_general", "max"],
        "loop(CollectivePermute, dot_general, max, dot_general, CollectivePermute)",
        *["dot_general", "Set", "add", "add", "add"],
    ]


def test_work_on_own_shards_stands_outside_the_loop() -> None:
    """A norm before the gather and a residual after the sum: no chunks, no waiting."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        scaled = x * jnp.sum(x, axis=1, keepdims=True)
        return x + p2p(jnp.maximum(scaled @ up, 0) @ down)

    program = exact(f, array(16, 8), *weights(), **tp(4, *BLOCK))
    (loop,) = loops(program)
    assert work(loop.body)[1:-1] == ["dot_general", "max", "dot_general"]
    assert work(program.body)[:3] == ["reduce_sum", "broadcast_in_dim", "mul"]
    assert work(program.body)[-4:] == ["add"] * 4


# --- The order of sums -------------------------------------------------------------- #


def in_order_of_steps(parts: np.ndarray, dtype: Any) -> np.ndarray:
    """The documented order: the owner's own part, then those of r - 1, r - 2, ..."""
    devices, rows = len(parts), parts.shape[1] // len(parts)
    owned: list[np.ndarray] = []
    for rank in range(devices):
        mine = parts[:, rank * rows : (rank + 1) * rows].astype(dtype)
        order = [mine[(rank - k) % devices] for k in range(devices)]
        owned.append(functools.reduce(np.add, order))
    return np.concatenate(owned).astype(parts.dtype)


def sum_of_parts(x: jax.Array) -> jax.Array:
    """Each device's part as it is: `x` has one row a device."""
    return p2p(lax.reduce_sum(x, (0,)))


@every_size
@pytest.mark.parametrize(
    ("run", "target"),
    [(jhost.jit, P("tp")), (jhost.jit, P()), (interpreted, P())],
    ids=["scattered", "everywhere", "interpreted"],
)
def test_sums_add_in_the_order_of_the_steps(devices: int, run: Any, target: P) -> None:
    """Bit for bit, on numbers whose float32 sum depends on the order."""
    random = np.random.default_rng(0)
    scales = 10.0 ** random.integers(-4, 5, (devices, devices * 8, 5))
    parts = (random.standard_normal(scales.shape) * scales).astype(np.float32)
    settings = tp(devices, P("tp"), target)
    given = run(sum_of_parts, **settings)(parts)
    wanted = in_order_of_steps(parts, np.float32)
    np.testing.assert_array_equal(np.asarray(given), wanted)
    if devices > 2:  # of two numbers there is one sum
        assert (wanted != parts.sum(0)).any()


@every_size
@pytest.mark.parametrize("run", [jhost.jit, interpreted])
def test_sums_of_bfloat16_add_in_float32(devices: int, run: Any) -> None:
    """1 and 2**-8 each: a bfloat16 sum would stay at 1."""
    parts = np.full((devices, devices * 2, 2), 2.0**-8, jnp.bfloat16)
    parts[0] = 1
    settings = tp(devices, P("tp"), P("tp"))
    given = run(sum_of_parts, **settings)(parts)
    wanted = in_order_of_steps(parts, np.float32)
    assert given.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(given), wanted)
    if devices == 8:
        assert (in_order_of_steps(parts, jnp.bfloat16) != wanted).any()


REDUCERS: dict[str, Function] = {
    "sum": jnp.sum,
    "prod": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}


@pytest.mark.parametrize("target", [P("tp"), P()], ids=["scattered", "everywhere"])
@pytest.mark.parametrize("reducer", REDUCERS)
def test_every_reducer(reducer: str, target: P) -> None:
    def f(x: jax.Array) -> jax.Array:
        return p2p(REDUCERS[reducer](x, axis=0))

    x = array(4, 8, 3).astype(jnp.int32)
    x = x > -2 if reducer in ("and", "or") else x
    program = exact(f, x, **tp(4, P("tp"), target))
    assert work(loops(program)[0].body) == [f"reduce_{reducer}", "CollectivePermute"]


def test_an_all_reduce_splits_in_two() -> None:
    """Partial sums to their owners, and what the owners have added back to all."""
    settings = tp(4, SCATTER[0], P())
    program = exact(matmul, *scattering(4), **settings)
    first, second = (work(loop.body) for loop in loops(program))
    assert first == ["dot_general", "CollectivePermute"]
    assert second == ["CollectivePermute"]


@pytest.mark.parametrize("where", ["mark", "function"])
def test_an_all_reduce_splits_wherever_the_pipeline_is_asked_for(where: str) -> None:
    """Though a shard has fewer rows than there are chunks in all."""
    how: dict[str, Any] = {"pipeline": "p2p"}

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        x = jhost.stream(x, 0, chunks=8, **(how if where == "mark" else {}))
        return jnp.maximum(x @ up, 0) @ down

    settings = tp(4, BLOCK[0], P(), **(how if where == "function" else {}))
    program = program_of(f, array(16, 8), *weights(), **settings)
    kinds = {kind.split()[0] for kind in communications(program)}
    assert kinds == {"CollectivePermute"}


# --- Sums over the streamed dim ----------------------------------------------------- #


def gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.swapaxes(p2p(x), 0, 1) @ dy


@pytest.mark.parametrize(
    ("dtype", "columns", "loop"),
    [
        # Each device has columns of its own: no other adds to them.
        (jnp.float32, P(None, "tp"), "loop(CollectivePermute, dot_general)"),
        # All have all of the sum, and would each add in another order.
        (jnp.float32, P(), "loop(CollectivePermute)"),
        (jnp.int32, P(), "loop(CollectivePermute, dot_general)"),
    ],
)
def test_a_float_sum_that_every_device_holds_stays_out_of_the_loop(
    dtype: Any, columns: P, loop: str
) -> None:
    x, dy = array(8, 4).astype(dtype), array(8, 64, seed=1).astype(dtype)
    program = exact(gradient, x, dy, **tp(4, (P("tp"), columns), columns))
    assert loop in work(program.body)


def test_what_every_device_holds_is_the_same_on_every_device() -> None:
    """Replicas agree bit for bit, on numbers whose sum depends on the order."""
    random = np.random.default_rng(0)
    x, dy = (jnp.array(random.standard_normal((8, n)), jnp.float32) for n in (4, 64))
    result = jhost.jit(gradient, **tp(4, (P("tp"), P()), P()))(x, dy)
    first, *others = (np.asarray(shard.data) for shard in result.addressable_shards)
    for other in others:
        np.testing.assert_array_equal(first, other)


# --- Pieces of shards --------------------------------------------------------------- #


@pytest.mark.parametrize(("pieces", "sizes"), [(2, [3, 2]), (3, [2, 2, 1])])
@pytest.mark.parametrize("sides", ["gather", "scatter", "both"])
def test_shards_go_in_pieces_the_last_may_be_smaller(
    pieces: int, sizes: list[int], sides: str
) -> None:
    """Five rows a device."""

    def two(x: jax.Array, w: jax.Array) -> jax.Array:
        return p2p(x @ w, chunks=4 * pieces)

    def three(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return p2p(jnp.maximum(x @ up, 0) @ down, chunks=4 * pieces)

    match sides:
        case "gather":
            program = exact(two, array(20, 8), weights()[0], **tp(4, *GATHER))
        case "scatter":
            x, w = array(20, 32), array(32, 2, seed=1)
            program = exact(two, x, w, **tp(4, *SCATTER))
        case _:
            program = exact(three, array(20, 8), *weights(), **tp(4, *BLOCK))
    remote, found = loops(program)[-1 if sides != "scatter" else 0], calls(program)
    assert remote.extent == 3 * pieces
    columns = 2 if sides == "scatter" else 8
    way = 2 if sides == "both" else 1
    for rows in set(sizes):
        times = 3 * way * sizes.count(rows)
        assert found[f"ppermute {rows}x{columns}"] == times


def test_pieces_that_do_not_come_out_are_fewer() -> None:
    """Five rows in four pieces of one size are three; `explain` says how many."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return p2p(x @ w, chunks=16)

    program = exact(f, array(20, 8), weights()[0], **tp(4, *GATHER))
    assert loops(program)[-1].extent == 9
    (stream,) = remarks(program, StreamReport)
    assert stream.reason == (
        "on each device 3 chunks, not the 4 asked for: 5 steps can be cut into 3 or 5 "
        "chunks"
    )


# --- Two mesh axes ------------------------------------------------------------------ #


def test_data_parallel_over_one_axis_and_p2p_over_the_other() -> None:
    """The batch is over dp, and each group along tp has a rotation of its own."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return p2p(jnp.maximum(x @ up, 0) @ down, axis=1)

    specs = (P("dp", "tp"), P(None, "tp"), P("tp")), P("dp", "tp")
    program = exact(f, array(4, 8, 8), *weights(), **on({"dp": 2, "tp": 2}, *specs))
    (loop,) = loops(program)
    moves = [s for s in loop.body if isinstance(s, Communicate)]
    assert [(s.kind, s.axes) for s in moves] == [("CollectivePermute", ("tp",))] * 2


def test_rows_over_both_axes_rotate_along_the_minor_one() -> None:
    specs = (P(("dp", "tp")), P(None, "tp"), P("tp")), P(("dp", "tp"))
    axes = {"dp": 2, "tp": 2}
    program = exact(block, array(16, 8), *weights(), **on(axes, *specs))
    (loop,) = loops(program)
    assert {s.axes for s in loop.body if isinstance(s, Communicate)} == {("tp",)}


def test_of_moves_along_one_axis_after_another_one_is_pipelined() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return p2p(jhost.shard(x, P("dp")) @ w)

    specs = (P(("dp", "tp")), P(None, "tp")), P(None, "tp")
    program = exact(f, *gathering(4), **on({"dp": 2, "tp": 2}, *specs))
    (loop,) = loops(program)
    moves = {s.axes for s in loop.body if isinstance(s, Communicate)}
    assert len(moves) == 1


@pytest.mark.parametrize("chunks", [4, 8])
def test_two_axes_may_be_one_ring(chunks: int) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return p2p(x @ w, chunks=chunks)

    specs = (P(("dp", "tp")), P(None, ("dp", "tp"))), P(None, ("dp", "tp"))
    settings = on({"dp": 2, "tp": 2}, *specs)
    program = exact(f, *gathering(4), **settings)
    moves = [s for s in loops(program)[-1].body if isinstance(s, Communicate)]
    assert [s.axes for s in moves] == [("dp", "tp")]


def test_a_collective_over_the_other_axis_stays_in_the_loop() -> None:
    """All devices along dp are at the same chunk at the same time."""
    specs = (P("tp", "dp"), P("dp", "tp")), P(None, ("tp", "dp"))
    settings = on({"dp": 2, "tp": 2}, *specs)
    program = exact(matmul, array(16, 64), array(64, 16, seed=1), **settings)
    (loop,) = loops(program)
    assert work(loop.body) == ["CollectivePermute", "dot_general", "ReduceScatter"]


# --- What is refused ---------------------------------------------------------------- #


def refused(fun: Function, *args: Any, **settings: Any) -> JhostError:
    with pytest.raises(JhostError) as error:
        program_of(fun, *args, **settings)
    assert "axis=" in str(error.value)
    assert "test_p2p.py" in str(error.value)
    return error.value


@pytest.mark.parametrize("specs", [P(), P(None, "tp")])
def test_a_dim_that_nothing_moves_is_refused(specs: P) -> None:
    error = refused(lambda x: p2p(x * 2), array(8, 8), **tp(4, specs, specs))
    assert isinstance(error, PipelineError)
    assert "no gather, reduce-scatter or all-to-all moves the dim" in str(error)


@pytest.mark.parametrize("chunks", [1, 2, 6])
def test_a_count_that_is_no_multiple_of_the_devices_is_refused(chunks: int) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return p2p(x @ w, chunks=chunks)

    error = refused(f, *gathering(4), **tp(4, *GATHER))
    assert isinstance(error, ChunksError)
    assert "needs a multiple of 4 chunks: " in str(error)
    near = {1: "4", 2: "4", 6: "4 or 8"}[chunks]
    assert f"chunks: {near}, not {chunks}." in str(error)


def test_more_pieces_than_rows_of_a_shard_are_a_wish_that_is_not_met() -> None:
    settings = tp(4, *GATHER, chunks=16)
    program = program_of(matmul, array(8, 8), weights()[0], **settings)
    (note,) = remarks(program, Note)
    assert "16 chunks were asked for, 4 on a device," in note.text
    assert "where a device has 2 steps" in note.text
    (report,) = remarks(program, StreamReport)
    assert (report.pipeline, report.chunks) == ("p2p", 4)


# --- What is said ------------------------------------------------------------------- #


def test_the_choice_is_explained() -> None:
    program = program_of(matmul, *gathering(4), **tp(4, *GATHER))
    (report,) = remarks(program, StreamReport)
    assert "p2p pipeline: 4 chunks, one a device" in report.text


def test_a_rotated_result_is_whole_and_in_order() -> None:
    """Each chunk is written where it belongs: no copy puts the rows in order after."""
    program = program_of(matmul, *gathering(4), **tp(4, *GATHER))
    (loop,) = loops(program)
    (place,) = [s for s in loop.body if isinstance(s, Select)]
    assert place.source.name == program.results[0].name
    assert work(program.body)[-1] == "loop(CollectivePermute, dot_general)"


def test_on_one_device_nothing_moves() -> None:
    program = exact(block, array(16, 8), *weights(), **on({"tp": 1}, None, P("tp")))
    assert not loops(program)
