"""Parity group D with nvFuser: communications inferred from layouts.

A test for each row of nvFuser's `test_multidevice_lower_communication.cpp` and
`test_communication.py`: from a change of layout alone the right communication is
inferred, and nothing else is done.  `test_communications.py` has those that only
explicit nodes make (CollectivePermute).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.statements import Communicate, For, walk
from tests.lowering.on_mesh import communications, each_size, exact, on, tp
from tests.lowering.traced import array, work


def same(x: jax.Array) -> jax.Array:
    return x


def total(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=0)


# --- One of each -------------------------------------------------------------------- #


@each_size
def test_allgather(devices: int) -> None:
    program = exact(same, array(devices * 2, 4), **tp(devices, P("tp"), P()))
    assert work(program.body) == ["AllGather"]
    assert communications(program) == ["AllGather tp 0"]


@each_size
def test_allreduce(devices: int) -> None:
    program = exact(total, array(devices * 2, 4), **tp(devices, P("tp"), P()))
    assert work(program.body) == ["reduce_sum", "AllReduce"]
    assert communications(program) == ["AllReduce tp sum"]


@each_size
def test_reduce_scatter(devices: int) -> None:
    x = array(devices, devices * 2, 3)
    program = exact(total, x, **tp(devices, P("tp"), P("tp")))
    assert work(program.body) == ["reduce_sum", "ReduceScatter"]
    assert communications(program) == ["ReduceScatter tp 0 sum"]


@each_size
@pytest.mark.parametrize("direction", ["dispatch", "combine"])
def test_alltoall(devices: int, direction: str) -> None:
    rows, columns = P("tp"), P(None, "tp")
    specs = (rows, columns) if direction == "dispatch" else (columns, rows)
    program = exact(same, array(devices, devices * 3), **tp(devices, *specs))
    assert work(program.body) == ["AllToAll"]
    there = "0 to 1" if direction == "dispatch" else "1 to 0"
    assert communications(program) == [f"AllToAll tp {there}"]


@each_size
def test_a_whole_value_is_sharded_without_communication(devices: int) -> None:
    program = exact(same, array(devices * 2, 4), **tp(devices, P(), P("tp")))
    assert communications(program) == []


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)])
def test_from_one_mesh_axis_to_another(sizes: tuple[int, int]) -> None:
    """Sharded over s, wanted over t: gathered, and each keeps its part."""
    axes = dict(zip("st", sizes, strict=True))
    program = exact(same, array(8, 3), **on(axes, P("s"), P("t")))
    assert communications(program) == ["AllGather s 0"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (P("s"), P("t")),
        (P("s", "t"), P("t", "s")),
        (P(("s", "t")), P(("t", "s"))),
        (P(None, "t"), P(None, "s")),
    ],
)
def test_from_one_mesh_axis_to_another_of_its_size(source: P, target: P) -> None:
    """One permutation, where gathers would bring in what is not needed."""
    program = exact(same, array(8, 8), **on({"s": 2, "t": 2}, source, target))
    assert communications(program) == ["SwapAxes s,t"]


@each_size
def test_a_sum_over_two_axes_is_scattered_at_once(devices: int) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=0)

    specs = P(("s", "t")), P(("s", "t"))
    program = exact(f, array(16, 16), **on({"s": 2, "t": devices // 2}, *specs))
    axes = "s,t" if devices > 2 else "s"
    assert communications(program) == [f"ReduceScatter {axes} 0 sum"]


def test_on_the_way_to_another_layout_both_dims_have_new_sizes() -> None:
    """Between an all-to-all and what follows, one dim is longer, and one is shorter."""
    specs = P(None, "s"), P("s", "t")
    program = exact(same, array(8, 12), **on({"s": 2, "t": 2}, *specs))
    (moved,) = [s for s in walk(program.body) if isinstance(s, Communicate)]
    assert moved.kind == "AllToAll"
    assert moved.source.shape == (8, 6)
    assert moved.out.shape == (4, 12)


# --- Layouts given inside ----------------------------------------------------------- #

WAYS: dict[str, Callable[[jax.Array, P], jax.Array]] = {
    "jhost.shard": jhost.shard,
    "with_sharding_constraint": lax.with_sharding_constraint,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layout_may_be_given_inside_the_function(way: str) -> None:
    def f(x: Any) -> jax.Array:
        return WAYS[way](x * 2, P(None, "tp")) + 1

    settings = tp(4, P("tp"), P(None, "tp"))
    x = np.asarray(array(8, 8))
    with jax.set_mesh(settings["mesh"]):
        compiled = jhost.jit(f, **settings)
        chex.assert_trees_all_equal(compiled(x), x * 2 + 1)
        program = compiled.lower(x).host_ir
    assert communications(program) == ["AllToAll tp 0 to 1"]


@each_size
def test_reduce_scatter_and_allgather(devices: int) -> None:
    """nvFuser's ReduceScatter_Allgather: an all-reduce by way of its shards."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.shard(total(x), P("tp")) * 2

    x = array(devices, devices * 2)
    program = exact(f, x, **tp(devices, P("tp"), P()))
    assert communications(program) == ["ReduceScatter tp 0 sum", "AllGather tp 0"]


# --- Dims that are not the outermost ------------------------------------------------ #


@each_size
@pytest.mark.parametrize("dim", [1, 2])
def test_allgather_of_an_inner_dim(devices: int, dim: int) -> None:
    """No copy of ours: how the shards come together is the collective's business."""
    shape = [3, 2, 2]
    shape[dim] *= devices
    source = P(*(["tp" if d == dim else None for d in range(3)]))
    program = exact(same, array(*shape), **tp(devices, source, P()))
    assert work(program.body) == ["AllGather"]
    assert communications(program) == [f"AllGather tp {dim}"]


@each_size
def test_allreduce_of_an_inner_dim(devices: int) -> None:
    """nvFuser's AllreduceNoncontig: [2, 3 D, 5], the middle one summed."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=1)

    x = array(2, 3 * devices, 5)
    program = exact(f, x, **tp(devices, P(None, "tp"), P()))
    assert communications(program) == ["AllReduce tp sum"]


@each_size
def test_reduce_scatter_to_an_inner_dim(devices: int) -> None:
    """nvFuser's ReduceScatterNoncontig: [D, 3, 4 D], the last one scattered."""
    x = array(devices, 3, 4 * devices)
    program = exact(total, x, **tp(devices, P("tp"), P(None, "tp")))
    assert work(program.body) == ["reduce_sum", "ReduceScatter"]
    assert communications(program) == ["ReduceScatter tp 1 sum"]


@each_size
def test_alltoall_between_inner_dims(devices: int) -> None:
    x = array(2, devices, devices * 2)
    specs = P(None, "tp"), P(None, None, "tp")
    program = exact(same, x, **tp(devices, *specs))
    assert communications(program) == ["AllToAll tp 1 to 2"]


@each_size
def test_allgather_of_an_expanded_broadcast(devices: int) -> None:
    """[D] to [D, 3]: what the broadcast adds is not moved."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], (devices, 3))

    program = exact(f, array(devices), **tp(devices, P("tp"), P()))
    (gather,) = [s for s in walk(program.body) if isinstance(s, Communicate)]
    assert (gather.kind, gather.source.shape) == ("AllGather", (1, 1))


# --- A logical split before the sharded dim ----------------------------------------- #


@each_size
def test_a_split_whose_outer_dim_is_sharded(devices: int) -> None:
    """The shards are the same before and after: only the wanted gather remains."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (devices, 3, 4))

    program = exact(f, array(devices * 3, 4), **tp(devices, P("tp"), P()))
    assert communications(program) == ["AllGather tp 0"]
    program = exact(f, array(devices * 3, 4), **tp(devices, P("tp"), P("tp")))
    assert communications(program) == []


@each_size
def test_a_split_before_the_sharded_dim(devices: int) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (2, 3, devices * 2))

    x = array(6, devices * 2)
    program = exact(f, x, **tp(devices, P(None, "tp"), P()))
    assert [text[:12] for text in communications(program)] == ["AllGather tp"]
    program = exact(f, x, **tp(devices, P(None, "tp"), P(None, None, "tp")))
    assert communications(program) == []


@each_size
def test_a_reduce_scatter_after_a_split(devices: int) -> None:
    """nvFuser's ReduceScatter_LogicalSplit."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.reshape(x, (devices, 2, devices * 2)), axis=0)

    x = array(devices * 2, devices * 2)
    program = exact(f, x, **tp(devices, P("tp"), P(None, "tp")))
    assert communications(program) == ["ReduceScatter tp 1 sum"]


@each_size
def test_a_merge_of_the_sharded_dim(devices: int) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (devices * 3, 2))

    program = exact(f, array(devices, 3, 2), **tp(devices, P("tp"), P("tp")))
    assert communications(program) == []


@each_size
def test_a_merge_of_permuted_dims(devices: int) -> None:
    """A reshape may permute dims first, as the gradient of a convolution does."""

    def f(x: jax.Array) -> jax.Array:
        return lax.reshape(x, (devices * 2, 2, 9), dimensions=(2, 0, 1))

    x = array(2, 9, devices * 2)
    program = exact(f, x, **tp(devices, P(None, None, "tp"), P("tp")))
    assert communications(program) == []

    def merged(x: jax.Array) -> jax.Array:
        return lax.reshape(x, (devices * 12,), dimensions=(1, 0))

    program = exact(
        merged, array(6, devices * 2), **tp(devices, P(None, "tp"), P("tp"))
    )
    assert communications(program) == []


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_a_dim_over_two_axes_is_split_and_merged_along_them(
    axes: tuple[str, str],
) -> None:
    """The outer dim has one step a device, so each has a part of the inner one."""
    sizes = {axes[0]: 2, axes[1]: 4}

    def f(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (2, 12, 3))

    x = array(24, 3)
    split = exact(f, x, **on(sizes, (P(axes),), P(*axes)))
    assert communications(split) == []
    merged = exact(
        lambda y: jnp.reshape(y, x.shape), f(x), **on(sizes, (P(*axes),), P(axes))
    )
    assert communications(merged) == []
    pulled = jax.grad(lambda x: (f(x) ** 2).sum())
    assert communications(exact(pulled, x, **on(sizes, (P(axes),), P(axes)))) == []


def test_inner_dims_alone_are_gathered_for_a_merge() -> None:
    """Each device would have a part of each of several outer steps."""

    def f(x: jax.Array) -> jax.Array:
        return jnp.reshape(x, (24, 3))

    program = exact(f, array(2, 12, 3), **on({"a": 4}, (P(None, "a"),), P()))
    assert communications(program) == ["AllGather a 1"]


# --- Meshes of two axes ------------------------------------------------------------- #

SIZES = [(2, 2), (2, 4)]
AXES: tuple[str, ...] = ("dp", "tp")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        # One axis, the other one stays.
        (P("dp", "tp"), P("dp"), ["AllGather tp 1"]),
        (P("dp", "tp"), P(None, "tp"), ["AllGather dp 0"]),
        (P("dp"), P("dp", "tp"), []),
        # Both axes, each on a dim of its own.
        (P("dp", "tp"), P(), ["AllGather dp 0", "AllGather tp 1"]),
        # A dim sharded by two axes.
        (P(("dp", "tp")), P(), ["AllGather dp,tp 0"]),
        (P(None, ("dp", "tp")), P(), ["AllGather dp,tp 1"]),
        (P(("dp", "tp")), P("dp"), ["AllGather tp 0"]),
        (P("dp"), P(("dp", "tp")), []),
        (P(("dp", "tp")), P("dp", "tp"), ["AllToAll tp 0 to 1"]),
        (P("dp", "tp"), P(("dp", "tp")), ["AllToAll tp 1 to 0"]),
    ],
)
def test_on_two_mesh_axes(
    sizes: tuple[int, int], source: P, target: P, kinds: list[str]
) -> None:
    axes = dict(zip(AXES, sizes, strict=True))
    program = exact(same, array(8, 8), **on(axes, source, target))
    assert communications(program) == kinds


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (P("dp", "tp"), P("tp"), ["AllReduce dp sum"]),
        (P("dp", "tp"), P(), ["AllReduce dp sum", "AllGather tp 0"]),
        (P(("dp", "tp")), P(), ["AllReduce dp,tp sum"]),
        (P(("dp", "tp")), P("tp"), ["ReduceScatter tp 0 sum", "AllReduce dp sum"]),
        (P("tp", None, "dp"), P("tp", "dp"), ["ReduceScatter tp 0 sum"]),
    ],
)
def test_sums_on_two_mesh_axes(
    sizes: tuple[int, int], source: P, target: P, kinds: list[str]
) -> None:
    axes = dict(zip(AXES, sizes, strict=True))
    program = exact(total, array(8, 8, 8), **on(axes, source, target))
    assert communications(program) == kinds


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
def test_the_major_axis_of_a_dim_is_the_first(order: tuple[str, str]) -> None:
    """And not the mesh's first."""
    program = exact(same, array(8, 3), **on({"dp": 2, "tp": 4}, P(order), P()))
    assert communications(program) == [f"AllGather {','.join(order)} 0"]


# --- Reducers ----------------------------------------------------------------------- #

REDUCERS: dict[str, Callable[..., jax.Array]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "and": jnp.all,
    "or": jnp.any,
}


def reduction(reducer: str, devices: int) -> tuple[Callable[..., Any], jax.Array]:
    x = array(devices * 2, devices).astype(np.int32)
    # Columns that are all true, and all false, besides those that are mixed.
    if reducer in ("and", "or"):
        x[:, 0], x[:, 1] = 1, 0
        x = x > 0
    return lambda x: REDUCERS[reducer](x, axis=0), x


@each_size
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("kind", ["AllReduce", "ReduceScatter"])
def test_every_reducer(devices: int, reducer: str, kind: str) -> None:
    f, x = reduction(reducer, devices)
    target = P("tp") if kind == "ReduceScatter" else P()
    program = exact(f, x, **tp(devices, P("tp"), target))
    dim = " 0" if kind == "ReduceScatter" else ""
    assert communications(program) == [f"{kind} tp{dim} {reducer}"]


# --- Several in flight -------------------------------------------------------------- #


@each_size
def test_several_communications_in_flight(devices: int) -> None:
    """Eight calls with fresh inputs before the first result is read."""

    def f(x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
        exchanged = jhost.shard(z * 2, P(None, "tp"))
        return x + 1, jnp.sum(y, axis=0), jnp.max(y, axis=0), exchanged

    settings = tp(devices, P("tp"), (P(), P("tp"), P(), P(None, "tp")))
    compiled = jhost.jit(f, **settings)
    inputs = [
        tuple(array(devices, devices * 2, seed=3 * i + j) for j in range(3))
        for i in range(8)
    ]
    given = [compiled(*args) for args in inputs]
    for args, results in zip(inputs, given, strict=True):
        chex.assert_trees_all_equal(results, f(*args))
    found = communications(compiled.lower(*inputs[0]).host_ir)
    kinds = ["AllGather", "AllReduce", "AllToAll", "ReduceScatter"]
    assert sorted(text.split()[0] for text in found) == kinds


@each_size
def test_several_communications_in_flight_in_a_loop(devices: int) -> None:
    """Four chunks of three communications each, on four streams; eight calls."""

    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, y = jhost.stream(x * 2, 0, chunks=4), jhost.stream(y * 3, 0, chunks=4)
        return x + jhost.shard(jnp.max(y, axis=2), P()), jnp.sum(y, axis=2)

    settings = tp(devices, (P(None, "tp"), P(None, None, "tp")), (P(), P(None, "tp")))
    compiled = jhost.jit(f, **settings)
    inputs = [
        (array(4, devices, seed=i), array(4, devices, devices, seed=9 + i))
        for i in range(8)
    ]
    given = [compiled(*args) for args in inputs]
    for args, results in zip(inputs, given, strict=True):
        chex.assert_trees_all_equal(results, f(*args))
    program = compiled.lower(*inputs[0]).host_ir
    loops = [stmt for stmt in program.body if isinstance(stmt, For)]
    inside = [s for s in walk(loops[-1].body) if isinstance(s, Communicate)]
    kinds = ["AllGather", "AllReduce", "ReduceScatter"]
    assert sorted(stmt.kind for stmt in inside) == kinds
