"""Parity group D: every communication from explicit nodes, on 2, 4 and 8 devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.index import Rank
from jhost.lowering.ir.statements import (
    Allocate,
    Set,
    Stmt,
    Wait,
)
from jhost.lowering.rules.reducers import Reducer
from tests.lowering.hand_built import (
    I,
    buffer,
    check,
    communicate,
    compute,
    integers,
    loop,
    mesh_of,
    program,
    select,
)

devices = pytest.mark.parametrize("devices", [2, 4, 8])
WAIT = Wait(communication="c")

REDUCE: dict[Reducer, Callable[..., Any]] = {
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
    "prod": np.prod,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
}
reducers = pytest.mark.parametrize("reducer", list(REDUCE))


def bits(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(-9, 10, shape, dtype=np.int32)


@devices
@pytest.mark.parametrize("dim", [0, 1])
def test_allgather(devices: int, dim: int) -> None:
    mesh, x = mesh_of(tp=devices), integers(8, 16)
    local = ["8", "16"]
    local[dim] = f"{x.shape[dim] // devices}@tp"
    source = buffer(f"x: f32[{', '.join(local)}]")
    out = buffer("y: f32[8, 16]")
    gather = communicate("AllGather", out, source, dim=dim)
    check(program(mesh, (source,), (out,), gather, WAIT), mesh, (x,), x)


def partial_sums(devices: int, reducer: Reducer) -> tuple[Any, Any, Any, Stmt]:
    """A value partial over tp: device r has row r of the param."""
    source = buffer("x: i32[1@tp, 8]")
    partial = buffer("p: i32[8]", partial={"tp": reducer})
    drop = compute(lambda x: x[0], (source,), (partial,))
    return bits(devices, 8), source, partial, drop


@devices
@reducers
def test_allreduce(devices: int, reducer: Reducer) -> None:
    mesh = mesh_of(tp=devices)
    x, source, partial, drop = partial_sums(devices, reducer)
    out = buffer("y: i32[8]")
    reduce = communicate("AllReduce", out, partial, reducer=reducer)
    wanted = REDUCE[reducer](x, axis=0)
    check(program(mesh, (source,), (out,), drop, reduce, WAIT), mesh, (x,), wanted)


ROWS = [
    [1.0, np.nan, -np.inf, -0.0, 2.0, np.inf, -448.0, np.nan],
    [3.0, 1.0, -np.inf, 0.0, np.nan, -np.inf, -2.0, np.nan],
]


@pytest.mark.parametrize("reducer", ["max", "min"])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_a_maximum_is_no_number_where_one_is_none(dtype: str, reducer: str) -> None:
    """As `lax.max` has it; collectives of XLA:CPU and of NCCL pass over NaN."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.max(x, axis=0) if reducer == "max" else jnp.min(x, axis=0)

    x = jnp.array(ROWS, jnp.float32).astype(dtype)
    specs: Any = {"in_shardings": P("tp"), "out_shardings": P()}
    given = jhost.jit(f, mesh=mesh_of(tp=2), **specs)(x)
    assert given.dtype == x.dtype
    given, wanted = (np.asarray(a.astype(jnp.float32)) for a in (given, f(x)))
    np.testing.assert_array_equal(given, wanted)


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min, jnp.prod])
@pytest.mark.parametrize("out", [P(), P("tp")], ids=["all", "part"])
def test_complex_numbers_are_reduced_as_jax_orders_them(reduce: Any, out: P) -> None:
    """By the real part first; XLA:CPU has no collective for their order."""
    numbers = np.array([[2 + 1j, 1], [2 + 3j, -1j], [0, 4], [2 - 9j, 1 + 1j]])
    x = numbers.astype(np.complex64)

    def f(x: Any) -> Any:
        return reduce(x, axis=0)

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: f(x).real.sum())(x)

    given: Any = {"mesh": mesh_of(tp=2), "in_shardings": P("tp")}
    np.testing.assert_array_equal(jhost.jit(f, out_shardings=out, **given)(x), f(x))
    np.testing.assert_allclose(jhost.jit(gradient, **given)(x), gradient(x))


@pytest.mark.parametrize("dtype", ["int2", "uint2"])
def test_elements_of_2_bits_are_all_moved(dtype: str) -> None:
    """Of a gather of them XLA:CPU (of JAX 0.12) gives the first device's alone."""
    numbers = np.arange(32, dtype=np.int8).reshape(8, 4) % 2
    x = numbers.astype(getattr(jnp, dtype))
    given: Any = {"mesh": mesh_of(tp=4), "in_shardings": P("tp")}
    for f, out in [
        (lambda x: x, P()),
        (lambda x: x, P(None, "tp")),
        (lambda x: x[::-1], P("tp")),
        (lambda x: jhost.stream(x + 0, axis=0, pipeline="p2p"), P()),
    ]:
        result = jhost.jit(f, out_shardings=out, **given)(x)
        np.testing.assert_array_equal(np.asarray(result).astype(np.int8), f(numbers))


@devices
@reducers
def test_reduce_scatter(devices: int, reducer: Reducer) -> None:
    mesh = mesh_of(tp=devices)
    x, source, partial, drop = partial_sums(devices, reducer)
    out = buffer(f"y: i32[{8 // devices}@tp]")
    scatter = communicate("ReduceScatter", out, partial, dim=0, reducer=reducer)
    wanted = REDUCE[reducer](x, axis=0)
    check(program(mesh, (source,), (out,), drop, scatter, WAIT), mesh, (x,), wanted)


@devices
@pytest.mark.parametrize("reducer", ["sum", "max"])
def test_reduce_scatter_noncontiguous(devices: int, reducer: Reducer) -> None:
    """The inner dim of [3, 4 D] is scattered."""
    mesh, x = mesh_of(tp=devices), integers(devices, 3, 4 * devices)
    source = buffer(f"x: f32[1@tp, 3, {4 * devices}]")
    partial = buffer(f"p: f32[3, {4 * devices}]", partial={"tp": reducer})
    out = buffer("y: f32[3, 4@tp]")
    body = (
        compute(lambda x: x[0], (source,), (partial,)),
        communicate("ReduceScatter", out, partial, dim=1, reducer=reducer),
        WAIT,
    )
    wanted = REDUCE[reducer](x, axis=0)
    check(program(mesh, (source,), (out,), *body), mesh, (x,), wanted)


@devices
@pytest.mark.parametrize("direction", ["dispatch", "combine"])
def test_alltoall(devices: int, direction: str) -> None:
    mesh, x, n = mesh_of(tp=devices), integers(8, 16), devices
    rows = buffer(f"a: f32[{8 // n}@tp, 16]")
    columns = buffer(f"b: f32[8, {16 // n}@tp]")
    source, out = (rows, columns) if direction == "dispatch" else (columns, rows)
    dim, source_dim = (1, 0) if direction == "dispatch" else (0, 1)
    move = communicate("AllToAll", out, source, dim=dim, source_dim=source_dim)
    check(program(mesh, (source,), (out,), move, WAIT), mesh, (x,), x)


@devices
@pytest.mark.parametrize("shift", [0, 1, -1, 3])
def test_collective_permute(devices: int, shift: int) -> None:
    mesh, x = mesh_of(tp=devices), integers(devices, 4)
    source, out = buffer("x: f32[1@tp, 4]"), buffer("y: f32[1@tp, 4]")
    move = communicate("CollectivePermute", out, source, shift=shift)
    host_ir = program(mesh, (source,), (out,), move, WAIT)
    check(host_ir, mesh, (x,), np.roll(x, shift, axis=0))


# --- Meshes of two axes --------------------------------------------------------- #


@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")])
def test_mesh_2d_allgather(axes: tuple[str, ...]) -> None:
    """Over one axis, both, and both in the other order."""
    mesh, x = mesh_of(dp=2, tp=4), integers(16, 3)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    source = buffer(f"x: f32[{16 // devices}@({', '.join(axes)}), 3]")
    out = buffer("y: f32[16, 3]")
    gather = communicate("AllGather", out, source, axes, dim=0)
    check(program(mesh, (source,), (out,), gather, WAIT), mesh, (x,), x)


def test_mesh_2d_gathers_the_minor_axis() -> None:
    mesh, x = mesh_of(dp=2, tp=4), integers(16, 3)
    source, out = buffer("x: f32[2@(dp, tp), 3]"), buffer("y: f32[8@dp, 3]")
    gather = communicate("AllGather", out, source, ("tp",), dim=0)
    check(program(mesh, (source,), (out,), gather, WAIT), mesh, (x,), x)


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("reducer", ["sum", "prod"])
def test_mesh_2d_reduce_scatter(axes: tuple[str, ...], reducer: Reducer) -> None:
    mesh, x = mesh_of(dp=2, tp=4), bits(8, 16)
    source = buffer("x: i32[1@(dp, tp), 16]")
    partial = buffer("p: i32[16]", partial={"dp": reducer, "tp": reducer})
    out = buffer(f"y: i32[2@({', '.join(axes)})]")
    body = (
        compute(lambda x: x[0], (source,), (partial,)),
        communicate("ReduceScatter", out, partial, axes, dim=0, reducer=reducer),
        WAIT,
    )
    wanted = REDUCE[reducer](x, axis=0)
    check(program(mesh, (source,), (out,), *body), mesh, (x,), wanted)


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_mesh_2d_alltoall(axes: tuple[str, ...]) -> None:
    mesh, x, spread = mesh_of(dp=2, tp=4), integers(8, 16), f"({', '.join(axes)})"
    source, out = buffer(f"x: f32[1@{spread}, 16]"), buffer(f"y: f32[8, 2@{spread}]")
    move = communicate("AllToAll", out, source, axes, dim=1, source_dim=0)
    check(program(mesh, (source,), (out,), move, WAIT), mesh, (x,), x)


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_mesh_2d_permute(axes: tuple[str, ...]) -> None:
    mesh, x, spread = mesh_of(dp=2, tp=4), integers(8, 4), f"({', '.join(axes)})"
    source, out = buffer(f"x: f32[1@{spread}, 4]"), buffer(f"y: f32[1@{spread}, 4]")
    move = communicate("CollectivePermute", out, source, axes, shift=3)
    host_ir = program(mesh, (source,), (out,), move, WAIT)
    check(host_ir, mesh, (x,), np.roll(x, 3, axis=0))


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_two_axes_trade_places(axes: tuple[str, ...]) -> None:
    """The whole stays what it is; other devices hold its parts."""
    mesh, x = mesh_of(dp=2, tp=2), integers(2, 2, 3)
    source, out = buffer("x: f32[1@dp, 1@tp, 3]"), buffer("y: f32[1@tp, 1@dp, 3]")
    move = communicate("SwapAxes", out, source, axes)
    check(program(mesh, (source,), (out,), move, WAIT), mesh, (x,), x)


@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp")])
def test_two_axes_trade_places_beside_a_third(axes: tuple[str, ...]) -> None:
    mesh, x = mesh_of(dp=2, ep=2, tp=2), integers(4, 3)
    source, out = buffer("x: f32[1@(ep, dp), 3]"), buffer("y: f32[1@(ep, tp), 3]")
    move = communicate("SwapAxes", out, source, axes)
    check(program(mesh, (source,), (out,), move, WAIT), mesh, (x,), x)


# --- Several at once ------------------------------------------------------------- #


@devices
def test_several_in_flight(devices: int) -> None:
    """Eight rounds, each with three communications waited for in another order."""
    mesh, x = mesh_of(tp=devices), integers(8 * devices, 4)
    source, out = buffer("x: f32[8@tp, 4]"), buffer(f"y: f32[{8 * devices}, 4]")
    part, moved = buffer("p: f32[1@tp, 4]"), buffer("m: f32[1@tp, 4]")
    back, home = buffer("b: f32[1@tp, 4]"), buffer("h: f32[1@tp, 4]")
    chunk, full = buffer(f"c: f32[{devices}, 4]"), buffer(f"g: f32[{devices}, 4]")
    host_ir = program(
        mesh,
        (source,),
        (out,),
        Allocate(buffer=out),
        loop(
            8,
            select(part, source, 0, I, 1),
            select(chunk, out, 0, I, 1, groups=devices),
            communicate("AllGather", full, part, dim=0, name="gather"),
            communicate("CollectivePermute", moved, part, shift=1, name="there"),
            Wait(communication="there"),
            communicate("CollectivePermute", back, moved, shift=-1, name="back"),
            Set(out=home, source=part),
            Wait(communication="back"),
            Wait(communication="gather"),
            compute(
                lambda full, home, back: full + home - back,
                (full, home, back),
                (chunk,),
            ),
        ),
    )
    check(host_ir, mesh, (x,), x)


def test_a_communication_may_be_waited_for_in_the_next_iteration() -> None:
    """The cyclic ring: send what is there, work on it, then wait for the next."""
    mesh, x, w = mesh_of(tp=4), integers(8, 4), integers(4, 3, seed=1)
    source, weight = buffer("x: f32[2@tp, 4]"), buffer("w: f32[4, 3]")
    out, chunk = buffer("y: f32[8, 3]"), buffer("c: f32[2, 3]")
    slots, now = buffer("s: f32[4, 2, 4]"), buffer("now: f32[2, 4]")
    then = buffer("then: f32[2, 4]")
    rank = Rank("tp")

    step = (
        select(now, slots, 0, I, 1, drop=True),
        select(then, slots, 0, I + 1, 1, drop=True),
        communicate("CollectivePermute", then, now, shift=1, name="ring"),
        select(chunk, out, 0, (rank - I) % 4 * 2, 2),
        compute(jnp.matmul, (now, weight), (chunk,)),
    )
    first, sent = buffer("first: f32[2, 4]"), buffer("sent: f32[2, 4]")
    host_ir = program(
        mesh,
        (source, weight),
        (out,),
        Allocate(buffer=slots),
        Allocate(buffer=out),
        select(first, slots, 0, 0, 1, drop=True),
        Set(out=first, source=source),
        communicate("CollectivePermute", sent, first, shift=0, name="ring"),
        loop(3, Wait(communication="ring"), *step),
        Wait(communication="ring"),
        select(now, slots, 0, 3, 1, drop=True),
        select(chunk, out, 0, (rank + 1) % 4 * 2, 2),
        compute(jnp.matmul, (now, weight), (chunk,)),
    )
    check(host_ir, mesh, (x, w), x @ w)
