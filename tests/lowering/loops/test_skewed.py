"""P2P pipelines along two axes: who has which chunk when, and that both move in a loop.

Values are whole numbers, so that a sum in any order is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost.errors import ChunksError
from jhost.lowering.explain import explain_program
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.index import Index, LoopIndex, Rank, evaluate, leaves
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Allocate, Communicate, Compute, walk
from tests import budget
from tests.lowering.on_mesh import exact, on, program_of
from tests.lowering.traced import array, loops
from tests.random_programs import REFUSALS

Function = Callable[..., jax.Array]

PAIRS = P("row", "column")


def p2p(x: jax.Array, axis: int, chunks: int | None = None) -> jax.Array:
    return jhost.stream(x, axis, chunks=chunks, pipeline="p2p")


def outgoing(a: jax.Array, b: jax.Array) -> jax.Array:
    """`j` is gathered over rows, and the sums over `k` are scattered over columns."""
    return p2p(jnp.einsum("ikc,jkc->ijc", a, b), 1)


def incoming(a: jax.Array, b: jax.Array) -> jax.Array:
    """The mirrored one, of `i`: gathered over columns, scattered over rows."""
    return p2p(jnp.einsum("kic,kjc->ijc", a, b), 0)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Both operands are gathered along what is contracted (Cannon)."""
    return p2p(a, 1) @ b


UPDATES: dict[str, Function] = {"outgoing": outgoing, "incoming": incoming}
MESHES = {"2x2": (2, 2), "2x4": (2, 4), "4x2": (4, 2)}
each_mesh = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)


def pairs(n: int, seed: int = 0) -> jax.Array:
    return array(n, n, 2, seed=seed)


def over(sizes: tuple[int, ...], operands: int = 2, **more: Any) -> dict[str, Any]:
    """Settings on a mesh of rows and columns, over which all is sharded."""
    rows, columns = sizes
    return on({"row": rows, "column": columns}, (PAIRS,) * operands, PAIRS, **more)


def moved_in_loop(program: Program) -> set[tuple[str, tuple[str, ...]]]:
    """What moves in the one loop that works; nothing moves outside of it."""
    (loop,) = loops(program)
    inside = [s for s in walk(loop.body) if isinstance(s, Communicate)]
    every = [s for s in walk(program.body) if isinstance(s, Communicate)]
    assert len(inside) == len(every)
    return {(stmt.kind, stmt.axes) for stmt in inside}


BOTH = {("CollectivePermute", ("row",)), ("CollectivePermute", ("column",))}


# --- Both in one loop --------------------------------------------------------------- #


@each_mesh
@pytest.mark.parametrize("update", UPDATES)
def test_a_gather_and_a_scatter_over_two_axes_share_a_loop(
    update: str, sizes: tuple[int, int]
) -> None:
    program = exact(UPDATES[update], pairs(8), pairs(8, seed=1), **over(sizes))
    assert moved_in_loop(program) == BOTH
    assert loops(program)[0].extent == max(sizes)


@each_mesh
def test_two_gathers_over_two_axes_share_a_loop(sizes: tuple[int, int]) -> None:
    program = exact(product, array(8, 8), array(8, 8, seed=1), **over(sizes))
    assert moved_in_loop(program) == BOTH


def test_axes_of_which_neither_divides_the_other() -> None:
    """2 and 3 devices: as many chunks as their least common multiple."""
    program = exact(outgoing, pairs(12), pairs(12, seed=1), **over((2, 3)))
    assert moved_in_loop(program) == BOTH
    assert loops(program)[0].extent == 6


@each_mesh
@pytest.mark.parametrize("count", [8, 12], ids="in {} chunks".format)
def test_in_pieces(sizes: tuple[int, int], count: int) -> None:
    """Of which the last is smaller, where they do not divide."""

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return p2p(jnp.einsum("ikc,jkc->ijc", a, b), 1, count)

    program = exact(f, pairs(40), pairs(40, seed=1), **over(sizes))
    assert moved_in_loop(program) == BOTH
    assert loops(program)[0].extent > 4


def test_a_count_of_chunks_is_a_multiple_of_those_of_both_axes() -> None:
    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return p2p(jnp.einsum("ikc,jkc->ijc", a, b), 1, 4)

    with pytest.raises(ChunksError, match=r"\(3 x 2 devices\).* of 6 chunks: 6,"):
        program_of(f, pairs(12), pairs(12, seed=1), **over((2, 3)))


def test_sizes_that_the_axes_do_not_divide() -> None:
    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (jhost.shard(x, PAIRS) for x in (a, b))
        return jhost.shard(p2p(jnp.einsum("ikc,jkc->ijc", a, b), 1), PAIRS)

    program = exact(
        f, pairs(7), pairs(7, seed=1), **on({"row": 2, "column": 4}, None, None)
    )
    assert BOTH <= {
        (stmt.kind, stmt.axes)
        for loop in loops(program)
        for stmt in walk(loop.body)
        if isinstance(stmt, Communicate)
    }


def test_devices_in_another_order() -> None:
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(2, 2)
    settings: dict[str, Any] = over((2, 2)) | {"mesh": Mesh(devices, ("row", "column"))}
    x, y = pairs(8), pairs(8, seed=1)
    np.testing.assert_array_equal(jhost.jit(outgoing, **settings)(x, y), outgoing(x, y))


def test_a_loop_of_one_axis_starts_with_the_own_chunk() -> None:
    """The sums of the first loop come together again, over columns alone."""

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        sums = jhost.shard(p2p(jnp.einsum("ik,jk->ij", a, b), 1), PAIRS)
        return jnp.maximum(sums, 0)

    settings = on({"row": 2, "column": 2}, (PAIRS, PAIRS), P("row"))
    both, one = loops(exact(f, array(8, 8), array(8, 8, seed=1), **settings))
    assert (both.extent, one.extent) == (2, 1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """Triangle attention around the starting node: row i of pairs, biased by [j, k]."""
    bias = jnp.moveaxis(bias, -1, 0)[None]
    return jhost.dot_product_attention(q, p2p(k, 1), v, bias=bias)


def of_attention() -> tuple[jax.Array, ...]:
    heads = [array(8, 8, 2, 4, seed=seed) / 4 for seed in range(3)]
    return *heads, array(8, 8, 2, seed=3)


def sum_of_attended(*args: jax.Array) -> jax.Array:
    return jnp.sum(attend(*args) ** 2)


@pytest.mark.parametrize("fun", [attend, jax.grad(sum_of_attended, (0, 1, 2, 3))])
def test_keys_over_columns_and_their_bias_over_rows_share_a_loop(fun: Any) -> None:
    """The bias trades rows for columns first: its j lies as queries do."""
    program = exact(fun, *of_attention(), rtol=1e-4, **over((2, 2), 4))
    inside = [s for s in walk(loops(program)[0].body) if isinstance(s, Communicate)]
    kinds = {(stmt.kind, stmt.axes) for stmt in inside}
    assert kinds == BOTH
    outside = {s.kind for s in statements(program) if isinstance(s, Communicate)}
    assert outside == {"CollectivePermute", "SwapAxes"}


# --- Whose chunk -------------------------------------------------------------------- #


@each_mesh
def test_each_device_has_each_chunk_once_and_owners_send_them(
    sizes: tuple[int, int],
) -> None:
    program = program_of(product, array(8, 8), array(8, 8, seed=1), **over(sizes))
    (loop,) = loops(program)
    (chunk,) = [s.chunk for s in loop.body if isinstance(s, Compute) and s.chunk]
    moves = [s for s in loop.body if isinstance(s, Communicate)]
    worked: dict[tuple[int, int], list[int]] = {}
    for step in range(loop.extent):
        for device in np.ndindex(*sizes):
            at: dict[Index, int] = {LoopIndex(loop.index): step}
            at |= {Rank("row"): device[0], Rank("column"): device[1]}
            start = evaluate(chunk.start, at)
            worked.setdefault(device, []).append(start)
            for move in moves:
                along = ("row", "column").index(move.axes[0])
                assert move.shift is not None
                shift = evaluate(move.shift, at)
                sender = (device[along] - shift) % sizes[along]
                assert start // (8 // sizes[along]) == sender
    wanted = [step * 8 // max(sizes) for step in range(max(sizes))]
    assert all(sorted(starts) == wanted for starts in worked.values())


# --- Bytes and memory --------------------------------------------------------------- #


def operands(update: Function) -> tuple[jax.Array, jax.Array]:
    if update is product:
        return array(8, 8), array(8, 8, seed=1)
    return pairs(8), pairs(8, seed=1)


def received(program: Program) -> int:
    return sum(row.bytes for row in explain_program(program).communications)


@each_mesh
@pytest.mark.parametrize("update", [*UPDATES.values(), product])
def test_as_many_bytes_move_as_by_collectives(
    update: Function, sizes: tuple[int, int]
) -> None:
    program = program_of(update, *operands(update), **over(sizes))
    whole = operands(update)[0].size * 4
    # Each device has one part of what comes, and of what goes, of one dim.
    rows, columns = sizes
    each = [
        whole // size * (n - 1) // n for size, n in ((columns, rows), (rows, columns))
    ]
    assert received(program) == sum(each)


@pytest.mark.parametrize(
    "fun", [*UPDATES.values(), product, attend, jax.grad(sum_of_attended, (0, 1, 2, 3))]
)
def test_no_gathered_dim_is_made_whole(fun: Any) -> None:
    """A device holds parts of what it works on, and a term of each sum it owns."""
    args = operands(fun) if fun in (*UPDATES.values(), product) else of_attention()
    program = program_of(fun, *args, **over((2, 2), len(args)))
    written = {
        each.name: each
        for stmt in walk(program.body)
        for each in (
            [stmt.buffer] if isinstance(stmt, Allocate) else reads_writes(stmt)[1]
        )
    }
    part = args[0].size // 4
    held = (each for each in written.values() if "terms" not in each.name)
    assert all(np.prod(each.shape) <= part for each in held)


# --- Derived programs --------------------------------------------------------------- #


def loss(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(outgoing(a, b) * jhost.shard(pairs(8, seed=2), PAIRS))


def layers(a: jax.Array, b: jax.Array) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.clip(jhost.shard(outgoing(x, b), PAIRS), -1, 1), None

    return jax.lax.scan(jax.checkpoint(layer), a, None, length=2)[0]


def mapped(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = (jnp.stack([x, x + 1], axis=2) for x in (a, b))
    return jax.vmap(outgoing, 2, 2)(a, b)


DERIVED: dict[str, Callable[..., Any]] = {
    "grad": jax.grad(loss, (0, 1)),
    "jvp": lambda a, b: jax.jvp(outgoing, (a, b), (b, a)),
    "vmap": mapped,
    "scan": layers,
    "grad of scan": jax.grad(lambda a, b: jnp.sum(layers(a, b)), (0, 1)),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derived_programs_move_along_both(name: str) -> None:
    program = exact(DERIVED[name], pairs(8), pairs(8, seed=1), **over((2, 2)))
    every = [stmt for stmt in statements(program) if isinstance(stmt, Communicate)]
    assert {stmt.kind for stmt in every} == {"CollectivePermute"}
    assert {axis for stmt in every if by_both(stmt) for axis in stmt.axes} == {
        "row",
        "column",
    }


def by_both(stmt: Communicate) -> bool:
    """Whether a permute's partners along its axis depend on the other's rank."""
    assert stmt.shift is not None
    ranks = {leaf.axis for leaf in leaves(stmt.shift) if isinstance(leaf, Rank)}
    return bool(ranks - {*stmt.axes})


# --- At random ---------------------------------------------------------------------- #


@st.composite
def products(draw: st.DrawFn) -> tuple[Function, tuple[jax.Array, ...], dict[str, Any]]:
    """A contraction with two marks, operands, and shardings over both axes."""
    equation = draw(
        st.sampled_from(["ik,kj->ij", "ik,jk->ij", "ki,kj->ij", "ki,jk->ij"])
    )
    rows, columns = draw(st.sampled_from([(2, 2), (2, 4), (4, 2), (2, 3)]))
    each = rows * columns
    shapes = [(each * draw(st.integers(1, 3)),) * 2] * 2
    which, dim = draw(st.integers(0, 2)), draw(st.integers(0, 1))
    count = draw(st.sampled_from([None, None, each, 2 * each]))
    second = draw(st.sampled_from([None, 0, 1]))

    def fun(a: jax.Array, b: jax.Array) -> jax.Array:
        values = [a, b]
        if which < 2:
            values[which] = p2p(values[which], dim, count)
        result = jnp.einsum(equation, *values)
        result = p2p(result, dim, count) if which == 2 else result
        return result if second is None else p2p(result, second) * 2

    ways = st.sampled_from([PAIRS, P("column", "row")])
    axes = {"row": rows, "column": columns}
    dtype = draw(st.sampled_from([jnp.int32, jnp.float32]))
    given = tuple(array(*s, seed=i).astype(dtype) for i, s in enumerate(shapes))
    return fun, given, on(axes, (draw(ways), draw(ways)), draw(ways))


@settings(max_examples=budget.examples(10), deadline=None)  # each is compiled
@given(products())
def test_random_products(case: tuple[Function, tuple[jax.Array, ...], Any]) -> None:
    fun, args, settings = case
    try:
        exact(fun, *args, **settings)
    except REFUSALS:
        pass
