"""Products with groups of rows, of which a part has some of the rows, or the groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.rules.dim_rule import DimRule
from jhost.lowering.rules.table import rule_of
from tests import budget
from tests.lowering.on_mesh import calls, communications, exact, on, program_of, tp
from tests.lowering.traced import work

CheckRule: TypeAlias = Callable[..., set[str]]
Dot: TypeAlias = Callable[..., jax.Array]
Numbers = lax.RaggedDotDimensionNumbers

of_both = pytest.mark.parametrize(
    "dot", [lax.ragged_dot, jhost.ragged_dot], ids=["JAX's", "jhost's"]
)
"""JAX's products run as jhost's do, whose derivatives and batches are their own."""


def _floats(*shape: int, seed: int = 0) -> np.ndarray:
    """Small integers, whose products and sums are exact."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def _product(numbers: Any) -> Callable[..., Any]:
    product = partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    return lambda *args: product(*args)


def _rule(function: Callable[..., Any], *args: Any) -> DimRule:
    (eqn,) = jax.make_jaxpr(function)(*args).jaxpr.eqns
    return rule_of(eqn)


# --- Parts ------------------------------------------------------------------------- #


@pytest.mark.parametrize("ragged", [0, 1, 2])
@pytest.mark.parametrize("differ", [False, True], ids=["alike", "of each batch"])
def test_parts_of_rows_and_of_groups(
    ragged: int, differ: bool, check_rule: CheckRule
) -> None:
    """Rows that are free, contracted or a batch; sizes may differ in each of a batch"""
    numbers = Numbers(
        (((1,), (1,)), ((2,), (2,))), [ragged], [0] if ragged == 0 else []
    )
    lhs = _floats(4, 5, 3)
    rhs = _floats(2, 5, 3, 6) if ragged == 0 else _floats(4, 5, 3, seed=1)
    sizes = np.array([1, lhs.shape[ragged] - 1], np.int32)
    if differ and ragged != 2:  # nothing stands before the batch that is ragged
        sizes = np.stack([sizes, sizes[::-1], [2, 1]]).astype(np.int32)
    check_rule(_product(numbers), lhs, rhs, sizes)
    rule = _rule(_product(numbers), lhs, rhs, sizes)
    assert all(dim is not None for dims in rule.operands[:2] for dim in dims)
    assert len(rule.picked) == (ragged != 2), "a batch has a product anyway"
    assert rule.picked <= rule.unstreamed
    assert rule.contracts


def test_a_result_for_each_group_follows_the_groups() -> None:
    numbers = Numbers((((0,), (0,)), ((), ())), [0], [])
    rule = _rule(_product(numbers), _floats(6, 3), _floats(6, 4), np.array([4, 1, 1]))
    (groups,) = rule.picked
    (first, *_) = rule.results[0]
    assert first is not None
    assert first.factor == groups
    assert rule.reducers[groups] is None


@pytest.mark.parametrize(
    "sizes",
    [
        [2, 0, 3, 1],
        pytest.param([0, 0, 0, 0], marks=pytest.mark.slow),
        [0, 0, 0, 8],
        [5, 2, 7, 1],  # more than there are
    ],
)
def test_rows_are_in_the_part_that_has_their_group(
    sizes: list[int], check_rule: CheckRule
) -> None:
    rows, experts, counts = _floats(8, 3), _floats(4, 3, 3), np.array(sizes, np.int32)
    check_rule(lax.ragged_dot, rows, experts, counts)
    check_rule(lax.ragged_dot, rows.astype(np.int32), experts.astype(np.int32), counts)
    gradient = _product(Numbers((((0,), (0,)), ((), ())), [0], []))
    check_rule(gradient, rows, _floats(8, 4), counts)


@st.composite
def _products(draw: st.DrawFn) -> tuple[Any, ...]:
    """lhs, rhs, sizes, and numbers whose dims are in any order."""
    size = st.integers(1, 4)
    rows, groups, k, n, b = draw(st.integers(0, 9)), *(draw(size) for _ in range(4))
    mode = draw(st.sampled_from(["free", "contracted"]))
    before = draw(st.booleans())  # a dim of the same kind in front of the rows
    letters = {"b": b, "k": k, "n": n, "r": rows, "e": groups, "f": 2}
    lhs = "brk" if mode == "free" else "br"
    lhs = lhs + ("f" if before else "") + ("" if mode == "free" else "k")
    lhs = "".join(draw(st.permutations(lhs)))
    rhs = "bekn" if mode == "free" else "brn" + ("f" if before else "")
    rhs = "".join(draw(st.permutations(rhs)))
    contracted = "k" if mode == "free" else draw(st.permutations("r" + "f" * before))
    numbers = Numbers(
        (
            ([lhs.index(c) for c in contracted], [rhs.index(c) for c in contracted]),
            ([lhs.index("b")], [rhs.index("b")]),
        ),
        [lhs.index("r")],
        [rhs.index("e")] if mode == "free" else [],
    )
    free = [c for c in lhs if c not in (*contracted, "b")]
    kind = free if mode == "free" else list(contracted)
    ahead = "b" + "".join(kind[: kind.index("r")])
    shape = [letters[c] for c in ahead] if draw(st.booleans()) else []
    count = st.integers(0, rows)
    total = int(np.prod(shape, dtype=int)) * groups
    sizes = np.array(draw(st.lists(count, min_size=total, max_size=total)), np.int32)
    values = (
        _floats(*(letters[c] for c in letters_of), seed=seed)
        for seed, letters_of in enumerate((lhs, rhs))
    )
    return *values, sizes.reshape(*shape, groups), numbers


@given(_products())
@settings(max_examples=budget.examples(6), deadline=None)
def test_any_product_in_parts(check_rule: CheckRule, product: tuple[Any, ...]) -> None:
    *args, numbers = product
    check_rule(_product(numbers), *args)


# --- What moves --------------------------------------------------------------------- #

EXPERTS = P("tp", None, None)


def _experts(rows: int, k: int, n: int, groups: int = 8) -> tuple[Any, ...]:
    sizes = np.random.default_rng(0).multinomial(rows, [1 / groups] * groups)
    return _floats(rows, k), _floats(groups, k, n, seed=1), sizes.astype(np.int32)


def test_tokens_go_to_weights_that_stay() -> None:
    args = _experts(16, 8, 8)
    program = exact(
        lax.ragged_dot, *args, **tp(4, (P("tp"), EXPERTS, P()), P("tp", None))
    )
    assert communications(program) == ["AllGather tp 0", "ReduceScatter tp 0 sum"]
    assert calls(program, "ragged_dot") == {"ragged_dot 16x8 2x8x8 2": 1}, (
        "two of the eight experts, and no group besides"
    )


def test_weights_of_fewer_bytes_than_tokens_go_to_them() -> None:
    args = _experts(512, 8, 8, groups=4)
    program = exact(
        lax.ragged_dot, *args, **tp(4, (P("tp"), EXPERTS, P()), P("tp", None))
    )
    assert communications(program) == ["AllGather tp 0"]
    assert calls(program, "ragged_dot") == {"ragged_dot 128x8 4x8x8 4": 1}


def _gradients(x: Any, w: Any, sizes: Any, ct: Any, dot: Dot = lax.ragged_dot) -> Any:
    return jax.vjp(lambda x, w: dot(x, w, sizes), x, w)[1](ct)


@pytest.mark.usefixtures("uncombined")
def test_gradients_of_weights_lie_where_these_do() -> None:
    """No weight and no gradient of one moves: rows come, and those of x go."""
    x, w, sizes = _experts(16, 8, 8)
    ins = P("tp"), EXPERTS, P(), P("tp")
    program = exact(
        _gradients,
        x,
        w,
        sizes,
        _floats(16, 8, seed=2),
        **tp(4, ins, (P("tp"), EXPERTS)),
    )
    assert sorted(communications(program)) == [
        "AllGather tp 0",
        "AllGather tp 0",
        "ReduceScatter tp 0 sum",
    ]
    assert set(calls(program, "ragged_dot")) == {
        "ragged_dot 16x8 2x8x8 2",
        "ragged_dot 16x8 16x8 2",
    }


def test_a_step_moves_no_weight_of_an_expert() -> None:
    def step(x: Any, w: Any, sizes: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

        return w - jax.grad(loss)(w)

    x, w, sizes = _experts(16, 8, 32)
    program = exact(step, x, w, sizes, **tp(4, (P("tp"), EXPERTS, P()), EXPERTS))
    assert communications(program) == ["AllGather tp 0", "AllReduce tp sum"]
    assert set(calls(program, "ragged_dot")) == {
        "ragged_dot 16x8 2x8x32 2",
        "ragged_dot 16x8 16x32 2",
    }


def test_groups_that_do_not_divide_are_padded() -> None:
    """Six experts are two on each of four devices, and the last has none."""

    def product(x: Any, w: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, jhost.shard(w, EXPERTS), sizes)

    def gradient(x: Any, w: Any, sizes: Any) -> Any:
        return jax.vjp(lambda w: product(x, w, sizes), w)[1](x)

    args = _experts(16, 8, 8, groups=6)
    program = exact(product, *args, **tp(4, (P("tp"), P(), P()), P("tp", None)))
    assert communications(program) == ["AllGather tp 0", "ReduceScatter tp 0 sum"]
    program = exact(gradient, *args, **tp(4, (P("tp"), P(), P()), P()))
    assert "ragged_dot 16x8 16x8 2" in calls(program, "ragged_dot")


@pytest.mark.parametrize("sizes", [[0] * 8, [16, *[0] * 7], [*[0] * 7, 16], [3] * 8])
@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 8])
@of_both
def test_any_spread_of_rows_over_experts(
    dot: Dot, devices: int, sizes: list[int]
) -> None:
    x, w, _ = _experts(16, 8, 8)
    counts = np.array(sizes, np.int32)
    ins = P("tp"), EXPERTS, P(), P("tp")
    gradients, settings = partial(_gradients, dot=dot), tp(devices, ins, ins[:2])
    exact(gradients, x, w, counts, _floats(16, 8), **settings)


def test_experts_over_two_axes() -> None:
    args = _experts(16, 8, 8)
    settings = on({"dp": 2, "tp": 2}, (P(), P(("dp", "tp")), P()), P())
    program = exact(lax.ragged_dot, *args, **settings)
    assert communications(program) == ["AllReduce dp,tp sum"]


# --- Derivatives, batches, types ---------------------------------------------------- #


def _close(f: Callable[..., Any], *args: Any, **settings: Any) -> None:
    chex.assert_trees_all_close(
        jhost.jit(f, **settings)(*args), jax.jit(f)(*args), rtol=1e-5, atol=1e-5
    )


@of_both
def test_forward_mode_and_forward_over_reverse(dot: Dot) -> None:
    x, w, sizes = _experts(16, 8, 8)

    def tangents(x: Any, w: Any, dx: Any, dw: Any) -> Any:
        return jax.jvp(lambda x, w: dot(x, w, sizes), (x, w), (dx, dw))

    ins = P("tp"), EXPERTS
    _close(tangents, x, w, x[::-1], w[::-1], **tp(4, (*ins, *ins), None))

    def second(x: Any, w: Any, dx: Any, dw: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return jnp.sum(jnp.sin(dot(x / 8, w, sizes)))

        return jax.jvp(jax.grad(loss, (0, 1)), (x, w), (dx, dw))

    _close(second, x, w, x[::-1], w[::-1], **tp(4, (*ins, *ins), None))


def test_reverse_over_reverse() -> None:
    """Also of the gradient by weights, of which JAX has none."""
    x, w, sizes = _experts(16, 8, 8)

    def second(x: Any, w: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return jnp.sum(jnp.sin(jhost.ragged_dot(x / 8, w, sizes)))

        def slopes(x: Any, w: Any) -> Any:
            return sum(jnp.sum(jnp.cos(g)) for g in jax.grad(loss, (0, 1))(x, w))

        return jax.grad(slopes, (0, 1))(x, w)

    _close(second, x, w, **tp(4, (P("tp"), EXPERTS), (P("tp"), EXPERTS)))


@of_both
def test_a_batch_of_products_each_with_its_groups(dot: Dot) -> None:
    product, gradients = jax.vmap(dot), jax.vmap(partial(_gradients, dot=dot))
    x, w = _floats(4, 16, 8), _floats(4, 8, 8, 8, seed=1)
    sizes = np.random.default_rng(0).multinomial(16, [1 / 8] * 8, 4).astype(np.int32)
    weights = P(None, "tp")
    program = exact(product, x, w, sizes, **tp(4, (P(), weights, P()), P()))
    assert communications(program) == ["AllReduce tp sum"]
    ct = _floats(4, 16, 8, seed=2)
    ins = P(), weights, P(), P()
    exact(gradients, x, w, sizes, ct, **tp(4, ins, (P(), weights)))
    ins = P("tp"), P("tp"), P("tp"), P("tp")
    program = exact(gradients, x, w, sizes, ct, **tp(4, ins, (P("tp"), P("tp"))))
    assert communications(program) == []


@pytest.mark.parametrize("result", [None, jnp.float32])
def test_narrow_floats_are_summed_in_wide_ones(result: Any) -> None:
    x, w, sizes = _experts(16, 32, 8)

    def f(x: Any, w: Any) -> Any:
        return lax.ragged_dot(x, w, sizes, preferred_element_type=result)

    x, w = (jnp.array(a).astype(jnp.bfloat16) for a in (x / 7, w / 3))
    # A row's sum is of one device: nothing is rounded again.
    exact(f, x, w, **tp(4, (P("tp"), EXPERTS), P("tp", None)))


def test_infinite_weights_are_as_in_the_whole() -> None:
    x, w, sizes = _experts(16, 8, 8)
    w[3, 2, 1] = np.inf
    exact(lax.ragged_dot, x, w, sizes, **tp(4, (P("tp"), EXPERTS, P()), P("tp", None)))


def test_no_stream_goes_through_groups() -> None:
    """Each chunk of them would take as long as all."""

    def f(x: jax.Array, ct: jax.Array, sizes: jax.Array) -> jax.Array:
        product = _product(Numbers((((0,), (0,)), ((), ())), [0], []))
        return jhost.stream(product(x, ct, sizes) * 2, 0)

    sizes = jnp.array([7, 0, 6, 1], jnp.int32)
    settings = tp(4, (P("tp"), P("tp"), P()), P(), chunks=2, pipeline="collective")
    program = program_of(f, _floats(16, 6), _floats(16, 8), sizes, **settings)
    assert work(program.body) == ["ragged_dot_general", "loop(AllReduce, mul)"]
