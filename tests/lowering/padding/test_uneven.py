"""Sizes that do not divide: padded inside, right outside, and pipelined where asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from jhost.lowering.rules.reducers import COMBINE, Reducer, identity
from tests import budget
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import communications, exact, on, program_of, tp
from tests.lowering.traced import array, loops, notes

Golden = Callable[..., None]
Function = Callable[..., Any]


def p2p(x: jax.Array, chunks: int | None = None) -> jax.Array:
    return jhost.stream(x, 0, chunks=chunks, pipeline="p2p")


# --- An all-reduce in a p2p pipeline ------------------------------------------------ #


def summed(x: jax.Array, w: jax.Array) -> jax.Array:
    return p2p(x @ w)


def block(x: jax.Array, up: jax.Array, down: jax.Array, b: jax.Array) -> jax.Array:
    """An MLP; between its matmuls and after them stands what works row by row."""
    h = x @ up + b
    y = p2p(jnp.maximum(h, -h) @ down)
    return x + y - jnp.max(y, axis=1, keepdims=True)


SUMMED = (P(None, "tp"), P("tp")), P()
BLOCK = (P(), P(None, "tp"), P("tp"), P("tp")), P()


def block_of(rows: int) -> tuple[jax.Array, ...]:
    return array(rows, 6), array(6, 16, seed=1), array(16, 6, seed=2), array(16, seed=3)


def test_rows_are_padded_before_the_loop_and_cut_after_it(golden: Golden) -> None:
    golden(str(exact(summed, array(10, 8), array(8, 4, seed=1), **tp(4, *SUMMED))))


@pytest.mark.parametrize("rows", [10, 3, 2, 1])
def test_a_replicated_block_is_pipelined_p2p(rows: int) -> None:
    program = exact(block, *block_of(rows), **tp(4, *BLOCK))
    assert len(loops(program)) == 2  # to the owners, and back
    assert set(communications(program)) == {"CollectivePermute tp"}
    padded = -(-rows // 4) * 4
    text = f"dim 0 of v_5 padded from {rows} to {padded}: tp (4) does not divide {rows}"
    assert notes(program, "padded from") == [text]


def test_each_device_pads_its_rows_where_they_are_sharded_already() -> None:
    """No row changes its device for the padding: 10 rows are 5 and 5, then 8 and 8."""
    settings = on({"dp": 2, "tp": 4}, (P("dp"), P(None, "tp"), P("tp")), P("dp"))
    program = exact(
        lambda x, u, d, b=0: summed(x @ u, d), *block_of(10)[:3], **settings
    )
    assert notes(program, "padded from") == [
        "dim 0 of result padded from 5 to 8: tp (4) does not divide 5"
    ]
    assert set(communications(program)) == {"CollectivePermute tp"}


def test_a_count_over_sharded_rows_is_made_before_it_is_padded() -> None:
    """Row 5 of 10 is the first of the second device, not its fourth from the end."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return p2p((x + lax.broadcasted_iota(jnp.float32, x.shape, 0)) @ w)

    ins = P("dp", "tp"), P("tp")
    settings = on({"dp": 2, "tp": 4}, ins, P("dp"))
    exact(f, array(10, 8), array(8, 4, seed=1), **settings)


# --- Shardings inside --------------------------------------------------------------- #


def rows_inside(x: jax.Array, w: jax.Array, pipeline: str = "off") -> jax.Array:
    x = jhost.shard(x * 2, P("tp"))
    return jhost.stream(x @ w, 0, pipeline=pipeline)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rows", [10, 3, 2, 1, 0])
@pytest.mark.parametrize("pipeline", ["p2p", "collective"])
def test_rows_sharded_inside_and_gathered(rows: int, pipeline: str) -> None:
    # JAX 0.10 cannot fetch an empty array that is sharded.
    outs = P(None, "tp") if rows else P()
    settings = tp(4, (P(), P(None, "tp")), outs)
    program = exact(
        lambda x, w: rows_inside(x, w, pipeline),
        array(rows, 6),
        array(6, 64, seed=1),
        **settings,
    )
    # A shard of one row, or of none, makes no two chunks.
    alone = rows == 0 or (rows <= 4 and pipeline == "collective")
    assert len(loops(program)) == (not alone)


def test_rows_over_axes_of_two_and_three_are_padded_for_both() -> None:
    """7 rows become 12: of the next multiple of three there are no halves."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        halves = jhost.shard(x * 2, P("a"))
        return (jhost.shard(halves + 1, P("b")) + halves) @ w

    settings = on({"a": 2, "b": 3}, (P(), P()), P())
    program = exact(f, array(7, 4), array(4, 2, seed=1), **settings)
    assert any("padded from 7 to 12" in note for note in notes(program, "padded from"))


def test_with_sharding_constraint_is_padded_alike() -> None:
    mesh = mesh_of(tp=4)

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("tp"))) @ w

    x, w = array(10, 6), array(6, 64, seed=1)
    settings = tp(4, (P(), P(None, "tp")), P(None, "tp"))
    one, other = (jhost.jit(function, **settings) for function in (f, rows_inside))
    chex.assert_trees_all_equal(one(x, w), x * 2 @ w)
    chex.assert_trees_all_equal(other(x, w), x * 2 @ w)
    programs = [function.lower(x, w).host_ir for function in (one, other)]
    assert list(map(communications, programs)) == [["AllGather tp 0"]] * 2


def test_a_parameter_and_a_result_keep_their_shapes() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jhost.shard(x, P("tp")), jhost.shard(x + 1, P(None, "tp"))

    shapes = jax.eval_shape(jhost.jit(f, mesh=mesh_of(tp=4)), array(10, 7))
    assert [shape.shape for shape in shapes] == [(10, 7)] * 2
    exact(f, array(10, 7), **tp(4, None, None))


def test_what_enters_is_padded_once_and_what_leaves_is_cut_once() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jhost.shard(x, P("tp"))
        return jnp.tanh(x @ w) + jnp.maximum(x @ w, 0)

    program = program_of(f, array(10, 6), array(6, 6, seed=1), **tp(4, None, P()))
    assert str(program).count("pad(") == str(program).count("slice(") == 1


def test_explain_names_the_dim_and_the_arithmetic() -> None:
    f = jhost.jit(rows_inside, mesh=mesh_of(dp=2, tp=4))
    notes = jhost.explain(f, array(10, 6), array(6, 8)).notes
    text = " padded from 10 to 12: tp (4) does not divide 10 [test_uneven.py:"
    assert [n for n in notes if n.startswith("dim 0 of ") and text in n]
    assert not [note for note in notes if "dim 0 of v " in note]


@pytest.mark.parametrize(
    "spec", [P(("dp", "tp")), P("tp", "dp"), P(None, ("tp", "dp"))]
)
def test_dims_over_two_axes(spec: P) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.shard(x + 1, spec) @ w

    exact(f, array(10, 7), array(7, 3, seed=1), **on({"dp": 2, "tp": 4}, None, P()))


def test_one_dim_sharded_in_two_ways_fits_both() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.shard(jhost.shard(x + 1, P("tp")) * 2, P("dp")) - 1

    settings = on({"dp": 2, "tp": 4}, P("dp"), P("dp"))
    program = exact(f, array(10, 3), **settings)
    assert notes(program, "padded from") == [
        "dim 0 of v padded from 10 to 12: tp (4) does not divide 10"
    ]


def test_random_keys_cannot_be_padded_and_stay_whole() -> None:
    def f(x: jax.Array) -> jax.Array:
        keys = jhost.shard(jax.random.split(jax.random.key(0), 10), P("tp"))
        return x + jax.vmap(lambda key: jax.random.randint(key, (3,), 0, 9))(keys)

    x = np.ones((10, 3), np.int32)
    exact(f, x, **tp(4, None, None))


# --- Where the dim is reduced ------------------------------------------------------- #


def hidden(x: jax.Array, up: jax.Array, down: jax.Array, b: jax.Array) -> jax.Array:
    """In the padding b is 0, the quotient infinite, and 0 times it no number."""
    h = jnp.floor(12 / (jnp.abs(x @ up) + b))
    return jhost.shard(h, P(None, "tp")) @ down


def test_a_contracted_dim_is_padded_by_zeros() -> None:
    args = array(6, 8), array(8, 10, seed=1), array(10, 6, seed=2), jnp.ones(10)
    program = exact(hidden, *args, **tp(4, None, P()))
    assert communications(program) == ["AllReduce tp sum"]


REDUCTIONS: dict[Reducer, Function] = {
    "sum": jnp.sum,
    "prod": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": lambda x, axis: lax.reduce_and(x, (axis,)),
    "or": lambda x, axis: lax.reduce_or(x, (axis,)),
}


@pytest.mark.parametrize("reducer", REDUCTIONS)
@pytest.mark.parametrize("offset", [-9, 9])
def test_reductions_leave_the_padding_out(reducer: Reducer, offset: int) -> None:
    """All elements are negative, or all are positive: the padding's 0 would be seen."""

    def f(x: jax.Array) -> jax.Array:
        x = jhost.shard(x * jnp.int32(2) + jnp.int32(1), P("tp"))
        return REDUCTIONS[reducer](x, axis=0)

    x = np.arange(12, dtype=np.int32).reshape(6, 2) % 5 + offset
    program = exact(f, x, **tp(4, None, P()))
    assert communications(program)[0] == f"AllReduce tp {reducer}"


@pytest.mark.parametrize("reducer", COMBINE)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "float32", "float8_e4m3fn"])
def test_an_identity_changes_nothing(reducer: Reducer, dtype: str) -> None:
    if jnp.issubdtype(dtype, jnp.floating) and reducer in ("and", "or"):
        return
    if dtype == "bool" and reducer in ("sum", "prod"):
        return
    values = jnp.array([0, 1, 1, 0]).astype(dtype)
    neutral = jnp.full_like(values, identity(reducer, values.dtype))
    chex.assert_trees_all_equal(COMBINE[reducer](values, neutral), values)


def test_a_sum_over_streamed_rows_leaves_the_padding_out() -> None:
    """The mask stands in the loop and counts where the chunk stands."""

    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jhost.shard(x, P("tp"))
        y = p2p(x @ w + 1)
        return y, jnp.sum(y, axis=0)

    settings = tp(4, (P(), P(None, "tp")), P(None))
    exact(f, array(10, 6), array(6, 8, seed=1), **settings)


# --- What the dim goes through ------------------------------------------------------ #

THROUGH: dict[str, Function] = {
    "transpose": lambda x: (x.T @ x) @ x.T,
    "outer product": lambda x: x @ x.T,
    "split": lambda x: jnp.reshape(x, (5, 2, 6)) + 1,
    "merge": lambda x: jnp.reshape(x, (60,)) * 2,
    "few steps": lambda x: jnp.reshape(x, (2, 5, 6)) + 1,
    "inner": lambda x: jnp.reshape(x, (10, 3, 2)).transpose(1, 0, 2),
    "broadcast": lambda x: x + jnp.arange(10.0)[:, None],
    "iota": lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 0),
    "sort": lambda x: jnp.sort(x, axis=0) + x,
    "cumsum": lambda x: jnp.cumsum(x, axis=0) * x,
    "sort rows": lambda x: jnp.sort(x, axis=1) + x,
    "concatenate": lambda x: jnp.concatenate([x, x * 2]),
    "slice": lambda x: x[1:8] * 2,
    "take": lambda x: x[np.array([9, 0, 3])] * 2,
    "at": lambda x: x.at[np.array([9, 0])].add(1.0) * x,
    "dynamic": lambda x: lax.dynamic_slice_in_dim(x * 2, 7, 3),
    "mean": lambda x: x - jnp.sum(x, axis=0, keepdims=True),
    "scan": lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(6), x * 2)[1],
}


@pytest.mark.parametrize("name", THROUGH)
def test_a_padded_dim_goes_through(name: str) -> None:
    def f(x: jax.Array) -> jax.Array:
        y = THROUGH[name](jhost.shard(x * 3, P("tp")))
        return jhost.shard(y, P("tp", *[None] * (y.ndim - 1))) + 1

    exact(f, array(10, 6), **tp(4, None, None))


def test_one_column_is_spread_over_two_devices() -> None:
    """XLA:CPU refused the all-to-all of its pieces, which have one element a row."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers = "NTC", "TIO", "NTC"
        y = lax.conv_general_dilated(
            x[:, :1].T[..., None],
            jnp.ones((2, 1, 1)),
            (1,),
            [(0, 2)],
            rhs_dilation=(2,),
            dimension_numbers=numbers,
        )[..., 0].T
        z = jhost.shard(y, P(("a", "b"), None))
        return jhost.shard(y, P("a", None)), jhost.shard(z, P("a", "b"))

    exact(f, array(16, 2), **on({"a": 2, "b": 2}, (P("a", "b"),), None))


# --- Derived programs --------------------------------------------------------------- #

DERIVED = {
    "block": (block, BLOCK),
    "hidden": (
        lambda x, u, d, b: jhost.shard(jnp.maximum(x @ u + b, 0), P(None, "tp")) @ d,
        (None, P()),
    ),
    "rows": (
        lambda x, u, d, b: p2p(jhost.shard(x, P("tp")) @ u + b) @ d,
        ((P(), P(None, "tp"), P("tp"), P("tp")), P()),
    ),
}


@budget.first_is_quick("name", DERIVED)
def test_gradients(name: str) -> None:
    function, shardings = DERIVED[name]
    args = array(10, 6), array(6, 12, seed=1), array(12, 6, seed=2), array(12, seed=3)
    if name == "hidden":
        args = args[0], args[1][:, :10], args[2][:10], args[3][:10]
    by_jhost = jhost.jit(function, **tp(4, *shardings))

    def gradients(f: Function) -> Function:
        loss = lambda *args: jnp.sum(f(*args) ** 2)  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2, 3))

    wanted = jax.jit(gradients(function))(*args)
    chex.assert_trees_all_equal(gradients(by_jhost)(*args), wanted)


def test_vmap() -> None:
    f = jhost.jit(rows_inside, **tp(4, None, None))
    x, w = array(3, 10, 6), array(6, 8, seed=1)
    chex.assert_trees_all_equal(jax.vmap(f, (0, None))(x, w), x * 2 @ w)


# --- Chunks that do not divide ------------------------------------------------------ #


@budget.first_is_quick("chunks", [4, 8, 20, 28])
def test_p2p_pieces_need_not_divide_a_shard(chunks: int) -> None:
    """28 rows are 7 on each of 4 devices, in 1 to 7 pieces."""
    args = array(28, 6), array(6, 64, seed=1), array(64, 6, seed=2)

    def f(x: jax.Array, u: jax.Array, d: jax.Array) -> jax.Array:
        return p2p(jnp.maximum(x @ u, 0) @ d, chunks)

    for rows in (P("tp"), P()) if chunks == 20 else (P("tp"),):
        exact(f, *args, **tp(4, (rows, P(None, "tp"), P("tp")), rows))


@pytest.mark.parametrize("chunks", [8, 12])
def test_p2p_pieces_of_padded_rows(chunks: int) -> None:
    """26 rows become 28: the last device has 5 of its 7."""
    args = array(26, 8), array(8, 4, seed=1)
    exact(lambda x, w: p2p(x @ w, chunks), *args, **tp(4, *SUMMED))


# --- At random ---------------------------------------------------------------------- #

MESHES = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "tp8": {"tp": 8},
    "2x4": {"dp": 2, "tp": 4},
}


@st.composite
def ragged_blocks(draw: st.DrawFn) -> tuple[Any, ...]:
    size = st.integers(1, 40)
    mesh = MESHES[draw(st.sampled_from(sorted(MESHES)))]
    axes = [*((axis,) for axis in mesh), tuple(mesh), ()]
    specs: list[P] = []
    for _ in range(3):
        first, second = draw(st.sampled_from(axes)), draw(st.sampled_from(axes))
        second = () if set(first) & set(second) else second
        specs.append(P(first, second))
    pipeline = draw(st.sampled_from(["p2p", "collective", "auto"]))
    return mesh, draw(size), draw(size), draw(size), specs, pipeline


@settings(max_examples=budget.examples(10), deadline=None)  # each is compiled
@given(ragged_blocks())
def test_any_sizes(drawn: tuple[Any, ...]) -> None:
    mesh, rows, width, inner, specs, pipeline = drawn

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = jnp.maximum(jhost.shard(x + 1, specs[0]) @ up, -1)
        y = jhost.stream(jhost.shard(h, specs[1]) @ down, 0, pipeline=pipeline)
        return jhost.shard(y * 2, specs[2])

    args = array(rows, width), array(width, inner, seed=1), array(inner, width, seed=2)
    try:
        exact(f, *args, **on(mesh, None, P()))
    except jhost.errors.PipelineError:
        assert pipeline == "p2p"  # nothing moves the rows
