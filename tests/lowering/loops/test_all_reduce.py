"""All-reduces in pieces: a piece goes back to all while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import For
from tests import budget
from tests.lowering.on_mesh import exact, on, on_streams, program_of, tp
from tests.lowering.traced import array, interpreted, loops, work

Golden = Callable[..., None]

PARTIAL = (P(None, "tp"), P("tp"))
BLOCK = (P("tp"), P(None, "tp"), P("tp"))


def p2p(x: jax.Array, chunks: int = 8, axis: int = 0) -> jax.Array:
    return jhost.stream(x, axis, chunks=chunks, pipeline="p2p")


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return p2p(x @ w)


def the_loop(program: Program) -> list[str]:
    """What an iteration does to a piece."""
    (loop,) = loops(program)
    return work(loop.body)


THERE = "loop(dot_general, CollectivePermute)"
BACK = "loop(CollectivePermute)"


def test_a_piece_is_added_up_and_sent_back_in_its_own_iteration(golden: Golden) -> None:
    args = array(16, 8), array(8, 2, seed=1)
    program = exact(matmul, *args, **tp(4, PARTIAL, P()))
    added = ["add"] * 3
    assert the_loop(program) == [THERE, "dot_general", "Set", *added, "Set", BACK]
    golden(str(program))


@pytest.mark.parametrize(
    ("devices", "pieces"), [(4, 2), (4, 3), (4, 4), (2, 3), (8, 2)]
)
def test_pieces_may_be_ragged(devices: int, pieces: int) -> None:
    """Five rows a device, in three and two, or two, two and one."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return p2p(x @ w, chunks=pieces * devices)

    args = array(devices * 5, devices * 2), array(devices * 2, 3, seed=1)
    program = exact(f, *args, **tp(devices, PARTIAL, P()))
    (loop,) = loops(program)
    assert loop.extent == min(pieces, 3)


def test_rows_that_the_devices_do_not_divide() -> None:
    args = array(18, 8), array(8, 2, seed=1)
    assert the_loop(exact(matmul, *args, **tp(4, PARTIAL, P())))[-1] == BACK


REDUCERS: dict[str, Callable[..., jax.Array]] = {
    "sum": jnp.sum,
    "prod": jnp.prod,
    "max": jnp.max,
    "min": jnp.min,
    "and": jnp.all,
    "or": jnp.any,
}


@pytest.mark.parametrize("reducer", REDUCERS)
def test_every_reducer(reducer: str) -> None:
    def f(x: jax.Array) -> jax.Array:
        return p2p(REDUCERS[reducer](x, axis=0))

    x = array(4, 12, 3).astype(jnp.int32)
    x = x > -2 if reducer in ("and", "or") else x
    assert the_loop(exact(f, x, **tp(4, P("tp"), P())))[-1] == BACK


@pytest.mark.parametrize("run", [jhost.jit, interpreted])
def test_sums_of_bfloat16_add_in_float32_piece_by_piece(run: Any) -> None:
    """1 and 2**-8 each: a bfloat16 sum would stay at 1."""
    parts = np.full((8, 16, 2), 2.0**-8, jnp.bfloat16)
    parts[0] = 1

    def f(x: jax.Array) -> jax.Array:
        return p2p(jax.lax.reduce_sum(x, (0,)), chunks=16)

    settings = tp(8, P("tp"), P())
    given = run(f, **settings)(jnp.array(parts))
    wanted = parts.astype(np.float32).sum(0).astype(jnp.bfloat16)
    assert (wanted > 1).all()
    np.testing.assert_array_equal(np.asarray(given), wanted)


def test_a_loop_that_receives_as_well() -> None:
    """An MLP block whose result every device needs."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return p2p(jnp.maximum(x @ up, 0) @ down)

    args = array(16, 8), array(8, 64, seed=1), array(64, 8, seed=2)
    done = the_loop(exact(f, *args, **tp(4, BLOCK, P())))
    both = "CollectivePermute, dot_general, max, dot_general, CollectivePermute"
    assert done[:4] == ["Set", "dot_general", "max", f"loop({both})"]
    assert done[-1] == BACK


def test_what_follows_on_whole_rows_stands_behind_the_loop() -> None:
    """A bias and a residual: no transfer could hide behind as little."""

    def f(x: jax.Array, w: jax.Array, b: jax.Array, y: jax.Array) -> jax.Array:
        return y + (p2p(x @ w) + b)

    args = array(16, 8), array(8, 2, seed=1), array(2, seed=2), array(16, 2, seed=3)
    program = exact(f, *args, **tp(4, (*PARTIAL, P(), P()), P()))
    assert the_loop(program)[-1] == BACK
    assert work(program.body)[-2:] == ["add", "add"]


def test_a_matmul_of_what_came_back_hides_it() -> None:
    """Then the loop that gathers has work of its own, as without pieces."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return p2p(x @ w) @ v

    args = array(16, 8), array(8, 4, seed=1), array(4, 64, seed=2)
    settings = tp(4, (*PARTIAL, P(None, "tp")), P(None, "tp"))
    *_, last = loops(exact(f, *args, **settings))
    assert work(last.body) == ["CollectivePermute", "dot_general"]


def test_two_sums_of_one_loop_go_back_together() -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = p2p(x)
        return x @ w, jnp.maximum(x, 0) @ v

    args = array(16, 8), array(8, 2, seed=1), array(8, 3, seed=2)
    program = exact(f, *args, **tp(4, (*PARTIAL, P("tp")), (P(), P())))
    assert the_loop(program)[-1] == "loop(CollectivePermute, CollectivePermute)"


def test_a_sum_that_is_also_needed_scattered() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = p2p(x @ w)
        return y, jhost.shard(y * 2, P("tp"))

    args = array(16, 8), array(8, 2, seed=1)
    exact(f, *args, **tp(4, PARTIAL, (P(), P("tp"))))


@pytest.mark.parametrize("axis", [0, 1])
def test_beside_data_parallelism(axis: int) -> None:
    """Along either dim; the rows of a batch stay where they are."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return p2p(x @ w, chunks=4, axis=axis)

    specs = (P("dp", "tp"), P("tp")), P("dp")
    settings = on({"dp": 2, "tp": 2}, *specs)
    program = exact(f, array(16, 8), array(8, 6, seed=1), **settings)
    assert the_loop(program)[-1] == BACK


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_any_number_of_streams(streams: int) -> None:
    args = array(24, 8), array(8, 2, seed=1)
    with on_streams(streams):
        exact(matmul, *args, **tp(4, PARTIAL, P()))


@st.composite
def settings_of(draw: st.DrawFn) -> dict[str, int]:
    """Sizes, pieces and streams, and which of the steps around the sum there are."""
    devices = draw(st.sampled_from([2, 4]))
    rows = draw(st.integers(2, 7))
    return {
        "devices": devices,
        "rows": rows * devices,
        "chunks": draw(st.integers(2, rows)) * devices,
        "streams": draw(st.integers(1, 5)),
        "gathered": draw(st.integers(0, 1)),
        "around": draw(st.integers(0, 7)),
    }


@settings(max_examples=budget.examples(6))  # each is compiled twice
@given(settings_of())
def test_any_sizes_and_neighbours(drawn: dict[str, int]) -> None:
    before, after, again = (drawn["around"] >> bit & 1 for bit in range(3))

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = jnp.maximum(x, 0) * 2 if before else x
        h = x @ v if drawn["gathered"] else x
        y = p2p(h @ w, drawn["chunks"])
        y = y + jnp.arange(y.shape[0])[:, None] if after else y
        return y - jnp.sum(y, axis=1, keepdims=True) if again else y

    devices, rows = drawn["devices"], drawn["rows"]
    inner = 4 * devices
    args = array(rows, inner), array(16 * inner, 3, seed=1), array(inner, 16 * inner)
    specs = P("tp"), P("tp"), P(None, "tp")
    if not drawn["gathered"]:
        args, specs = (
            (*args[:1], array(inner, 3, seed=1), args[2]),
            (*PARTIAL, specs[2]),
        )
    ints = [arg.astype(jnp.int32) for arg in args]
    with on_streams(drawn["streams"]):
        program = exact(f, *ints, **tp(devices, specs, P()))
    assert BACK in the_loop(program)


def large(**mark: Any) -> Program:
    """The second matmul of a 70B model's MLP, of 8192 tokens."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, 0, **mark)

    shapes = (8192, 28672), (28672, 8192)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return program_of(f, *args, **tp(4, PARTIAL, P()))


def test_pieces_are_predicted_to_hide_the_way_back() -> None:
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    plain, whole, pieces = (
        predict(large(**mark), rates).total
        for mark in (
            {"pipeline": "off"},
            {"pipeline": "p2p", "chunks": 4},
            {"pipeline": "p2p", "chunks": 8},
        )
    )
    assert plain / pieces > 1.18
    assert pieces < 0.95 * whole


def test_the_loop_is_counted_as_one() -> None:
    settings = tp(4, PARTIAL, P())
    args = array(16, 8), array(8, 2, seed=1)
    assert jhost.explain(jhost.jit(matmul, **settings), *args).loops == 1
    (loop,) = loops(program_of(matmul, *args, **settings))
    assert [s.extent for s in loop.body if isinstance(s, For)] == [3, 3]
