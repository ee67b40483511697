"""Parity group E with nvFuser: stream pipelines on many devices.

A test for each row of nvFuser's `test_multidevice_stream_parallel_type.cpp`: the
numbers exactly, the Host IR on four devices as text, and the matmuls and collectives
that a device runs.  `test_rings.py` has the rows about overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.program import Program
from tests.lowering.on_mesh import calls, each_size, exact, tp
from tests.lowering.traced import array, chunk_counts, loops, work

Golden = Callable[..., None]
Function = Callable[..., jax.Array]

GATHER = (P("tp"), P(None, "tp")), P(None, "tp")
"""Rows of the left operand come together, the columns of the right one stay apart."""

SCATTER = (P(None, "tp"), P("tp")), P("tp")
"""The contracted dim is sharded, and the rows of the result are."""

REDUCE = (P(None, "tp"), P("tp")), P()
"""The contracted dim is sharded, and every device has the whole result."""


def matmul(**how: Any) -> Function:
    """A matmul whose rows are streamed."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, 0, **how)

    return f


def body(program: Program) -> str:
    """What the only loop does."""
    (loop,) = loops(program)
    return ", ".join(work(loop.body))


# --- Collectives in a loop ---------------------------------------------------------- #


@each_size
def test_allgather(devices: int, golden: Golden) -> None:
    """Streamed on another dim than the one gathered."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.copy(x), 0, chunks=4)

    x = array(4, devices * 2)
    program = exact(f, x, **tp(devices, P(None, "tp"), P()))
    assert body(program) == "AllGather"
    assert calls(program) == {"all_gather 1x2": 4}
    if devices == 4:
        golden(str(program))


@each_size
def test_allreduce(devices: int, golden: Golden) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sum(x, axis=1), 0, chunks=4)

    x = array(4, devices, 8)
    program = exact(f, x, **tp(devices, P(None, "tp"), P()))
    assert body(program) == "reduce_sum, AllReduce"
    assert calls(program) == {"psum 1x8": 4}
    if devices == 4:
        golden(str(program))


@each_size
def test_reduce_scatter(devices: int, golden: Golden) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sum(x, axis=1), 0, chunks=4)

    x = array(4, devices, devices, 8)
    program = exact(f, x, **tp(devices, P(None, "tp"), P(None, "tp")))
    assert body(program) == "reduce_sum, ReduceScatter"
    assert calls(program) == {f"reduce_scatter 1x{devices}x8": 4}
    if devices == 4:
        golden(str(program))


@each_size
def test_ag_matmul_gather_before(devices: int, golden: Golden) -> None:
    x, w = array(devices * 4, 8), array(8, 64, seed=1)
    program = exact(matmul(chunks=2), x, w, **tp(devices, *GATHER))
    assert body(program) == "AllGather, dot_general"
    assert calls(program) == {
        "all_gather 2x8": 2,
        f"dot_general {devices * 2}x8 8x{64 // devices}": 2,
    }
    if devices == 4:
        golden(str(program))


@each_size
def test_ag_matmul_gather_after(devices: int, golden: Golden) -> None:
    """The result is smaller than the operand, so the result is what is gathered."""
    x, w = array(devices * 4, 8), array(8, 4, seed=1)
    program = exact(matmul(chunks=2), x, w, **tp(devices, (P("tp"), P()), P()))
    assert body(program) == "dot_general, AllGather"
    assert calls(program) == {"dot_general 2x8 8x4": 2, "all_gather 2x4": 2}
    if devices == 4:
        golden(str(program))


@each_size
def test_matmul_ar(devices: int, golden: Golden) -> None:
    x, w = array(16, devices * 8), array(devices * 8, 4, seed=1)
    program = exact(matmul(chunks=4), x, w, **tp(devices, *REDUCE))
    assert body(program) == "dot_general, AllReduce"
    assert calls(program) == {"dot_general 4x8 8x4": 4, "psum 4x4": 4}
    if devices == 4:
        golden(str(program))


@each_size
def test_matmul_rs_through_bcast(devices: int, golden: Golden) -> None:
    """nvFuser's user broadcasts and reshapes; here nothing but the layout is said."""
    x, w = array(32, devices * 8), array(devices * 8, 2, seed=1)
    program = exact(matmul(chunks=4), x, w, **tp(devices, *SCATTER))
    assert body(program) == "dot_general, ReduceScatter"
    assert calls(program) == {"dot_general 8x8 8x2": 4, "reduce_scatter 8x2": 4}
    if devices == 4:
        golden(str(program))


# --- From device to device ---------------------------------------------------------- #


@each_size
def test_allgather_p2p(devices: int, golden: Golden) -> None:
    """The own shard is a copy, and D - 1 come by permutes."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.copy(x), 0, pipeline="p2p")

    program = exact(f, array(devices * 2, 3), **tp(devices, P("tp"), P()))
    assert body(program) == "CollectivePermute"
    assert calls(program) == {"ppermute 2x3": devices - 1}
    if devices == 4:
        golden(str(program))


@each_size
def test_ag_matmul_p2p(devices: int, golden: Golden) -> None:
    x, w = array(devices * 4, 8), array(8, 64, seed=1)
    program = exact(matmul(pipeline="p2p"), x, w, **tp(devices, *GATHER))
    assert body(program) == "CollectivePermute, dot_general"
    assert calls(program) == {
        "ppermute 4x8": devices - 1,
        f"dot_general 4x8 8x{64 // devices}": devices,
    }
    if devices == 4:
        golden(str(program))


@each_size
def test_reduce_scatter_p2p(devices: int, golden: Golden) -> None:
    """The sum is part of the pipeline; nvFuser's user writes it behind."""
    x, w = array(devices * 4, devices * 8), array(devices * 8, 2, seed=1)
    program = exact(matmul(pipeline="p2p"), x, w, **tp(devices, *SCATTER))
    assert body(program) == "dot_general, CollectivePermute"
    assert calls(program) == {
        "dot_general 4x8 8x2": devices,
        "ppermute 4x2": devices - 1,
    }
    assert calls(program, "add")["add 4x2 4x2"] == devices - 1
    if devices == 4:
        golden(str(program))


@each_size
def test_reduce_scatter_reduce_based(devices: int) -> None:
    """nvFuser: a reduce a chunk to its owner.  Here each device gets a part of it."""
    x, w = array(64, 64), array(64, 64, seed=1)
    how = {"pipeline": "collective", "chunks": devices}
    program = exact(matmul(**how), x, w, **tp(devices, *SCATTER))
    rows, inner = 64 // devices, 64 // devices
    assert calls(program) == {
        f"dot_general {rows}x{inner} {inner}x64": devices,
        f"reduce_scatter {rows}x64": devices,
    }


@each_size
def test_matmul_ar_p2p(devices: int, golden: Golden) -> None:
    """To the owners, who add, and back to all: two loops."""
    x, w = array(devices * 4, devices * 8), array(devices * 8, 4, seed=1)
    program = exact(matmul(pipeline="p2p"), x, w, **tp(devices, *REDUCE))
    first, second = loops(program)
    assert work(first.body) == ["dot_general", "CollectivePermute"]
    assert work(second.body) == ["CollectivePermute"]
    assert calls(program) == {
        "dot_general 4x8 8x4": devices,
        "ppermute 4x4": 2 * (devices - 1),
    }
    if devices == 4:
        golden(str(program))


# --- The two other layouts of gather and matmul ------------------------------------- #

PIPELINES: dict[str, dict[str, Any]] = {
    "collective": {"chunks": 2},
    "p2p": {"pipeline": "p2p"},
}


@each_size
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_gathered_dim_is_contracted(
    devices: int, pipeline: str, golden: Golden
) -> None:
    """A weight's gradient: the chunks' products are summed in the loop."""

    def f(x: jax.Array, dy: jax.Array) -> jax.Array:
        x = jhost.stream(x, 0, **PIPELINES[pipeline])
        return jnp.swapaxes(x, 0, 1) @ dy

    x, dy = array(devices * 2, 4), array(devices * 2, 64, seed=1)
    program = exact(f, x, dy, **tp(devices, *GATHER))
    moves = "AllGather" if pipeline == "collective" else "CollectivePermute"
    assert body(program).endswith(f"{moves}, dot_general")
    if devices == 4:
        golden(str(program))


@each_size
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_gathered_dim_is_on_the_right_operand(
    devices: int, pipeline: str, golden: Golden
) -> None:
    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return w @ jhost.stream(x, 1, **PIPELINES[pipeline])

    w, x = array(64, 8), array(8, devices * 2, seed=1)
    program = exact(f, w, x, **tp(devices, (P("tp"), P(None, "tp")), P("tp")))
    moves = "AllGather" if pipeline == "collective" else "CollectivePermute"
    assert body(program) == f"{moves}, dot_general"
    if devices == 4:
        golden(str(program))


# --- Blocks ------------------------------------------------------------------------- #

HOW = [
    {"chunks": 2},
    {"pipeline": "p2p"},
    {"pipeline": "p2p", "chunks": "2 D"},
]


def how_on(devices: int, how: dict[str, Any]) -> dict[str, Any]:
    return {**how, "chunks": 2 * devices} if how.get("chunks") == "2 D" else how


@each_size
@pytest.mark.parametrize("how", HOW, ids=["collective", "p2p", "p2p in pieces"])
def test_mlp_block(devices: int, how: dict[str, Any], golden: Golden) -> None:
    """One loop from gather to reduction; nvFuser and every peer have two."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = jnp.maximum(x @ up, 0)
        return jhost.stream(h @ down, 0, **how_on(devices, how))

    args = array(devices * 4, 8), array(8, 64, seed=1), array(64, 8, seed=2)
    specs = (P("tp"), P(None, "tp"), P("tp")), P("tp")
    program = exact(f, *args, **tp(devices, *specs))
    come, go = (
        ("CollectivePermute",) * 2
        if "pipeline" in how
        else ("AllGather", "ReduceScatter")
    )
    middle = "dot_general, max, dot_general"
    assert f"{come}, {middle}, {go}" in [
        ", ".join(work(b.body)) for b in loops(program)
    ]
    steps = how_on(devices, how).get("chunks", devices)
    assert (
        sum(n for call, n in calls(program).items() if call[:3] == "dot") == 2 * steps
    )
    if devices == 4:
        golden(str(program))


@each_size
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_swiglu_gathers_its_input_once(
    devices: int, pipeline: str, golden: Golden
) -> None:
    """Three weights, one loop, and each chunk of x comes once."""

    def f(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = jnp.maximum(x @ gate, 0) * (x @ up)
        return jhost.stream(h @ down, 0, **PIPELINES[pipeline])

    weights = array(8, 64, seed=1), array(8, 64, seed=2), array(64, 8, seed=3)
    specs = (P("tp"), P(None, "tp"), P(None, "tp"), P("tp")), P("tp")
    program = exact(f, array(devices * 2, 8), *weights, **tp(devices, *specs))
    found = calls(program)
    if pipeline == "collective":
        assert chunk_counts(program) == [2]
        assert (found["all_gather 1x8"], found[f"reduce_scatter {devices}x8"]) == (2, 2)
    else:
        assert chunk_counts(program) == [devices - 1]
        assert found["ppermute 2x8"] == 2 * (devices - 1)
    if devices == 4:
        golden(str(program))
