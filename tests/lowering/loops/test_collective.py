"""The collective pipeline: chunk s is the s-th slice of every device's shard.

Each function runs on the mesh and by the interpreter against the plain function; the
smallest of each kind shows its Host IR.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute, Select, walk
from tests.lowering.traced import array, check, chunk_counts, loops, work

Golden = Callable[..., None]
MakeMesh = Callable[..., Mesh]

shard, stream = jhost.shard, jhost.stream


def on_devices(
    make_mesh: MakeMesh, fun: Callable[..., Any], *args: Any, devices: int = 2
) -> Program:
    return check(fun, *args, mesh=make_mesh((devices,), ("tp",)))


def the_loop(program: Program) -> list[str]:
    (loop,) = loops(program)
    return work(loop.body)


# --- Each communication in a loop --------------------------------------------------- #


def gathered(x: jax.Array) -> jax.Array:
    y = stream(shard(x, P("tp", None)) * 2, 0, chunks=2)
    return shard(shard(y, P("tp", None)), P())


def test_all_gather(make_mesh: MakeMesh, golden: Golden) -> None:
    """The chunk that arrives is two slices, one of each device's stretch."""
    program = on_devices(make_mesh, gathered, array(8, 3))
    assert the_loop(program) == ["mul", "AllGather"]
    golden(str(program))


def matmul_all_reduce(x: jax.Array, w: jax.Array) -> jax.Array:
    x, w = shard(x, P(None, "tp")), shard(w, P("tp", None))
    return shard(stream(x @ w, 0, chunks=2), P())


def test_all_reduce(make_mesh: MakeMesh, golden: Golden) -> None:
    program = on_devices(make_mesh, matmul_all_reduce, array(4, 6), array(6, 2))
    assert the_loop(program) == ["dot_general", "AllReduce"]
    golden(str(program))


def matmul_reduce_scatter(x: jax.Array, w: jax.Array) -> jax.Array:
    x, w = shard(x, P(None, "tp")), shard(w, P("tp", None))
    return shard(stream(x @ w, 0, chunks=2), P("tp", None))


def test_reduce_scatter(make_mesh: MakeMesh, golden: Golden) -> None:
    """No reshape and no broadcast of the user's, as nvFuser needs."""
    program = on_devices(make_mesh, matmul_reduce_scatter, array(8, 6), array(6, 2))
    assert the_loop(program) == ["dot_general", "ReduceScatter"]
    golden(str(program))


def exchanged(axis: int) -> Callable[[jax.Array], jax.Array]:
    def f(x: jax.Array) -> jax.Array:
        y = stream(shard(x, P("tp", None, None)) * 2, axis, chunks=2)
        return shard(shard(y, P("tp", None, None)), P(None, "tp", None)) + 1

    return f


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_all_to_all(axis: int, make_mesh: MakeMesh, golden: Golden) -> None:
    """Streamed along the dim put together, the dim split, and one it leaves alone."""
    program = on_devices(make_mesh, exchanged(axis), array(4, 4, 2))
    assert the_loop(program) == ["mul", "AllToAll", "add"]
    golden(str(program))


def test_a_part_by_rank(make_mesh: MakeMesh) -> None:
    """No communication: each device keeps its part of another dim."""

    def f(x: jax.Array) -> jax.Array:
        y = stream(shard(x, P()) * 2, 0, chunks=2)
        return shard(shard(y, P()), P(None, "tp")) + 1

    assert the_loop(on_devices(make_mesh, f, array(4, 4))) == ["mul", "add"]


# --- Pipelines ---------------------------------------------------------------------- #


def gather_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    x = stream(shard(x, P("tp", None)), 0, chunks=2)
    return shard(x @ shard(w, P(None, "tp")), P(None, "tp"))


def mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    x = shard(x, P("tp", None))
    w, v = shard(w, P(None, "tp")), shard(v, P("tp", None))
    y = stream(jnp.maximum(x @ w, 0) @ v, 0, chunks=2)
    return shard(y, P("tp", None))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_gather_matmul(devices: int, make_mesh: MakeMesh) -> None:
    args = array(16, 3), array(3, 64, seed=1)
    program = on_devices(make_mesh, gather_matmul, *args, devices=devices)
    assert the_loop(program) == ["AllGather", "dot_general"]


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_mlp(devices: int, make_mesh: MakeMesh) -> None:
    """One loop from the gather to the reduce-scatter: nothing is ever assembled."""
    args = array(16, 4), array(4, 64, seed=1), array(64, 4, seed=2)
    program = on_devices(make_mesh, mlp, *args, devices=devices)
    assert the_loop(program) == [
        "AllGather",
        "dot_general",
        "max",
        "dot_general",
        "ReduceScatter",
    ]


@pytest.mark.parametrize("chunks", [2, 3, 4, 5, 7])
def test_chunks_that_do_not_divide_a_shard(chunks: int, make_mesh: MakeMesh) -> None:
    """Seven rows a device: the last slice of every shard is the smaller one."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = shard(x, P("tp", None))
        w, v = shard(w, P(None, "tp")), shard(v, P("tp", None))
        y = stream(jnp.maximum(x @ w, 0) @ v, 0, chunks=chunks)
        return shard(y, P("tp", None))

    args = array(14, 4), array(4, 64, seed=1), array(64, 4, seed=2)
    program = on_devices(make_mesh, f, *args)
    assert chunk_counts(program) == [-(-7 // -(-7 // chunks))]
    assert the_loop(program)[-1] == "ReduceScatter"


def weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """Rows are contracted: gathered on one side, cut on the other."""
    x = stream(shard(x, P("tp", None)), 0, chunks=2)
    return shard(jnp.swapaxes(x, 0, 1) @ shard(g, P(None, "tp")), P(None, "tp"))


def test_a_gathered_dim_that_is_contracted(make_mesh: MakeMesh) -> None:
    """One of the two layouts that backward needs beside those of forward."""
    program = on_devices(make_mesh, weight_gradient, array(8, 3), array(8, 64, seed=1))
    assert "AllGather" in the_loop(program)
    (dot,) = [
        s
        for s in walk(program.body)
        if isinstance(s, Compute) and "dot_general" in work([s])
    ]
    assert dot.reducer == "sum"


def test_a_gathered_dim_on_the_right_operand(make_mesh: MakeMesh) -> None:
    """The other one."""

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        x = stream(shard(x, P(None, "tp")), 1, chunks=2)
        return shard(shard(w, P("tp", None)) @ x, P("tp", None))

    program = on_devices(make_mesh, f, array(64, 3), array(3, 8, seed=1))
    assert the_loop(program) == ["AllGather", "dot_general"]


# --- Groups ------------------------------------------------------------------------- #


def groups(program: Program) -> dict[str, int]:
    """How many stretches of each buffer a chunk is cut from."""
    return {
        stmt.source.name: stmt.groups
        for stmt in walk(program.body)
        if isinstance(stmt, Select)
    }


@pytest.mark.parametrize("devices", [2, 4])
def test_a_chunk_of_a_gathered_dim_is_a_slice_of_every_stretch(
    devices: int, make_mesh: MakeMesh
) -> None:
    program = on_devices(make_mesh, gathered, array(8, 3), devices=devices)
    assert list(groups(program).values()) == [1, devices]


def test_a_reshape_inside_takes_the_stretches_along(make_mesh: MakeMesh) -> None:
    """The gathered dim is split: of [4, 2] rows each device has two of the four."""

    def f(x: jax.Array) -> jax.Array:
        y = shard(shard(x, P("tp", None)) * 2, P("tp", None))
        y = stream(jnp.reshape(shard(y, P()), (4, 2, 3)), 0, chunks=2)
        return y + 1

    program = on_devices(make_mesh, f, array(8, 3))
    assert groups(program)["result"] == 2


def test_positions_inside_a_chunk_of_stretches(make_mesh: MakeMesh) -> None:
    """`iota` counts where the rows stand in the whole."""

    def f(x: jax.Array) -> jax.Array:
        y = shard(shard(x, P("tp", None)) * 2, P("tp", None))
        count = jax.lax.broadcasted_iota(jnp.float32, (8, 3), 0)
        return stream(shard(y, P()) + count, 0, chunks=2)

    program = on_devices(make_mesh, f, array(8, 3))
    assert "iota" in the_loop(program)
    assert groups(program)["result"] == 2


# --- Several mesh axes -------------------------------------------------------------- #


def test_data_and_tensor_parallel(make_mesh: MakeMesh, golden: Golden) -> None:
    """The rows of a dp shard are cut, and only tp communicates."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = shard(x, P("dp", None))
        w, v = shard(w, P(None, "tp")), shard(v, P("tp", None))
        y = stream(jnp.maximum(x @ w, 0) @ v, 0, chunks=2)
        return shard(y, P("dp", None))

    mesh = make_mesh((2, 2), ("dp", "tp"))
    program = check(f, array(8, 4), array(4, 8), array(8, 4), mesh=mesh)
    assert the_loop(program)[-1] == "AllReduce"
    golden(str(program))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4), (4, 2)])
def test_rows_over_two_axes(sizes: tuple[int, int], make_mesh: MakeMesh) -> None:
    """Sequence parallelism beside data parallelism: gathered over tp alone."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = shard(x, P(("dp", "tp"), None))
        w, v = shard(w, P(None, "tp")), shard(v, P("tp", None))
        y = stream(jnp.maximum(x @ w, 0) @ v, 0, chunks=2)
        return shard(y, P(("dp", "tp"), None))

    mesh = make_mesh(sizes, ("dp", "tp"))
    args = array(32, 4), array(4, 64, seed=1), array(64, 4, seed=2)
    program = check(f, *args, mesh=mesh)
    assert the_loop(program)[::4] == ["AllGather", "ReduceScatter"]


def test_a_dim_gathered_over_two_axes_at_once(make_mesh: MakeMesh) -> None:
    def f(x: jax.Array) -> jax.Array:
        y = stream(shard(x, P(("dp", "tp"), None)) * 2, 0, chunks=2)
        return shard(shard(y, P(("dp", "tp"), None)), P()) + 1

    program = check(f, array(8, 3), mesh=make_mesh((2, 2), ("dp", "tp")))
    assert the_loop(program) == ["mul", "AllGather", "add"]
    assert groups(program)["result"] == 4


def test_gathers_over_one_axis_after_another(make_mesh: MakeMesh) -> None:
    """fsdp: the weights' shards come together while rows are cut along tp."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = shard(x, P("tp", None)), shard(w, P("dp", "tp"))
        return shard(stream(x, 0, chunks=2) @ w, P(None, "tp"))

    mesh = make_mesh((2, 2), ("dp", "tp"))
    program = check(f, array(8, 4), array(4, 64, seed=1), mesh=mesh)
    assert the_loop(program) == ["AllGather", "dot_general"]
