"""Partial sums stay partial through linear operations where that saves something."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.marks import ShardMark, StreamRequest
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LayoutReport
from jhost.lowering.layouts.delay_reductions import DelayReductions
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from jhost.lowering.pipeline import run_passes
from jhost.lowering.rules.reducers import COMBINE, Reducer
from jhost.lowering.rules.table import distributes
from tests.lowering.on_mesh import communications, each_size, exact, on, program_of, tp
from tests.lowering.traced import array, built, loops, remarks, work

Function = Callable[..., Any]
K, ROWS = P(None, "tp"), P("tp")
INS = K, ROWS, K, ROWS


def operands() -> tuple[jax.Array, ...]:
    """Two products whose contracted dims are sharded, too long to gather."""
    pairs = [((16, 64), (64, 8)), ((16, 64), (64, 8))]
    return tuple(array(*shape, seed=seed) for seed, shape in enumerate(sum(pairs, ())))


def summed(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    return x @ w + y @ v


@each_size
def test_two_products_are_reduced_as_one(devices: int) -> None:
    program = exact(summed, *operands(), **tp(devices, INS, P()))
    assert communications(program) == ["AllReduce tp sum"]
    program = exact(summed, *operands(), **tp(devices, INS, ROWS))
    assert communications(program) == ["ReduceScatter tp 0 sum"]
    (report,) = remarks(program, LayoutReport)
    assert report.text.startswith(
        "result: partial sum over tp by add -> P('tp', None): "
    )
    assert re.search(r"; `.*` at [\w.:]+ stayed partial until here$", report.text)


def test_the_program_before_and_after(golden: Callable[..., None]) -> None:
    def f(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        pairs = (x, w), (y, v)
        one, two = (jhost.shard(a, K) @ jhost.shard(b, ROWS) for a, b in pairs)
        return jhost.shard(one + two / 2, ROWS)

    before, after = delayed(f, (16, 64), (64, 8), (16, 64), (64, 8), tp=4)
    golden(str(before), "before")
    golden(str(after), "after")


LINEAR: dict[str, Function] = {
    "neg": lambda y: -y,
    "scale": lambda y: y * 3 - y / 2,
    "transpose and reshape": lambda y: y.T.reshape(4, 2, 16)[:2],
    "matmul": lambda y: y @ array(8, 2, seed=9),
    "sum": lambda y: jnp.sum(y, axis=1),
    "cumsum": lambda y: jnp.cumsum(y, axis=1)[:, -1:],
    "pad": lambda y: jnp.pad(y, ((0, 0), (1, 2)))[:, 2:4],
    "select": lambda y: jnp.where(jnp.arange(8) > 3, y, 2 * y)[3:5],
    "convert": lambda y: y.astype(jnp.int32)[:4],
    "concatenate": lambda y: jnp.concatenate([y, -y])[14:18],
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_smaller_later_is_reduced_later(name: str) -> None:
    """Exactly one reduction, and of no more bytes than right after the product."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return LINEAR[name](x @ w)

    program = exact(f, *operands()[:2], **tp(4, INS[:2], P()))
    (moved,) = communications(program)
    assert moved == "AllReduce tp sum"


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.bfloat16])
def test_integers_stay_exact_and_narrow_floats_as_good(dtype: Any) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = (x @ w).astype(jnp.int16 if dtype == jnp.int8 else jnp.float32)
        return jnp.sum(y, axis=0)

    exact(f, *(a.astype(dtype) for a in operands()[:2]), **tp(4, INS[:2], P()))


def test_maxima_stay_partial_through_what_arranges_and_through_maxima() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.max(x, axis=1).reshape(4, 4)[:, 1:], axis=0)

    program = exact(f, array(16, 64), **tp(4, K, P()))
    assert communications(program) == ["AllReduce tp max"]
    (reduced,) = remarks(program, LayoutReport)
    assert reduced.bytes == 2 * 3 * 4 * 3 // 4


def test_several_axes_end_in_one_reduction() -> None:
    """The product is partial over tp, and its sum over the rows over dp as well."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(x @ w, axis=0)

    specs = (P("dp", "tp"), ROWS), P()
    program = exact(f, *operands()[:2], **on({"dp": 2, "tp": 2}, *specs))
    assert communications(program) == ["AllReduce dp,tp sum"]


# --- Where it stays as it is -------------------------------------------------------- #


def delayed(fun: Function, *shapes: Any, **mesh: int) -> tuple[Program, Program]:
    before = PropagateLayouts().apply(built(fun, *shapes, **mesh))
    return before, run_passes(before, (DelayReductions(),))


def unmarked(program: Program) -> list[Any]:
    return [mark for mark in program.marks if not isinstance(mark, ShardMark)]


@pytest.mark.parametrize("name", ["tanh", "square", "max", "affine", "as much"])
def test_what_is_not_linear_or_saves_nothing_stays(name: str) -> None:
    after: dict[str, Function] = {
        "tanh": lambda y: jnp.tanh(y)[:2],
        "square": lambda y: (y * y)[:2],
        "max": lambda y: jnp.max(y, axis=0),
        "affine": lambda y: (y + 1)[:2],
        "as much": lambda y: 2 * y,
    }

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return after[name](jhost.shard(x, K) @ jhost.shard(w, ROWS))

    before, program = delayed(f, (16, 64), (64, 8), tp=4)
    assert program.body == before.body
    assert program.remarks == before.remarks


def test_a_value_that_others_read_is_reduced_for_them() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jhost.shard(x, K) @ jhost.shard(w, ROWS)
        return y, jnp.sum(y, axis=0)

    before, program = delayed(f, (16, 64), (64, 8), tp=4)
    assert program.body == before.body


def test_a_constraint_on_a_value_in_between_is_kept() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jhost.shard(jhost.shard(x, K) @ jhost.shard(w, ROWS), P())
        return jnp.sum(y, axis=0)

    before, program = delayed(f, (16, 64), (64, 8), tp=4)
    assert program.body == before.body
    assert not program.marks


def test_a_copy_of_the_sum_makes_it() -> None:
    """`serial` copies a value that has the layout which it wants."""

    def f(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.maximum(jhost.serial(x @ w + y @ v), 0)

    program = exact(f, *operands(), **tp(4, INS, ROWS))
    assert communications(program) == ["ReduceScatter tp 0 sum"]


def test_no_contraction_is_repeated_for_it() -> None:
    """Each device multiplies its rows; with partial sums each would multiply all."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        y = jhost.shard(x, K) @ jhost.shard(w, ROWS)
        return jhost.shard(y @ v, ROWS)

    before, program = delayed(f, (16, 64), (64, 8), (8, 2), tp=4)
    assert program.body == before.body


# --- Streams ------------------------------------------------------------------------ #


def test_a_stream_on_one_of_the_products_goes_on_with_it() -> None:
    def f(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, 0, pipeline="p2p") + y @ v

    program = exact(f, *operands(), **tp(4, INS, ROWS))
    (loop,) = loops(program)
    assert sorted(work(loop.body)) == ["CollectivePermute", "add", *["dot_general"] * 2]


def test_the_mark_names_what_takes_the_place_of_its_value() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jhost.shard(x, K) @ jhost.shard(w, ROWS)
        return jnp.sum(jhost.stream(y, 0), axis=1)

    _, program = delayed(f, (16, 64), (64, 8), tp=4)
    (mark,) = unmarked(program)
    assert isinstance(mark, StreamRequest)
    made = {out.name for stmt in program.body for out in getattr(stmt, "outs", ())}
    assert mark.buffer in made


def test_what_a_pipeline_hides_is_not_put_off_to_where_it_cannot() -> None:
    """The sum over the rows is smaller than the rows, but nothing would hide it."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jhost.stream(x @ w, 0, pipeline="p2p")
        return jnp.sum(y * 2, axis=0)

    program = program_of(f, *operands()[:2], **tp(4, INS[:2], P()))
    assert "CollectivePermute tp" in communications(program)


FACTORS = [jnp.inf, -jnp.inf, jnp.nan, 0.0, 2.0**126, -4.0, 0.5]
SCALED: dict[str, Function] = {
    "neg": lambda y, k: -y * k,
    "mul": lambda y, k: y * k,
    "rmul": lambda y, k: k * y,
    "div": lambda y, k: y / k,
    "dot": lambda y, k: y @ jnp.diag(jnp.full(8, k)),
    "conv": lambda y, k: jnp.convolve(y.ravel(), k[None]),
    "add": lambda y, k: y * k + 3 * y,
    "scan": lambda y, k: lax.scan(lambda c, t: (c, c * t), y, k[None])[1][0],
    "gradient": lambda y, k: jax.vjp(lambda y: y * k, y)[1](y)[0],
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", SCALED)
def test_products_with_infinite_and_large_factors_are_of_the_sum(
    name: str, known: bool
) -> None:
    """Terms of both signs would be infinities that add up to NaN; a row cancels."""
    x, w = operands()[:2]
    x = np.concatenate([np.tile(x[:1, :32], 2), x[1:]])
    w = np.concatenate([w[:32], -w[:32]])

    def f(x: jax.Array, w: jax.Array, factors: jax.Array) -> list[list[jax.Array]]:
        numbers = map(jnp.float32, FACTORS) if known else factors
        parts = [SCALED[name](x @ w, number)[:2] for number in numbers]
        return [[y, (y == 0) & jnp.signbit(y)] for y in parts]

    exact(f, x, w, jnp.float32(FACTORS), **tp(4, (K, ROWS, P()), P()))


def test_a_sum_is_divided_by_0_and_not_its_parts() -> None:
    """The parts would be infinities of both signs, and their sum no number."""

    def f(x: jax.Array, w: jax.Array, count: jax.Array) -> jax.Array:
        return jnp.exp(-((x @ w) / count + x @ (w + 1)))

    x, w = jnp.tile(jnp.float32([[3, -1, 0, 0]]), (4, 1)), jnp.ones((4, 4))
    exact(f, x, w, jnp.zeros(4), **tp(4, (K, ROWS, P()), P()))


# --- The rules ---------------------------------------------------------------------- #

INTEGERS = np.arange(12, dtype=np.int32).reshape(3, 4) - 5
OTHER = (INTEGERS * 7) % 5 - 2

EQUATIONS: dict[str, tuple[Function, tuple[Any, ...]]] = {
    "add": (lax.add, (INTEGERS, OTHER)),
    "sub": (lax.sub, (INTEGERS, OTHER)),
    "mul": (lax.mul, (INTEGERS, OTHER)),
    "div": (lax.div, (INTEGERS, OTHER * 0 + 3)),
    "div of floats": (lax.div, (INTEGERS * 1.0, OTHER * 0 + 2.0)),
    "div by two": (lambda x: x / np.float32(2), (INTEGERS * 1.0,)),
    "div by a half": (lambda x: x / np.float32(0.5), (INTEGERS * 1.0,)),
    "div by inf": (lambda x: x / np.float32(np.inf), (INTEGERS * 1.0,)),
    "mul of floats": (lax.mul, (INTEGERS * 1.0, OTHER * 1.0)),
    "half of floats": (lambda x: x * np.float32(0.5), (INTEGERS * 1.0,)),
    "minus half of floats": (lambda x: x * np.float32(-0.5), (INTEGERS * 1.0,)),
    "twice floats": (lambda x: x * np.float32(2), (INTEGERS * 1.0,)),
    "no floats": (lambda x: x * np.float32(0), (INTEGERS * 1.0,)),
    "dot of floats": (lambda x, y: lax.dot(x, y.T), (INTEGERS * 1.0, OTHER * 1.0)),
    "neg": (lax.neg, (INTEGERS,)),
    "neg of floats": (lax.neg, (INTEGERS * 1.0,)),
    "conj": (lax.conj, (INTEGERS * 1.0j,)),
    "abs": (lax.abs, (INTEGERS,)),
    "dot_general": (lambda x, y: lax.dot(x, y.T), (INTEGERS, OTHER)),
    "reduce_sum": (lambda x: jnp.sum(x, axis=0), (INTEGERS,)),
    "reduce_max": (lambda x: jnp.max(x, axis=0), (INTEGERS,)),
    "reduce_min": (lambda x: jnp.min(x, axis=0), (INTEGERS,)),
    "cumsum": (lambda x: lax.cumsum(x, axis=1), (INTEGERS,)),
    "transpose": (lambda x: x.T, (INTEGERS,)),
    "reshape": (lambda x: lax.reshape(x, (4, 3)), (INTEGERS,)),
    "slice": (lambda x: lax.slice_in_dim(x, 1, 3), (INTEGERS,)),
    "rev": (lambda x: lax.rev(x, (1,)), (INTEGERS,)),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, 3, 4)), (INTEGERS,)),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 0), (INTEGERS, OTHER)),
    "select_n": (lambda p, x, y: lax.select(p > 0, x, y), (OTHER, INTEGERS, OTHER)),
    "pad": (lambda x: lax.pad(x, np.int32(0), [(1, 0, 0)] * 2), (INTEGERS,)),
    "pad with ones": (lambda x: lax.pad(x, np.int32(1), [(1, 0, 0)] * 2), (INTEGERS,)),
    "to int8": (lambda x: x.astype(np.int8), (INTEGERS * 50,)),
    "to float": (lambda x: x.astype(np.float32), (INTEGERS,)),
    "to bfloat16": (lambda x: x.astype(jnp.bfloat16), (INTEGERS * 1.37,)),
    "from bfloat16": (
        lambda x: x.astype(np.float32),
        (INTEGERS.astype(jnp.bfloat16),),
    ),
    "from int8": (lambda x: x.astype(np.int32), (INTEGERS.astype(np.int8) * 20,)),
    "clamp": (lambda x: lax.clamp(np.int32(-1), x, np.int32(3)), (INTEGERS,)),
}

NOT_LINEAR = {
    "abs",
    "clamp",
    "conj",
    "div",
    "div by a half",
    "div by inf",
    "div of floats",
    "dot of floats",
    "from int8",
    "minus half of floats",
    "mul of floats",
    "neg of floats",
    "no floats",
    "pad with ones",
    "reduce_max",
    "reduce_min",
    "to bfloat16",
    "to float",
    "twice floats",
}


@pytest.mark.parametrize("reducer", ["sum", "max", "min"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_that_distributes_does(name: str, reducer: Reducer) -> None:
    function, args = EQUATIONS[name]
    args = tuple(jnp.array(arg) for arg in args)
    eqn = jax.make_jaxpr(function)(*args).eqns[-1]
    if reducer == "sum":
        assert bool(distributes(eqn, "sum")) == (name not in NOT_LINEAR)
    combine = COMBINE[reducer]
    for group in distributes(eqn, reducer):
        reverse = [jnp.flip(a) if i in group else a for i, a in enumerate(args)]
        together = [
            combine(a, b) if i in group else a
            for i, (a, b) in enumerate(zip(args, reverse, strict=True))
        ]
        wanted = function(*together)
        given = combine(function(*args), function(*reverse))
        np.testing.assert_array_equal(given, wanted)
