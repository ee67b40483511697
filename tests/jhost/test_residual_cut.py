"""What the forward hands to the backward: the fewest bytes that can be made to do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jhost
from jhost._jax import Residual, Split, evaluate
from jhost.lowering.schedule.recompute.programs import hand_over_least
from tests import budget
from tests.jhost.derived import backward, programs
from tests.lowering.on_mesh import on
from tests.lowering.traced import array

Array = jax.Array
X, W = (16, 8), (8, 32)
SPECS = (P("tp"), P(None, "tp")), P(None, "tp")


def on_four(fun: Callable[..., Any], **more: Any) -> Any:
    return jhost.jit(fun, **on({"tp": 4}, *SPECS, pipeline="off", **more))


def handed_over(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    """The types of what the forward makes for the backward alone."""
    args = [array(*shape, seed=n) for n, shape in enumerate(shapes)]
    forward, _ = backward(on_four(fun), *args)
    return [f"{r.dtype}{list(r.shape)}" for r in forward.results[1:]]


@pytest.mark.parametrize(
    "activation",
    [jax.nn.gelu, jax.nn.silu, jnp.tanh, lambda z: z**3 + jnp.sin(z)],
    ids=["gelu", "silu", "tanh", "a formula"],
)
def test_one_array_stands_for_all_that_an_activation_needs(activation: Any) -> None:
    def f(x: Array, w: Array) -> Array:
        return activation(x @ w) * 2

    assert handed_over(f, X, W) == ["float32[16, 8]"]


def test_what_is_computed_from_arguments_alone_is_not_handed_over() -> None:
    def f(x: Array, w: Array) -> Array:
        return jnp.sin(x) @ jnp.exp(w)

    assert handed_over(f, X, W) == []


def test_a_mask_is_handed_over_before_what_it_was_made_of() -> None:
    def f(x: Array, w: Array) -> Array:
        return jax.nn.relu(x @ w) * 2

    assert handed_over(f, X, W) == ["bool[16, 8]"]


def test_a_smaller_value_is_handed_over_before_a_larger_one() -> None:
    """The statistics of a norm, not the rows that it has normed."""

    def f(x: Array, w: Array) -> Array:
        return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1)) @ w

    assert handed_over(f, X, W) == ["float32[4, 1]"]


def test_matmuls_and_sums_are_not_repeated() -> None:
    def f(x: Array, w: Array) -> Array:
        return jax.nn.softmax(x @ w, axis=0) ** 2

    assert sorted(handed_over(f, X, W)) == ["float32[1, 8]", "float32[16, 8]"]
    _, back = backward(on_four(f), array(*X), array(*W))
    assert str(back).count("dot_general") == 2  # of the two cotangents
    assert "reduce_max" not in str(back)


def test_a_policy_says_itself_what_is_saved() -> None:
    """The sine, though its derivative would be as well off with what it is of."""

    def f(x: Array, w: Array) -> Array:
        y = checkpoint_name(jnp.sin(x @ w), "saved")
        return jnp.sin(y) * y

    policy = jax.checkpoint_policies.save_only_these_names("saved")
    loss = jax.checkpoint(lambda *xs: jnp.sum(on_four(f)(*xs)), policy=policy)
    forward, *_ = programs(jax.grad(loss, (0, 1)), array(*X), array(*W, seed=1))
    saved = {result.name for result in forward.results if result.shape == (16, 8)}
    assert len(saved) == 2  # and the result
    assert str(forward).count("sin(") == 2


# --- Scans -------------------------------------------------------------------------- #

LAYERS = 3
STACKED = (LAYERS, 8, 32), (LAYERS, 8, 32), (LAYERS, 32, 8)
ROWS, STACKS = P("tp"), (P(None, None, "tp"), P(None, None, "tp"), P(None, "tp"))


def swiglu(x: Array, weights: Sequence[Array]) -> Array:
    gate, up, down = weights
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


def layers(x: Array, *weights: Array) -> Array:
    return jax.lax.scan(lambda c, w: (swiglu(c, w), None), x, weights)[0]


def stacked(fun: Callable[..., Any], **more: Any) -> list[str]:
    """The types of what the forward of `fun` stacks for its backward alone."""
    hosted = jhost.jit(
        fun, **on({"tp": 4}, (ROWS, *STACKS), ROWS, pipeline="off", **more)
    )
    args = [array(*shape, seed=n) for n, shape in enumerate((X, *STACKED))]
    forward, *_ = backward(hosted, *args)
    return sorted(f"{r.dtype}{list(r.shape)}" for r in forward.results[1:])


LEAST = ["float32[3, 16, 8]", "float32[3, 16, 8]", "float32[3, 4, 8]"]
"""The products of the gate and of the other matrix, and the rows of each layer."""


def test_a_scan_stacks_no_more_than_a_layer_would_hand_over() -> None:
    assert stacked(layers) == LEAST


def test_scans_in_scans_and_in_calls_are_cut_alike() -> None:
    def halves(x: Array, *weights: Array) -> Array:
        def step(c: Array, number: Array) -> tuple[Array, None]:
            return jax.jit(layers)(c * number, *weights), None

        return jax.lax.scan(step, x, jnp.arange(2.0))[0]

    assert stacked(halves) == [each.replace("[", "[2, ") for each in LEAST]


def test_what_a_scan_stacks_for_the_user_is_not_stacked_twice() -> None:
    def f(x: Array, *weights: Array) -> Array:
        def step(c: Array, w: Any) -> tuple[Array, Array]:
            product = c @ w[0]
            return c + jnp.sin(product) @ w[2], product

        x, products = jax.lax.scan(step, x, weights)
        return x + jnp.sum(products**2)

    assert stacked(f) == LEAST[1:]


def test_what_does_not_change_in_a_scan_is_not_stacked() -> None:
    def f(x: Array, w: Array) -> Array:
        def step(c: Array, _: None) -> tuple[Array, None]:
            return jnp.sin(c @ jnp.exp(w)) @ jnp.exp(w).T, None

        return jax.lax.scan(step, x, None, length=LAYERS)[0]

    assert handed_over(f, X, W) == ["float32[3, 4, 8]", "float32[3, 16, 8]"]


def test_what_a_scan_makes_of_arguments_alone_is_not_stacked() -> None:
    """The masks are smaller than the rows, but these are there anyway."""

    def f(x: Array, rows: Array) -> Array:
        def step(c: Array, row: Array) -> tuple[Array, None]:
            return jnp.where(row > 0, c, 2 * c), None

        return jax.lax.scan(step, x, rows)[0]

    assert handed_over(f, X, (LAYERS, *X)) == []


def test_a_policy_says_what_a_scan_stacks() -> None:
    policy = jax.checkpoint_policies.save_only_these_names("saved")

    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x: Array, w: Any) -> tuple[Array, None]:
        return x + checkpoint_name(jnp.sin(x @ w[0]), "saved") ** 2 @ w[2], None

    def f(x: Array, *weights: Array) -> Array:
        return jax.lax.scan(layer, x, weights)[0]

    assert stacked(f) == LEAST[1:]


@pytest.mark.parametrize("operands", [1, 2])
def test_what_a_scan_stacks_for_more_than_another_scan_stays(operands: int) -> None:
    """Two operands of the second program may be one result of the first."""

    def first(x: Array) -> tuple[Array, Array]:
        return jax.lax.scan(lambda c, row: (c + row, jnp.sin(c) * row), x[0], x)

    def second(sliced: Array, *others: Array) -> Array:
        whole, t = (sliced, *others)[-2:]
        total, _ = jax.lax.scan(lambda c, row: (c * row, None), t, sliced)
        return total + jnp.sum(whole)

    x, t = array(3, 8), array(8, seed=1)
    handed = [Residual(result=1)] * operands
    ys = [first(x)[1]] * operands
    programs = jax.make_jaxpr(first)(x), jax.make_jaxpr(second)(*ys, t)
    split = hand_over_least(Split(*programs, tuple(handed), kept=1))
    (_, *made), (residual,) = evaluate(split.first, [x]), split.residuals
    (result,) = evaluate(split.second, [[None, *made][residual.result or 0], t])
    chex.assert_trees_all_close(result, second(*ys, t), rtol=1e-6)


# --- Any function ------------------------------------------------------------------- #

UNARY = [jnp.negative, jnp.abs, lambda v: v * v, lambda v: 2 * v + 1]
BINARY = [jnp.add, jnp.multiply, jnp.maximum, lambda a, b: jnp.where(a > b, a, b)]


@st.composite
def formulas(draw: st.DrawFn, first: int = 1) -> list[tuple[Any, list[int]]]:
    """Steps, each a function and which of the values before it takes.

    Before the first step there are those numbered from 0 to `first`.
    """
    steps: list[tuple[Any, list[int]]] = []
    for number in range(draw(st.integers(1, 8))):
        before = st.integers(0, number + first)
        if draw(st.booleans()):
            steps.append((draw(st.sampled_from(UNARY)), [draw(before)]))
        else:
            steps.append((draw(st.sampled_from(BINARY)), [draw(before), draw(before)]))
    return steps


@hypothesis.given(formulas())
def test_gradients_of_any_formula_are_exact(formula: list[tuple[Any, Any]]) -> None:
    def f(x: Array, w: Array) -> Array:
        values = [x @ w, (x + 1) @ w]
        for fun, operands in formula:
            values.append(fun(*(values[n] for n in operands)) % 64)
        return values[-1]

    args = array(*X), array(*W, seed=1)
    hosted = on_four(f, compiler_options=None)
    given, wanted = (
        jax.jit(jax.grad(lambda *xs, g=g: jnp.sum(g(*xs)), (0, 1)))(*args)
        for g in (hosted, f)
    )
    for one, other in zip(given, wanted, strict=True):
        assert jnp.array_equal(one, other)


@st.composite
def scans(draw: st.DrawFn) -> dict[str, Any]:
    """A scan of a formula: the numbers of what it carries on and of what it stacks."""
    formula = draw(formulas(first=3))
    last = len(formula) + 3
    return {
        "formula": formula,
        "carried": last,
        "stacked": draw(st.lists(st.integers(0, last), max_size=2)),
        "reverse": draw(st.booleans()),
        "called": draw(st.booleans()),
        "twice": draw(st.booleans()),
    }


def scanning(drawn: dict[str, Any]) -> Callable[..., Array]:
    def step(c: Array, x: Array, w: Array) -> tuple[Array, list[Array]]:
        values = [c, x, c @ w, (x + 1) @ w]
        for fun, operands in drawn["formula"]:
            values.append(fun(*(values[n] for n in operands)) % 64)
        return values[drawn["carried"]], [values[n] for n in drawn["stacked"]]

    def f(xs: Array, w: Array) -> Array:
        body = jax.jit(step) if drawn["called"] else step

        def through(c: Array) -> Array:
            c, ys = jax.lax.scan(
                lambda c, x: body(c, x, w), c, xs, reverse=drawn["reverse"]
            )
            return c + sum((jnp.sum(y, 0) for y in ys), jnp.zeros(()))

        first = through(jnp.ones_like(xs[0]))
        return through(first % 64) if drawn["twice"] else first

    return f


@pytest.mark.slow
@hypothesis.settings(max_examples=budget.examples(12))
@hypothesis.given(scans())
def test_gradients_through_scans_of_any_formula(drawn: dict[str, Any]) -> None:
    f = scanning(drawn)
    specs = (P(None, "tp"), P(None, None)), P("tp")
    settings = on({"tp": 4}, *specs, pipeline="off", compiler_options=None)
    of_gradients: dict[str, Any] = {**settings, "out_shardings": specs[0]}
    hosted = jhost.jit(f, **settings)

    def gradients(fun: Callable[..., Array]) -> Callable[..., Any]:
        return jax.grad(lambda *xs: jnp.sum(fun(*xs)), (0, 1))

    # In two programs, or in one with a gradient of its own.
    whole = jhost.jit(gradients(f), **of_gradients)
    with jax.enable_x64(True):  # squares of squares leave what float32 has exactly
        args = [a.astype(float) for a in (array(2, 8, 8), array(8, 8, seed=1) % 2)]
        wanted = jax.jit(gradients(f))(*args)
        for given in (jax.jit(gradients(hosted)), whole):
            chex.assert_trees_all_close(given(*args), wanted, rtol=1e-9)


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "grad of grad": lambda f: jax.vmap(
        jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))
    ),
    "tangents of grad": lambda f: lambda x: jax.jvp(jax.vmap(jax.grad(f)), (x,), (x,)),
    "checkpoint": lambda f: jax.vmap(jax.grad(jax.checkpoint(f))),
}


@pytest.mark.parametrize(
    "derivative",
    [
        # The gradient of a gradient takes both programs apart, as all others do.
        pytest.param(
            make, id=name, marks=[] if name == "grad of grad" else pytest.mark.slow
        )
        for name, make in DERIVATIVES.items()
    ],
)
def test_derivatives_of_what_a_scan_stacks(derivative: Callable[[Any], Any]) -> None:
    weights = [0.1 * array(*shape, seed=n) for n, shape in enumerate(STACKED, 1)]
    hosted = jhost.jit(layers, **on({"tp": 4}, (ROWS, *STACKS), ROWS, pipeline="p2p"))
    rows = 0.1 * array(2, *X)

    def loss(fun: Callable[..., Array]) -> Callable[[Array], Array]:
        return lambda x: jnp.sum(jnp.sin(fun(x, *weights)))

    given = derivative(loss(hosted))(rows)
    wanted = jax.jit(derivative(loss(layers)))(rows)
    chex.assert_trees_all_close(given, wanted, rtol=1e-4, atol=1e-6)
