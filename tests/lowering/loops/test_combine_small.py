"""Small transfers of one kind are one, as far as nothing is read in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost import choose_forms
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.statements import Communicate
from jhost.lowering.loops import combine_small
from jhost.testing import mesh_of
from tests import apart, budget

TP: Mapping[str, int] = {"tp": 2}

pytestmark = pytest.mark.usefixtures("combined_as_on_gpus")


def whole_numbers(*shape: int, dtype: Any = np.float32) -> Any:
    """Small ones, so that sums in any order are exact."""
    rng = np.random.default_rng(len(shape))
    return rng.integers(-3, 4, shape).astype(dtype)


def check(
    fun: Callable[..., Any],
    args: Sequence[Any],
    ins: Any,
    outs: Any = None,
    axes: Mapping[str, int] = TP,
) -> list[str]:
    """The kinds of what `fun` communicates; results are the plain function's."""
    f = jhost.jit(fun, mesh=mesh_of(dict(axes)), in_shardings=ins, out_shardings=outs)
    wanted = jax.jit(fun)(*args)
    chex.assert_trees_all_equal(f(*args), wanted)
    lowered = f.lower(*args)
    chex.assert_trees_all_equal(lowered.interpret(*args)[0], wanted)
    stmts = statements(lowered.host_ir)
    return [stmt.kind for stmt in stmts if isinstance(stmt, Communicate)]


def test_the_norm_of_many_values_takes_one_all_reduce() -> None:
    """One a value before, nine of 4 bytes in a step of a Llama."""

    def clipped(*grads: jax.Array) -> list[jax.Array]:
        norm = sum(jnp.sum(g * g) for g in grads)
        return [jnp.where(norm > 1, g, -g) for g in grads]

    grads = [whole_numbers(4, 4) for _ in range(5)]
    assert check(clipped, grads, P("tp"), P("tp")) == ["AllReduce"]


def looked_at(count: int) -> int:
    """How often a walk asks what a node waits for, with so many sums and readers."""

    def f(*xs: jax.Array) -> list[jax.Array]:
        return [jnp.cos(jnp.sum(x)) for x in xs]

    args = [whole_numbers(8) for _ in range(count)]
    walk = combine_small._CombiningWalk  # pyright: ignore[reportPrivateUsage]
    asked = mock.Mock(side_effect=walk.needed)
    with mock.patch.object(walk, "needed", lambda *args: asked(*args)):
        jhost.jit(f, mesh=mesh_of(dict(TP)), in_shardings=P("tp")).lower(*args)
    return asked.call_count


def test_a_walk_over_twice_as_many_sums_takes_twice_as_many_steps() -> None:
    assert 0 < looked_at(16) <= 2 * looked_at(8)


def test_sums_that_wait_for_small_ones_join_nothing_that_these_are_made_of() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jnp.sum(x * jnp.sum(x)) + jnp.sum(x)

    assert check(f, [whole_numbers(8)], P("tp")) == ["AllReduce"] * 2


def test_what_is_made_of_a_small_sum_waits_with_it() -> None:
    """A cheap reader stands between the two; it goes behind the one transfer."""

    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean = jnp.sum(x) / 4
        return jnp.cos(mean) > 2, jnp.sum(w, 0)

    args = whole_numbers(8), whole_numbers(8, 3)
    assert check(f, args, (P("tp"), P("tp"))) == ["AllReduce"]


def test_a_large_reader_in_between_keeps_them_apart() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = w * jnp.sum(x)
        return y, jnp.sum(x * x)

    args = whole_numbers(8), whole_numbers(256, 128)
    kinds = check(f, args, (P("tp"), P()), (P(), P()))
    assert kinds == ["AllReduce"] * 2


def test_large_ones_stay_apart() -> None:
    def f(*values: jax.Array) -> list[jax.Array]:
        return [jnp.sum(x, 0) for x in values]

    args = [whole_numbers(2, 256, 128)] * 2
    assert check(f, args, P("tp")) == ["AllReduce"] * 2


def test_reducers_and_dtypes_stay_apart() -> None:
    def f(x: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.sum(x), jnp.max(x), jnp.sum(n), jnp.max(n + 1), jnp.max(n)

    args = whole_numbers(8), whole_numbers(8, dtype=np.int32)
    assert check(f, args, P("tp")) == ["AllReduce"] * 4


def test_gathers_of_several_dims_and_shapes_are_one() -> None:
    def f(*values: jax.Array) -> list[jax.Array]:
        return [jnp.sort(x.ravel()) for x in values]

    args = whole_numbers(4), whole_numbers(3, 4), whole_numbers(2, 4, 3)
    ins = P("tp"), P(None, "tp"), P(None, "tp")
    assert check(f, args, ins, P()) == ["AllGather"]


def test_scatters_of_several_dims_and_shapes_are_one() -> None:
    def f(*values: jax.Array) -> list[jax.Array]:
        return [jnp.sum(x, 0) for x in values]

    args = whole_numbers(2, 4), whole_numbers(4, 3, 4), whole_numbers(2, 2, 4, 3)
    outs = [P("tp"), P(None, "tp"), P(None, "tp")]
    assert check(f, args, P("tp"), outs) == ["ReduceScatter"]


def test_values_that_lie_over_other_axes_are_one() -> None:
    def f(x: jax.Array, y: jax.Array, z: jax.Array) -> list[jax.Array]:
        return [jnp.sum(x, 1), jnp.sum(y, 1), jnp.sum(z)]

    args = whole_numbers(4, 4), whole_numbers(6, 2), whole_numbers(2)
    ins, outs = (P("dp", "tp"), P(None, "tp"), P("tp")), [P("dp"), P(), P()]
    axes = {"dp": 2, "tp": 2}
    assert check(f, args, ins, outs, axes) == ["AllReduce"]


def test_sums_over_two_axes_are_one_in_whatever_order() -> None:
    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(x * x) + jnp.sum(y)

    args, axes = [whole_numbers(4, 4)] * 2, {"dp": 2, "tp": 2}
    assert check(f, args, (P("dp", "tp"), P("tp", "dp")), None, axes) == ["AllReduce"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.int8, np.complex64, np.uint32])
def test_sums_are_those_of_their_dtype(dtype: Any) -> None:
    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x, 0, dtype=x.dtype), jnp.sum(y, dtype=y.dtype)

    args = whole_numbers(4, 3, dtype=dtype), whole_numbers(6, dtype=dtype)
    check(f, args, P("tp"))


def test_zeros_keep_their_signs_and_nan_stays() -> None:
    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(x, 0), jnp.sum(y)

    x, y = np.array([[-0.0, np.nan, 1], [-0.0, 1, -1]]), np.array([-0.0, -0.0])
    f_: Any = jhost.jit(f, mesh=mesh_of(TP), in_shardings=P("tp"))
    for got, wanted in zip(f_(x, y), jax.jit(f)(x, y), strict=True):
        np.testing.assert_array_equal(np.signbit(got), np.signbit(wanted))
        np.testing.assert_array_equal(got, wanted)


def test_empty_values_and_booleans_go_as_they_are() -> None:
    def f(x: jax.Array, y: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        return jnp.sum(x, 0), jnp.sum(y, 0), jnp.any(b), jnp.any(~b)

    args = whole_numbers(2, 0), whole_numbers(2, 0), np.array([True, False])
    check(f, args, P("tp"))


def test_a_loop_keeps_what_its_stream_moves() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jhost.stream(x @ w, axis=0, pipeline="collective", chunks=2)
        return y, jhost.shard(y * 2, P())

    args = whole_numbers(4, 4), whole_numbers(4, 4)
    check(f, args, (P(None, "tp"), P("tp")), (P(), P()))


def test_in_the_body_of_a_scan_and_behind_a_derivative() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        def body(c: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            c = jnp.where(jnp.sum(w) > jnp.sum(w * w), c, c + 1)
            return c, jnp.sum(w, 0)

        return jax.lax.scan(body, x, w)

    args = whole_numbers(3), whole_numbers(3, 4, 3)
    ins = P(), P(None, "tp")
    assert check(f, args, ins).count("AllReduce") <= 2

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(f(x, w)[1] * 2) + jnp.sum(jnp.tanh(x))

    check(jax.grad(loss, 1), args, ins)


@settings(max_examples=budget.examples(10), deadline=None)  # each is compiled
@given(st.data())
def test_any_of_them_together_are_what_they_are_alone(data: Any) -> None:
    """Kinds, dims and dependencies at random, exact on whole numbers."""
    count = data.draw(st.integers(2, 5))
    shapes = [
        tuple(data.draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=3)))
        for _ in range(count)
    ]
    dims = [data.draw(st.integers(0, len(shape) - 1)) for shape in shapes]
    ways = [data.draw(st.sampled_from(["sum", "gather", "max"])) for _ in shapes]
    after = [data.draw(st.booleans()) for _ in shapes]

    def f(*values: jax.Array) -> list[jax.Array]:
        made: list[jax.Array] = []
        for x, dim, way, follows in zip(values, dims, ways, after, strict=True):
            if follows and made:
                x = x + jnp.sum(made[-1] > 0).astype(x.dtype)
            reduced = {"sum": jnp.sum, "max": jnp.max}.get(way)
            made.append(reduced(x, dim) if reduced else jnp.sort(x, dim))
        return made

    args = [whole_numbers(*shape) for shape in shapes]
    ins = tuple(P(*(None,) * dim, "tp") for dim in dims)
    check(f, args, ins, P())


def test_between_processes_large_ones_are_put_in_order_beside_them() -> None:
    """Small ones stand where they are read; a scan is a cycle for the others' sake."""

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        gain, offset, up, down = weights
        hidden = jnp.clip(x @ up, -1, 1) * gain + offset
        return jhost.shard(x + jnp.clip(hidden, -1, 1) @ down, P("dp")), None

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(layer, x, weights)[0] ** 2)

    shapes = (4, 16), (4, 16), (4, 16, 16), (4, 16, 16)
    weights = tuple(whole_numbers(*shape) for shape in shapes)
    specs = P(None, "dp"), P(None, "dp"), P(None, None, "dp"), P(None, None, "dp")
    with (
        apart.in_processes(),
        mock.patch.object(choose_forms, "SHORT_TRANSFER", 129),
        mock.patch.object(combine_small, "SMALL", 128),
    ):
        f = jhost.jit(
            jax.grad(loss),
            mesh=mesh_of({"dp": 4}),
            in_shardings=(specs, P("dp")),
            out_shardings=specs,
        )
        lowered = f.lower(weights, x := whole_numbers(16, 16))
        result = f(weights, x)
    wanted = jax.jit(jax.grad(loss))(weights, x)
    chex.assert_trees_all_equal(result, wanted)
    chex.assert_trees_all_equal(lowered.interpret(weights, x)[0], wanted)
    text = lowered.explain().text
    assert "XLA partitions" not in text
    for said in ("2 small transfers over dp are one", "an iteration early", "beside"):
        assert said in text


def test_on_cpus_they_stay_apart_and_xla_joins_the_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of one vector are kernels of their own, even where layers are alike."""
    monkeypatch.undo()

    def layers(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x * x)

    f = jhost.jit(
        jax.grad(layers, argnums=1),
        mesh=mesh_of(TP),
        in_shardings=(P("tp"), P("tp")),
        out_shardings=P(),
    )
    args = whole_numbers(8, 8), [whole_numbers(8, 8)] * 3
    lowered = f.lower(*args)
    assert " concatenate" not in lowered.as_text()
    assert str(lowered.compile().as_text()).count(" all-reduce(") == 1
