"""Parity group A with nvFuser: streams on one device.

One test for each row of nvFuser's `test_host_ir_stream_lowering.cpp` and
`test_stream.py`: the Host IR as text, and the numbers by the compiled program and by
the interpreter against those of the plain function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jhost
from jhost.errors import StreamDimError
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Allocate, Compute, walk
from tests.lowering.traced import (
    aliases,
    array,
    check,
    chunk_counts,
    interpreted,
    loops,
    work,
)

Golden = Callable[..., None]


# --- nvFuser's rows ----------------------------------------------------------------- #


def test_single_set_op(golden: Golden) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.copy(x), axis=0, chunks=4)

    golden(str(check(f, array(4, 8))))


def test_single_set_op_non_outermost(golden: Golden) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.copy(x), axis=1, chunks=8)

    golden(str(check(f, array(4, 8))))


def test_single_binary_op(golden: Golden) -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return jhost.stream(x + y, axis=0, chunks=4)

    golden(str(check(f, array(4, 4), array(4, 4, seed=1))))


def test_two_set_ops(golden: Golden) -> None:
    """One merged loop; both copies leave it, so both are allocated whole before it."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jhost.stream(jnp.copy(x), axis=0, chunks=4)
        return y, jhost.stream(jnp.copy(y), axis=0, chunks=4)

    golden(str(check(f, array(4, 8))))


def test_three_set_ops_with_disjoint_for_loops(golden: Golden) -> None:
    def f(x: jax.Array) -> jax.Array:
        y = jhost.stream(jnp.copy(x), axis=0, chunks=4)
        z = jhost.serial(y)
        return jhost.stream(jnp.copy(z), axis=0, chunks=4)

    golden(str(check(f, array(4, 8))))


def test_reduction(golden: Golden) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sum(x, axis=2), axis=0, chunks=4)

    golden(str(check(f, array(4, 8, 2))))


def test_matmul_m(golden: Golden) -> None:
    """The rows of the left operand are cut, the right operand is whole."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, axis=0, chunks=8)

    program = check(f, array(8, 4), array(4, 2, seed=1))
    assert aliases(program) == {"x": 0, "result": 0}
    golden(str(program))


def test_matmul_n(golden: Golden) -> None:
    """The columns of the right operand are cut, the left operand is whole."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, axis=1, chunks=2)

    program = check(f, array(8, 4), array(4, 2, seed=1))
    assert aliases(program) == {"w": 1, "result": 1}
    golden(str(program))


def test_batched_matmul(golden: Golden) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, axis=0, chunks=16)

    golden(str(check(f, array(16, 8, 4), array(4, 2, seed=1))))


def test_split(golden: Golden) -> None:
    """nvFuser refuses; here the outermost dim of a split is the dim that was split."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.reshape(x, (2, 4, 4)), axis=0, chunks=2)

    golden(str(check(f, array(8, 4))))


def test_merge(golden: Golden) -> None:
    """A step of the merged dim is as many elements as the inner dim has."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.reshape(x, (8, 4)), axis=0, chunks=2)

    golden(str(check(f, array(2, 4, 4))))


def test_split_by_chunks_alone() -> None:
    """`chunks=` splits any dim: nvFuser needs a split of the user's for that."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.copy(x), axis=0, chunks=2)

    (loop,) = loops(check(f, array(8, 4)))
    assert loop.extent == 2


@pytest.mark.parametrize(
    ("before", "after", "axis"), [((8, 4), (2, 4, 4), 1), ((4, 6), (3, 8), 1)]
)
def test_split_and_merge_refuse_inner_dims(
    before: tuple[int, ...], after: tuple[int, ...], axis: int
) -> None:
    """The error says which reshape stands in the way."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.reshape(x, after), axis=axis, chunks=2)

    with pytest.raises(StreamDimError) as error:
        jhost.jit(f).lower(array(*before))
    assert f"the reshape {before} -> {after}" in str(error.value)
    assert "test_one_device.py" in str(error.value)


def test_do_support_post_on_stream_abs(golden: Golden) -> None:
    """nvFuser refuses what is no standalone op; here any ruled primitive works."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.abs(x), axis=0, chunks=4)

    golden(str(check(f, array(4, 8))))


def test_do_support_post_on_stream_of_a_fused_unit(golden: Golden) -> None:
    """A whole unit runs in a loop."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.sum(x + x, axis=0), axis=-1, chunks=4)

    program = check(f, array(4, 8, 32))
    (unit,) = [s.unit for s in walk(program.body) if isinstance(s, Compute)]
    assert [eqn.eqn.primitive.name for eqn in unit.eqns] == ["add", "reduce_sum"]
    golden(str(program))


def test_inputs_are_stream_parallelized(golden: Golden) -> None:
    """InputsAreNotStreamParallelized: nvFuser skips it, because inputs now may be."""

    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(x, axis=0, chunks=4) * 2

    golden(str(check(f, array(4, 8))))


def test_k_streamed(golden: Golden) -> None:
    """The contracted dim: never in nvFuser, here the loop accumulates."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x, axis=1, chunks=2) @ w

    golden(str(check(f, array(8, 4), array(4, 2, seed=1))))


def test_two_matmuls_inlinable(golden: Golden) -> None:
    """One loop with both matmuls; a chunk of the intermediate lives in an iteration."""

    def f(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return jhost.stream(x @ w1, axis=0, chunks=3) @ w2

    program = check(f, array(6, 3), array(3, 5, seed=1), array(5, 2, seed=2))
    (loop,) = loops(program)
    assert (loop.extent, work(loop.body)) == (3, ["dot_general", "dot_general"])
    golden(str(program))


def test_two_matmuls_not_inlinable(golden: Golden) -> None:
    """First on n, then on m: two loops, and the intermediate whole between them."""

    def f(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        h = jhost.stream(x @ w1, axis=1, chunks=5)
        return jhost.stream(h @ w2, axis=0, chunks=3)

    program = check(f, array(6, 3), array(3, 5, seed=1), array(5, 2, seed=2))
    assert chunk_counts(program) == [5, 3]
    shapes = [s.buffer.shape for s in program.body if isinstance(s, Allocate)]
    assert shapes == [(6, 5), (6, 2)]
    golden(str(program))


# --- Beyond them -------------------------------------------------------------------- #


def test_a_ragged_last_chunk(golden: Golden) -> None:
    """Three chunks of ten rows: four, four and two."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, axis=0, chunks=3)

    golden(str(check(f, array(10, 4), array(4, 2, seed=1))))


@pytest.mark.parametrize("chunks", range(1, 8))
def test_every_chunk_count_of_seven_rows(chunks: int) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(x * 2, axis=0, chunks=chunks)

    counts = chunk_counts(check(f, array(7, 2)))
    # Chunks are of equal size but the last, so that 5 or 6 of them take 4 of size 2.
    assert counts == ([] if chunks == 1 else [-(-7 // -(-7 // chunks))])


REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "sum": jnp.sum,
    "prod": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduced_dim_accumulates(name: str, chunks: int) -> None:
    """Exactly, on int32 and on bool."""

    def f(x: jax.Array) -> jax.Array:
        return REDUCTIONS[name](jhost.stream(x, axis=0, chunks=chunks), axis=0)

    values = array(7, 3).astype(jnp.int32)
    program = check(f, values > 0 if name in ("and", "or") else values)
    assert chunk_counts(program) == [chunks]
    assert work(loops(program)[0].body) == [f"reduce_{name}"]


def accumulators(program: Program) -> list[Any]:
    return [
        stmt.outs[0].dtype
        for stmt in walk(program.body)
        if isinstance(stmt, Compute) and stmt.reducer
    ]


def test_a_bfloat16_sum_accumulates_in_float32(golden: Golden) -> None:
    """Chunks of 1, 2**-8 each: a bfloat16 accumulator would stay at 1."""

    def f(x: jax.Array) -> jax.Array:
        return lax.reduce_sum(jhost.stream(x, axis=0, chunks=9), (0,))

    values = jnp.full((9, 2), 2.0**-8, jnp.bfloat16).at[0].set(1)
    for run in (jhost.jit, interpreted):
        given = run(f)(values)
        assert given.tolist() == [1 + 8 * 2.0**-8] * 2
    program = jhost.jit(f).lower(values).host_ir
    assert accumulators(program) == [np.dtype(np.float32)]
    golden(str(program))


def test_a_bfloat16_matmul_accumulates_in_float32() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x, axis=1, chunks=8) @ w

    x = jnp.full((2, 8), 2.0**-8, jnp.bfloat16).at[:, 0].set(1)
    program = check(f, x, jnp.ones((8, 2), jnp.bfloat16))
    assert accumulators(program) == [np.dtype(np.float32)]


def test_a_bfloat16_maximum_needs_no_wider_accumulator() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.max(jhost.stream(x, axis=0, chunks=2), axis=0)

    program = check(f, array(4, 2).astype(jnp.bfloat16))
    assert accumulators(program) == [jnp.bfloat16]


def test_int32_is_exact() -> None:
    """Sums that no float32 holds."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x, axis=1, chunks=3) @ w

    x = jnp.full((2, 7), 2**24 + 1, jnp.int32)
    program = check(f, x, jnp.ones((7, 2), jnp.int32))
    assert accumulators(program) == [np.dtype(np.int32)]
