"""`jhost.ragged_dot`, and the kernels that it is on GPUs, run here as Pallas says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost import errors
from jhost._ragged.forms import Form, product
from jhost._ragged.kernels import multiply
from jhost._ragged.operands import can_multiply
from jhost._ragged.order import inverse_of, permuted
from tests import budget
from tests.lowering.hand_built import mesh_of

HOW: dict[str, Any] = {"precision": "default", "preferred_element_type": None}


def integers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    """Small ones, whose products and sums are exact in all dtypes."""
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    return jnp.array(values, dtype)


def dense(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    """Each row by a matrix of its own, which is 0 behind all groups."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(lhs.shape[0], dtype=ends.dtype)
    group = jnp.searchsorted(ends, row, side="right")
    own = rhs.at[group].get(mode="fill", fill_value=0)
    return jnp.einsum("mk,mkn->mn", lhs, own)


def slopes(dot: Callable[..., Any], sizes: Any) -> Callable[..., Any]:
    """The gradients of a loss that is not linear."""

    def loss(lhs: Any, rhs: Any) -> jax.Array:
        return jnp.sum(jnp.sin(dot(lhs, rhs, sizes)))

    return jax.grad(loss, (0, 1))


def of_slopes(dot: Callable[..., Any], sizes: Any) -> Callable[..., Any]:
    """The gradients of a function of these."""

    def loss(lhs: Any, rhs: Any) -> jax.Array:
        of_lhs, of_rhs = slopes(dot, sizes)(lhs, rhs)
        return jnp.sum(jnp.cos(of_lhs)) + jnp.sum(jnp.cos(of_rhs))

    return jax.grad(loss, (0, 1))


@st.composite
def groups(draw: st.DrawFn, most: int) -> tuple[int, int, int, np.ndarray]:
    """Rows, their elements, those of the result, and how many rows a group has."""
    m, k, n = (draw(st.integers(0, most)) for _ in range(3))
    count = st.integers(0, m) | st.just(0)
    sizes = draw(st.lists(count, min_size=1, max_size=5))
    return m, k, n, np.array(sizes, np.int32)


# --- What it is -------------------------------------------------------------------- #


@given(groups(most=9))
@settings(max_examples=budget.examples(6), deadline=None)
def test_any_groups(drawn: tuple[int, int, int, np.ndarray]) -> None:
    """Sizes may be of more rows than there are, or of none."""
    m, k, n, sizes = drawn

    def all_of(dot: Callable[..., Any]) -> Callable[..., Any]:
        def made(lhs: Any, rhs: Any) -> Any:
            derivatives = [f(dot, sizes)(lhs / 3, rhs / 3) for f in (slopes, of_slopes)]
            return dot(lhs, rhs, sizes), derivatives

        return jax.jit(made)

    with jax.enable_x64(True):
        args = (
            integers(m, k, dtype=np.float64),
            integers(len(sizes), k, n, seed=1, dtype=np.float64),
        )
        (made, gradients), (wanted, of_dense) = (
            all_of(dot)(*args) for dot in (jhost.ragged_dot, dense)
        )
    chex.assert_trees_all_equal(made, wanted)
    chex.assert_trees_all_close(gradients, of_dense, atol=1e-12)


@budget.first_is_quick(
    "mapped", [(0, 0, 0), (0, None, 0), (None, 1, None), (1, 0, None)]
)
def test_vmap(mapped: tuple[Any, ...]) -> None:
    """JAX has none with shared matrices."""
    sizes = np.array([[3, 0, 2], [1, 4, 1]], np.int32)
    args = integers(6, 6, 4), integers(3, 3, 4, 5, seed=1), sizes
    args = tuple(
        x if dim == 0 else x.swapaxes(0, 1) if dim == 1 else x[0]
        for x, dim in zip((args[0][:2], args[1][:2], args[2]), mapped, strict=True)
    )

    def both(dot: Callable[..., Any]) -> Callable[..., Any]:
        def made(lhs: Any, rhs: Any, sizes: Any) -> Any:
            return dot(lhs, rhs, sizes), slopes(dot, sizes)(lhs, rhs)

        return jax.jit(jax.vmap(made, mapped))

    chex.assert_trees_all_close(
        both(jhost.ragged_dot)(*args), both(dense)(*args), atol=1e-5
    )


@pytest.mark.slow
def test_tangents_and_a_hessian() -> None:
    sizes = np.array([2, 0, 3], np.int32)
    given = integers(6, 2) / 3, integers(3, 2, 2, seed=1) / 3
    moving = integers(6, 2, seed=2), integers(3, 2, 2, seed=3)
    for f in (jax.hessian, lambda f, _: lambda *x: jax.jvp(f, x, moving)):
        made, wanted = (
            jax.jit(f(lambda x, w, dot=dot: jnp.sin(dot(x, w, sizes)), (0, 1)))(*given)
            for dot in (jhost.ragged_dot, dense)
        )
        chex.assert_trees_all_close(made, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("of_lhs", "of_rhs", "wanted", "made"),
    [
        (np.float32, np.float32, None, np.float32),
        (jnp.bfloat16, jnp.bfloat16, None, jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16, np.float32, np.float32),
        (jnp.bfloat16, np.float32, None, np.float32),
        (np.float32, np.float16, jnp.bfloat16, jnp.bfloat16),
        (np.int8, np.int8, np.int32, np.int32),
    ],
)
def test_dtypes(of_lhs: Any, of_rhs: Any, wanted: Any, made: Any) -> None:
    """Gradients are of the dtypes of what they are by."""
    sizes = np.array([3, 2], np.int32)
    args = integers(6, 3, dtype=of_lhs), integers(2, 3, 4, dtype=of_rhs)

    def dot(lhs: Any, rhs: Any) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):
            return jhost.ragged_dot(lhs, rhs, sizes, preferred_element_type=wanted)

    assert dot(*args).dtype == made
    lhs, rhs = (x.astype(np.float32) for x in args)
    whole = dense(lhs, rhs, sizes)
    chex.assert_trees_all_equal(dot(*args).astype(np.float32), whole)
    if jnp.issubdtype(of_lhs, np.floating):
        gradients = jax.grad(lambda x, w: jnp.sum(dot(x, w)), (0, 1))(*args)
        assert [g.dtype for g in gradients] == [of_lhs, of_rhs]


def test_precision_is_that_of_the_caller() -> None:
    args = integers(4, 3), integers(2, 3, 2), np.array([1, 2], np.int32)

    def precision(**given: Any) -> Any:
        traced = jax.make_jaxpr(lambda *args: jhost.ragged_dot(*args, **given))(*args)
        (eqn,) = traced.jaxpr.eqns
        return eqn.params["precision"]

    assert precision() == "default"
    with jax.default_matmul_precision("highest"):
        assert precision() == "highest"
        assert precision(precision=lax.Precision.HIGH) == lax.Precision.HIGH
    assert precision(precision=["high", "highest"]) == ("high", "highest")


@budget.first_is_quick("check_vma", [True, False])
def test_in_a_shard_map(check_vma: bool) -> None:
    """The gradient of matrices that all devices have is summed where JAX knows it."""
    sizes = np.array([1, 0, 2], np.int32)
    lhs, rhs = integers(8, 3), integers(3, 3, 4, seed=1)
    mapped = jax.shard_map(
        lambda lhs, rhs: slopes(jhost.ragged_dot, sizes)(lhs, rhs),
        mesh=mesh_of(dp=2),
        in_specs=(P("dp"), P()),
        out_specs=(P("dp"), P() if check_vma else P("dp")),
        check_vma=check_vma,
    )
    parts = [slopes(dense, sizes)(part, rhs) for part in jnp.split(lhs, 2)]
    of_lhs, of_rhs = mapped(lhs, rhs)
    chex.assert_trees_all_close(
        of_lhs, jnp.concatenate([g for g, _ in parts]), atol=1e-5
    )
    summed = sum(g for _, g in parts)
    of_rhs = of_rhs if check_vma else of_rhs.reshape(2, *rhs.shape).sum(0)
    chex.assert_trees_all_close(of_rhs, summed, atol=1e-5)


def test_refusals_name_every_offender() -> None:
    with pytest.raises(errors.OperandsError) as caught:
        jhost.ragged_dot(integers(4), integers(2, 3, 4), np.array([1.0, 2.0]))
    assert "lhs has shape (4,), but needs the dims m, k" in str(caught.value)
    assert "group_sizes is float" in str(caught.value)
    with pytest.raises(errors.OperandsError) as caught:
        jhost.ragged_dot(integers(6, 4), integers(2, 3, 4), np.array([1, 2, 3]))
    assert "have 4 elements, but matrices of rhs take 3" in str(caught.value)
    assert "rhs has 2 groups, but group_sizes has 3" in str(caught.value)


# --- Rows in another order --------------------------------------------------------- #


@given(st.integers(0, 7), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=budget.examples(8), deadline=None)
def test_rows_in_any_order(count: int, features: int, random: Any) -> None:
    """As JAX's lookup, whose transpose adds: in every mode, and mapped."""
    places = [random.sample(range(count), count) for _ in range(2)]
    orders = jnp.array(np.array(places, np.int32).reshape(2, count))
    rows = integers(2, count, features) / 3

    def of(take: Callable[..., Any]) -> Any:
        def both(rows: Any, order: Any) -> Any:
            def loss(rows: Any) -> jax.Array:
                return jnp.sum(jnp.sin(take(rows, order)) * jnp.cos(rows))

            _, tangents = jax.jvp(jax.grad(loss), (rows,), (rows,))
            return take(rows, order), jax.grad(loss)(rows), tangents

        return jax.jit(jax.vmap(both))(rows, orders)

    ours = of(lambda rows, order: permuted(rows, order, inverse_of(order)))
    chex.assert_trees_all_close(ours, of(lambda rows, order: rows[order]), atol=1e-6)


def test_cotangents_are_looked_up_as_well() -> None:
    order = jnp.array([2, 0, 1])

    def backward(ct: jax.Array) -> Any:
        inverse = inverse_of(order)
        return jax.vjp(lambda rows: permuted(rows, order, inverse), ct)[1](ct)

    assert "scatter-add" not in str(jax.make_jaxpr(backward)(integers(3, 2)))


# --- Its kernels ------------------------------------------------------------------- #


def operands(form: Form, m: int, k: int, n: int, g: int, dtype: Any) -> list[jax.Array]:
    shapes = {
        "rows": [(m, k), (g, k, n)],
        "rows_transposed": [(m, n), (g, k, n)],
        "groups": [(m, k), (m, n)],
    }
    return [integers(*x, seed=i, dtype=dtype) for i, x in enumerate(shapes[form])]


@given(groups(most=300), st.sampled_from(get_args(Form)), *[st.booleans()] * 2)
@settings(max_examples=budget.examples(12), deadline=None)
def test_kernels_give_what_jax_does(
    drawn: tuple[int, int, int, np.ndarray], form: Form, wide: bool, x64: bool
) -> None:
    """Parts of tiles, groups that end within one, and rows behind all groups."""
    m, k, n, sizes = drawn
    dtype = np.float32 if wide else jnp.bfloat16
    lhs, rhs = operands(form, m, k, n, len(sizes), dtype)
    how: dict[str, Any] = HOW | {"form": form, "preferred_element_type": np.float32}
    counts = jnp.array(sizes)
    if not can_multiply(lhs, rhs, counts, **how):
        assert 0 in (*lhs.shape, *rhs.shape)
        return
    wanted = product(lhs, rhs, counts, **how)
    with jax.enable_x64(x64):
        made = multiply(lhs, rhs, counts, **how, interpret=True)
    chex.assert_trees_all_equal(made, wanted)


def test_kernels_take_dims_in_front() -> None:
    lhs, rhs = integers(2, 3, 9, 4), integers(2, 3, 2, 4, 5, seed=1)
    sizes = jnp.array(np.arange(12).reshape(2, 3, 2) % 5)
    how: dict[str, Any] = HOW | {"form": "rows"}
    (made,) = multiply(lhs, rhs, sizes, **how, interpret=True)
    chex.assert_trees_all_equal([made], product(lhs, rhs, sizes, **how))


def test_what_is_behind_all_groups_is_not_read() -> None:
    lhs, rhs = operands("groups", 9, 4, 5, 2, np.float32)
    lhs, rhs = lhs.at[6:].set(np.nan), rhs.at[6:].set(np.nan)
    how: dict[str, Any] = HOW | {"form": "groups"}
    sizes = jnp.array([4, 2])
    (made,) = multiply(lhs, rhs, sizes, **how, interpret=True)
    chex.assert_trees_all_equal([made], product(lhs[:6], rhs[:6], sizes, **how))


@pytest.mark.parametrize(
    ("dtype", "how", "can"),
    [
        (jnp.bfloat16, {}, True),
        (jnp.float16, {"precision": "high"}, True),
        (jnp.bfloat16, {"preferred_element_type": np.float32}, True),
        (np.float32, {}, True),
        (np.float32, {"precision": (lax.Precision.HIGHEST,) * 2}, True),
        (np.float32, {"precision": "high"}, False),
        (np.float32, {"preferred_element_type": np.float64}, False),
        (np.int8, {}, False),
    ],
)
def test_which_kernels_there_are(dtype: Any, how: dict[str, Any], can: bool) -> None:
    lhs, rhs = operands("rows", 4, 3, 2, 2, dtype)
    assert can_multiply(lhs, rhs, jnp.array([1, 2]), form="rows", **HOW | how) == can
