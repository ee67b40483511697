"""The dim rules in their less usual forms: modes, groups, accumulators, offsets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.rules.dim_rule import DimRule, FactorDim
from jhost.lowering.rules.table import rule_of
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import exact, on, tp
from tests.lowering.traced import work

CheckRule: TypeAlias = Callable[..., set[str]]


def _only_eqn(function: Callable[..., Any], *args: Any) -> JaxprEqn:
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return eqn


def _rule(function: Callable[..., Any], *args: Any) -> DimRule:
    return rule_of(_only_eqn(function, *args))


@dataclasses.dataclass(frozen=True)
class _Half:
    """The second half of every factor."""

    sizes: tuple[int, ...]
    start: Callable[[int], Any] = int
    accumulator: np.dtype | None = None
    zigzag: int = 1

    def size(self, factor: int) -> int:
        return self.sizes[factor] // 2

    def varies(self, factor: int) -> bool:
        return self.parts(factor) > 1

    def parts(self, factor: int) -> int:
        return -(-self.sizes[factor] // self.size(factor))

    def positions(self, factor: int) -> Any:
        half = self.sizes[factor] // 2
        return self.start(half) + jnp.arange(half, dtype=jnp.int32)

    def starts(self, factor: int) -> list[Any]:
        return [self.start(self.size(factor))]

    def grain(self, factor: int) -> int:
        return self.size(factor)


# --- Accumulators -------------------------------------------------------------- #


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (jnp.dot, [(4, 8), (8, 6)]),
        (lambda x: lax.reduce_sum(x, (1,)), [(4, 8)]),
        (lambda x, w: lax.conv(x, w, (1,), "VALID"), [(2, 4, 6), (4, 4, 3)]),
    ],
    ids=["dot_general", "reduce_sum", "conv_general_dilated"],
)
def test_a_sum_that_goes_on_has_the_dtype_of_its_accumulator(
    function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    args = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    eqn = _only_eqn(function, *args)
    rule = rule_of(eqn)
    assert "sum" in rule.reducers
    place = _Half(rule.sizes, accumulator=np.dtype(np.float32))
    assert [out.dtype for out in rule.rebind(eqn, args, place)] == [np.float32]
    place = _Half(rule.sizes)
    assert [out.dtype for out in rule.rebind(eqn, args, place)] == [jnp.bfloat16]


def test_the_precision_of_a_product_is_kept() -> None:
    x = np.ones((2, 2), np.float32)
    eqn = _only_eqn(lambda x: lax.dot(x, x, precision="highest"), x)
    rule = rule_of(eqn)
    place = _Half(rule.sizes)
    again = _only_eqn(lambda x: rule.rebind(eqn, [x, x], place), x)
    assert again.params == eqn.params


# --- Offsets and shardings ----------------------------------------------------- #


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32, np.complex64])
def test_iota_counts_on_from_a_traced_offset(dtype: Any) -> None:
    eqn = _only_eqn(lambda: lax.iota(dtype, 4200))
    rule = rule_of(eqn)

    @jax.jit
    def second_half(start: jax.Array) -> Any:
        return rule.rebind(eqn, [], _Half(rule.sizes, lambda _: start))

    (part,) = second_half(jnp.int32(2100))
    np.testing.assert_array_equal(part, np.arange(4200).astype(dtype)[2100:])


def test_the_sharding_of_the_whole_is_not_asked_of_a_part() -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spec = jax.sharding.PartitionSpec("x")
        eqn = _only_eqn(lambda: lax.broadcasted_iota(int, (4,), 0, out_sharding=spec))
        whole = _only_eqn(
            lambda x: lax.broadcast_in_dim(x, (4,), (), out_sharding=spec), 1
        )
    rule = rule_of(whole)
    assert whole.params["sharding"] is not None
    (part,) = rule.rebind(whole, [jnp.int32(1)], _Half(rule.sizes))
    assert part.shape == (2,)
    assert rule_of(eqn).sizes == (4,)


# --- Convolutions, and rows of experts ------------------------------------------ #


@pytest.mark.parametrize(
    ("channels", "filters", "groups"),
    [
        ((4, 4), (6, 4), {}),
        ((4, 4), (6, 2), {"feature_group_count": 2}),
        ((4, 4), (6, 4), {"batch_group_count": 2}),
    ],
    ids=["whole", "feature groups", "batch groups"],
)
def test_convolutions_in_groups(
    channels: tuple[int, int],
    filters: tuple[int, int],
    groups: dict[str, Any],
    check_rule: CheckRule,
) -> None:
    x = np.arange(64, dtype=np.float32).reshape(*channels, 4) % 7
    w = np.arange(filters[0] * filters[1], dtype=np.float32).reshape(*filters, 1)
    for padding in ("SAME", ((1, 0),)):
        check_rule(
            lambda x, w, padding=padding: lax.conv_general_dilated(
                x, w, (1,), padding, **groups
            ),
            x,
            w,
        )


@pytest.mark.parametrize("how", [("p2p", 4), ("collective", 2)])
@pytest.mark.parametrize("weights", [P(None, None, "tp"), P("tp", None, None)])
def test_a_stream_goes_through_the_rows_of_experts(
    how: tuple[str, int], weights: P
) -> None:
    """Whose features are sharded, or who are: each device has rows for its own."""

    def f(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jhost.stream(lax.ragged_dot(x, w, sizes) + 1, 0)

    x, w = integers(16, 6), integers(4, 6, 8, seed=1)
    sizes = jnp.array([7, 0, 6, 1], jnp.int32)
    pipeline, chunks = how
    outs = P(None, "tp") if weights[2] else P("tp", None)
    settings = tp(4, (P("tp"), weights, P()), outs, pipeline=pipeline, chunks=chunks)
    program = exact(f, jnp.array(x), jnp.array(w), sizes, **settings)
    (loop, *_) = [word for word in work(program.body) if word.startswith("loop")]
    assert "ragged_dot_general" in loop


# --- Shapes -------------------------------------------------------------------- #


def test_a_merge_follows_the_inner_dim_inside_of_the_outer_one() -> None:
    rule = _rule(lambda x: lax.reshape(x, (12,)), np.ones((3, 4)))
    assert rule.sizes == (3, 4)
    assert rule.operands == ((FactorDim(0), FactorDim(1)),)
    assert rule.results == ((FactorDim(0, 4, inside=FactorDim(1)),),)
    assert rule.inner == {1}


def test_a_split_follows_the_inner_dim_inside_of_the_outer_one() -> None:
    rule = _rule(lambda x: lax.reshape(x, (3, 4)), np.ones(12))
    assert rule.operands == ((FactorDim(0, 4, inside=FactorDim(1)),),)
    assert rule.results == ((FactorDim(0), FactorDim(1)),)


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ((4, 6), (8, 3), (4, 2, 3)),
        ((6, 5), (10, 3), (2,)),
        ((2, 3, 4, 5), (6, 20), (2, 3, 4, 5)),
        ((6, 1, 4), (2, 3, 2, 2), (2, 3, 2, 2)),
        ((4, 9), (6, 6), (2,)),
    ],
)
def test_a_reshape_has_the_steps_that_are_contiguous_in_both_shapes(
    before: tuple[int, ...],
    after: tuple[int, ...],
    steps: tuple[int, ...],
    check_rule: CheckRule,
) -> None:
    x = integers(*before)
    assert _rule(lambda x: lax.reshape(x, after), x).sizes == steps
    check_rule(lambda x: lax.reshape(x, after), x)
    # Of dims that it permutes first, it has the same.
    order = (*range(1, len(before)), 0)
    y = np.transpose(x, np.argsort(order))
    assert _rule(lambda y: lax.reshape(y, after, order), y).sizes == steps
    check_rule(lambda y: lax.reshape(y, after, order), y)


def test_a_reshape_of_nothing_has_no_factors() -> None:
    assert _rule(lambda x: lax.reshape(x, (0, 5)), np.ones((2, 0))).sizes == ()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_stride_means_the_same_in_each_part(rows: int, check_rule: CheckRule) -> None:
    """Of one row it skips none, and that row is padded as well as others."""

    def every_other(x: jax.Array) -> jax.Array:
        return lax.slice(x, (0, 1), (rows, 5), (2, 1)) + x[::-2, 2:]

    x = integers(rows, 6)
    check_rule(every_other, x)

    def sharded(x: jax.Array) -> jax.Array:
        made = every_other(jhost.shard(x, P("a")))
        return jhost.shard(made, P(("a", "b")))

    exact(sharded, x, **on({"a": 2, "b": 2}, (P(),), P()))


# --- Indices ------------------------------------------------------------------- #


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_lookups_mean_the_same_in_each_part(mode: str, check_rule: CheckRule) -> None:
    table = np.arange(15, dtype=np.int32).reshape(5, 3)
    index = np.array([[0, 4], [2, 1]], np.int32)
    if mode != "promise_in_bounds":
        index = index * 3 - 4
    check_rule(lambda x, i: x.at[i].get(mode=mode), table, index)
    check_rule(lambda x, i: x.at[:, i].get(mode=mode), table.T, index)
    batch = jax.vmap(lambda x, i: x.at[i].get(mode=mode))
    check_rule(lambda x, i: batch(x, i), table[:2], index)


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
def test_updates_mean_the_same_in_each_part(mode: str, check_rule: CheckRule) -> None:
    table = np.arange(15, dtype=np.int32).reshape(5, 3)
    index = np.array([[0, 2], [2, 1]], np.int32)
    if mode != "promise_in_bounds":
        index = index * 3 - 4
    new = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    check_rule(lambda x, i, u: x.at[i].add(u, mode=mode), table, index, new)
    batch = jax.vmap(lambda x, i, u: x.at[i].add(u, mode=mode))
    check_rule(lambda x, i, u: batch(x, i, u), table[:2], index, new[:, :, 0])


# --- Transforms ---------------------------------------------------------------- #


def test_a_transform_runs_before_a_collective_along_another_dim() -> None:
    """XLA:CPU refused the order of dims that it had chosen for the collective."""

    def function(xs: Any) -> Any:
        def step(total: Any, x: Any) -> tuple[Any, Any]:
            y = lax.cond(x.sum() > 0, lambda x: jnp.fft.fft(x).real, jnp.negative, x)
            return total + y.sum(), y

        return lax.scan(step, np.float32(0), xs)[1]

    x = integers(3, 4, 4, 8)
    given = jhost.jit(function, **tp(4, P(None, None, "tp"), P()))(x)
    np.testing.assert_allclose(given, jax.jit(function)(x), atol=1e-3)


def test_windows_of_one_that_skip_elements_keep_the_dim_whole(
    check_rule: CheckRule,
) -> None:
    """Element i of the result is not element i of the operand."""

    def every_other(x: jax.Array) -> Any:
        return lax.reduce_window(x, np.int32(0), lax.add, (1, 1), (1, 2), "VALID")

    check_rule(every_other, integers(4, 6).astype(np.int32))
