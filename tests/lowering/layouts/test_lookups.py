"""Lookups in sharded tables, and updates of them: what moves, and that it is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, walk
from tests import budget
from tests.lowering.on_mesh import communications, exact, on, program_of
from tests.lowering.traced import interpreted

shard = jhost.shard
MESH = {"dp": 2, "tp": 2}
TABLE, TOKENS = P("tp", None), P("dp", None)


def table(rows: int = 64, dtype: Any = np.int32) -> Any:
    return (np.arange(rows * 4) * 7919 % 101).reshape(rows, 4).astype(dtype)


def tokens(rows: int = 64, batch: int = 4, sequence: int = 8) -> Any:
    """Some before the table and behind it."""
    count = np.arange(batch * sequence, dtype=np.int32)
    return (count * 7907 % (rows + 20) - 10).reshape(batch, sequence)


def lookup(table: Any, tokens: Any) -> Any:
    return table[tokens]


# --- Lookups ------------------------------------------------------------------------ #


def test_no_table_is_gathered_for_a_lookup() -> None:
    settings = on(MESH, (TABLE, TOKENS), P("dp", None, None))
    program = exact(lookup, table(), tokens(), **settings)
    assert communications(program) == ["AllReduce tp sum"]


def test_what_is_looked_up_is_scattered_onto_the_sequence() -> None:
    settings = on(MESH, (TABLE, TOKENS), P("dp", "tp", None))
    program = exact(lookup, table(), tokens(), **settings)
    assert communications(program) == ["ReduceScatter tp 1 sum"]


def test_a_table_of_fewer_bytes_than_what_is_looked_up_is_gathered() -> None:
    settings = on(MESH, (TABLE, TOKENS), P("dp", None, None))
    program = exact(lookup, table(8), tokens(8), **settings)
    assert communications(program) == ["AllGather tp 0"]


@pytest.mark.parametrize("spec", [P(), P(None, "tp")])
def test_a_lookup_in_rows_that_are_all_there_moves_nothing(spec: P) -> None:
    settings = on(MESH, (spec, TOKENS), P("dp", None, spec[1] if spec else None))
    assert communications(exact(lookup, table(), tokens(), **settings)) == []


def test_a_table_that_is_gathered_anyway_is_looked_up_as_a_whole() -> None:
    """A gather that others share costs nothing more."""

    def both(table: Any, tokens: Any) -> Any:
        return jnp.sort(table, axis=0), table[tokens]

    settings = on(MESH, (TABLE, TOKENS), (P(), P("dp", None, None)))
    assert communications(exact(both, table(), tokens(), **settings)) == [
        "AllGather tp 0"
    ]


def test_rows_over_two_axes() -> None:
    settings = on(MESH, (P(("dp", "tp"), None), P()), P())
    program = exact(lookup, table(), tokens(), **settings)
    assert communications(program) == ["AllReduce dp,tp sum"]


def test_rows_of_two_dims_over_two_axes() -> None:
    x, i = table(128).reshape(8, 16, 4), tokens(8, 2, 4)
    settings = on(MESH, (P("dp", "tp"), P()), P())
    program = exact(lambda x, i: x[i, i + 3], x, i, **settings)
    assert set(communications(program)) <= {"AllReduce dp,tp sum"}


@pytest.mark.parametrize("spec", [P("dp"), P("tp", "dp")])
def test_of_a_diagonal_nothing_else_moves(spec: P) -> None:
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found, back = jax.vjp(jnp.diagonal, x)
        return found, back(found)[0]

    x = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    program = exact(both, x, **on({"dp": 2, "tp": 2}, (spec,), (P(), spec)))
    axes = ",".join(axis for axis in spec if axis)
    assert communications(program) == [f"AllReduce {axes} sum"]


def test_rows_that_do_not_divide_are_padded() -> None:
    """Bounds stay those of the table, whose last row is the 61st."""

    def padded(mode: str) -> Callable[..., Any]:
        return lambda table, i: shard(table, TABLE).at[i].get(mode=mode)

    settings = on(MESH, (P(), TOKENS), P("dp", None, None))
    for mode in ("clip", "fill"):
        program = exact(padded(mode), table(61), tokens(61), **settings)
        assert communications(program) == ["AllReduce tp sum"]


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.bool_, np.complex64])
def test_lookups_of_all_types_in_every_mode(mode: str, dtype: Any) -> None:
    values = table(dtype=np.float32)
    if dtype != np.bool_:
        values[::3], values[1::7] = np.inf, np.nan
    settings = on(MESH, (TABLE, TOKENS), P("dp", None, None))
    program = exact(
        lambda x, i: x.at[i].get(mode=mode),
        values.astype(dtype),
        tokens(),
        **settings,
    )
    reducer = "or" if dtype == np.bool_ else "sum"
    assert communications(program) == [f"AllReduce tp {reducer}"]


# --- Casts -------------------------------------------------------------------------- #

_HARD = [-0.0, 0.0, 1e-45, -1e-45, -1e-8, 1 / 3, 7e4, -3e38, np.inf, -np.inf, np.nan]
"""Numbers that a cast changes, or that a sum with another zero would."""


def hard_table(rows: int = 64) -> jax.Array:
    return jnp.array(np.resize(np.array(_HARD, np.float32), (rows, 4)))


def same_signs(given: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(given, wanted)
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(given)[known], np.signbit(wanted)[known])


def moved_dtypes(program: Program) -> list[tuple[str, str]]:
    stmts = (s for s in walk(program.body) if isinstance(s, Communicate))
    return [(stmt.kind, stmt.source.dtype.name) for stmt in stmts]


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.int16])
def test_what_is_looked_up_is_cast_and_then_summed(mode: str, dtype: Any) -> None:
    """A sum of one term and zeros; a constraint before the cast holds behind it."""

    def f(table: Any, tokens: Any) -> Any:
        found = table.at[tokens].get(mode=mode, fill_value=-1e-8)
        return shard(found, P("dp", "tp", None)).astype(dtype)

    values = hard_table()
    if dtype == np.int16:  # of what does not fit, XLA makes what it likes
        values = jnp.nan_to_num(values).clip(-99, 99)
    settings = on(MESH, (TABLE, TOKENS), P("dp", "tp", None))
    wanted = np.float32(jax.jit(f)(values, tokens()))
    for run in (jhost.jit, interpreted):
        same_signs(np.float32(run(f, **settings)(values, tokens())), wanted)
    program = program_of(f, values, tokens(), **settings)
    assert moved_dtypes(program) == [("ReduceScatter", np.dtype(dtype).name)]


def test_a_slice_at_a_computed_position_is_cast_and_then_summed() -> None:
    def f(table: Any, start: Any) -> Any:
        return lax.dynamic_slice_in_dim(table, start, 2).T.astype(jnp.bfloat16)

    settings = on(MESH, (TABLE, P()), P())
    program = exact(f, table(dtype=np.float32) / 3, np.int32(17), **settings)
    assert moved_dtypes(program) == [("AllReduce", "bfloat16")]


def test_two_lookups_are_summed_before_their_cast() -> None:
    """Each element then has two terms, on two devices."""

    def f(table: Any, i: Any) -> Any:
        return (table[i] + table[i + 1]).astype(jnp.bfloat16)

    settings = on(MESH, (TABLE, TOKENS), P("dp", None, None))
    program = exact(f, table(256, np.float32) / 3, tokens(256), **settings)
    assert moved_dtypes(program) == [("AllReduce", "float32")]


def test_a_lookup_that_is_read_wide_is_summed_wide() -> None:
    def f(table: Any, i: Any) -> Any:
        found = table[i]
        return found, found.astype(jnp.bfloat16)

    settings = on(MESH, (TABLE, TOKENS), P("dp", None, None))
    program = exact(f, table(dtype=np.float32) / 3, tokens(), **settings)
    assert moved_dtypes(program) == [("AllReduce", "float32")]


def test_the_cotangent_of_a_cast_lookup_is_gathered_narrow() -> None:
    """The constraint's cotangent has a constraint too, which holds before the cast."""

    def gradient(table: Any, i: Any, ct: Any) -> Any:
        def f(table: Any) -> Any:
            return shard(table[i], P("dp", "tp", None)).astype(jnp.bfloat16)

        return jax.vjp(f, table)[1](ct * 2)[0]

    i = tokens(4096)
    ct = jnp.arange(i.size * 4).reshape(*i.shape, 4).astype(jnp.bfloat16) % 7
    settings = on(MESH, (TABLE, TOKENS, P("dp", "tp", None)), TABLE)
    program = exact(gradient, table(4096, np.float32), i, ct, **settings)
    moved = moved_dtypes(program)
    assert {*moved} == {("AllGather", "int32"), ("AllGather", "bfloat16")}


def test_a_weight_that_is_constrained_and_cast_is_gathered_narrow() -> None:
    def f(x: Any, w: Any) -> Any:
        return x @ shard(w, P(None, None)).astype(jnp.bfloat16)

    settings = on(MESH, (P("dp", None), P("tp", None)), P("dp", None))
    x, w = table().astype(jnp.bfloat16), table(4, np.float32) / 3
    program = exact(f, x, w, rtol=1e-2, **settings)
    assert moved_dtypes(program) == [("AllGather", "bfloat16")]


# --- Gradients ---------------------------------------------------------------------- #


def gradient(table: Any, tokens: Any, cotangent: Any) -> Any:
    (grad,) = jax.vjp(lambda t: t[tokens], table)[1](cotangent)
    return grad


def of_gradient(rows: int, cotangent: P, **size: int) -> Program:
    i = tokens(rows, **size)
    ct = np.arange(i.size * 4, dtype=np.float32).reshape(*i.shape, 4) % 7
    settings = on(MESH, (TABLE, TOKENS, cotangent), TABLE)
    return exact(gradient, table(rows, np.float32), i, ct, **settings)


def test_a_table_has_its_gradient_where_it_lies() -> None:
    """Each device adds what falls into its rows; the devices of dp add it up."""
    program = of_gradient(16, P("dp", None, None), batch=8)
    assert communications(program) == ["AllReduce dp sum"]


def test_a_gradient_of_sharded_sequences_is_scattered_onto_the_rows() -> None:
    program = of_gradient(16, P("dp", "tp", None))
    assert communications(program) == ["ReduceScatter tp 0 sum", "AllReduce dp sum"]


def test_cotangents_of_fewer_bytes_than_the_table_are_gathered() -> None:
    program = of_gradient(4096, P("dp", "tp", None))
    assert {text.split()[0] for text in communications(program)} == {"AllGather"}


def test_a_training_step_moves_neither_table_nor_cotangents() -> None:
    def step(table: Any, tokens: Any, w: Any) -> Any:
        def loss(table: Any) -> Any:
            x = shard(table[tokens], P("dp", "tp", None))
            return jnp.sum(shard(x * w, P("dp", "tp", None)) ** 2)

        return table - jax.grad(loss)(table)

    settings = on(MESH, (TABLE, TOKENS, P()), TABLE)
    i = tokens(64, 8, 16)
    args = table(64, np.float32) % 5, i, np.full(4, 2, np.float32)
    assert communications(exact(step, *args, **settings)) == [
        "ReduceScatter tp 1 sum",
        "ReduceScatter tp 0 sum",
        "AllReduce dp sum",
    ]


# --- Updates ------------------------------------------------------------------------ #

_UPDATES: dict[str, tuple[str, Callable[..., Any]]] = {
    "add": ("sum", lambda x, i, u: x.at[i].add(u)),
    "subtract": ("sum", lambda x, i, u: x.at[i].subtract(u)),
    "multiply": ("prod", lambda x, i, u: x.at[i].multiply(u)),
    "max": ("max", lambda x, i, u: x.at[i].max(u)),
    "min": ("min", lambda x, i, u: x.at[i].min(u, mode="clip")),
}


@pytest.mark.parametrize("name", _UPDATES)
@pytest.mark.parametrize("rows", [None, "tp"])
def test_updates_that_are_combined(name: str, rows: str | None) -> None:
    reducer, function = _UPDATES[name]
    i = tokens(8)
    new = np.arange(i.size * 4, dtype=np.int32).reshape(*i.shape, 4) % 5 - 2
    spec = P(rows, None)
    settings = on(MESH, (spec, TOKENS, P("dp", None, None)), spec)
    program = exact(function, table(8), i, new, **settings)
    assert communications(program) == [f"AllReduce dp {reducer}"]


def test_values_are_set_where_the_rows_lie() -> None:
    settings = on(MESH, (TABLE, P(), P()), TABLE)
    i = np.array([3, 60, -1, 64, 17, -90], np.int32)
    new = table(6)
    program = exact(lambda x, i, u: x.at[i].set(u), table(), i, new, **settings)
    assert communications(program) == []


def test_updates_that_do_not_divide_are_padded_with_nothing() -> None:
    def update(x: Any, i: Any, u: Any) -> Any:
        i, u = shard(i, P("tp")), shard(u, P("tp", None))
        return x.at[i].max(u, unique_indices=True, mode="drop")

    settings = on({"tp": 4}, P(), P())
    i = np.array([3, 0, 7, 5, 99, 1], np.int32)
    exact(update, table(8) - 200, i, table(6) - 250, **settings)
    exact(
        lambda x, i, u: shard(update(x, i, u), P("tp")),
        table(7),
        i,
        table(6),
        **settings,
    )


# --- Streams ------------------------------------------------------------------------ #


def test_a_lookup_is_made_in_chunks_of_tokens() -> None:
    def f(table: Any, tokens: Any) -> Any:
        x = jhost.stream(table[tokens], 1, chunks=2, pipeline="collective")
        return shard(x, P("dp", "tp", None))

    settings = on(MESH, (TABLE, TOKENS), P("dp", "tp", None))
    program = exact(f, table(), tokens(), **settings)
    assert communications(program) == ["ReduceScatter tp 1 sum"]


@budget.first_is_quick("pipeline", ["collective", "p2p"])
def test_no_loop_cuts_rows_or_what_is_added_to_them(pipeline: Any) -> None:
    def f(table: Any, tokens: Any, w: Any) -> Any:
        def loss(table: Any) -> Any:
            x = shard(table[tokens], P("dp", "tp", None))
            y = jhost.stream(x @ w, 1, pipeline=pipeline)
            return jnp.sum(shard(y, P("dp", None, "tp")) ** 2)

        return jax.grad(loss)(table)

    settings = on(MESH, (TABLE, TOKENS, P(None, "tp")), TABLE)
    w = np.arange(32, dtype=np.float32).reshape(4, 8) % 3
    args = table(64, np.float32) % 5, tokens(), w
    exact(f, *args, **settings)
    lowered = jhost.jit(f, **settings).lower(*args)
    assert "scatter-add takes all of dim" in lowered.explain().text


def test_a_stream_of_rows_stops_at_their_lookup() -> None:
    def f(table: Any, tokens: Any) -> Any:
        return jhost.stream(table * 2, 0, chunks=2, pipeline="collective")[tokens]

    settings = on(MESH, (TABLE, TOKENS), P("dp", None, None))
    program = program_of(f, table(), tokens(), **settings)
    assert "gather takes all of dim 0 at once" in str(program.remarks)
    exact(f, table(), tokens(), **settings)
