"""Batched contractions lose the transposes around them, and no number changes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from jhost._jax import aval_of
from jhost.lowering.frontend.contractions import without_transposes
from jhost.lowering.frontend.inline_calls import FlatJaxpr, inline_calls
from tests.jhost.derived import vjp
from tests.lowering.on_mesh import exact, on
from tests.lowering.traced import array

EXPERTS = "gecm,emf->gecf"


def flat(f: Callable[..., Any], *args: Any) -> tuple[FlatJaxpr, FlatJaxpr]:
    """The equations of a function, and what becomes of them."""
    before = inline_calls(jax.make_jaxpr(f)(*args))
    return before, without_transposes(before)


def count(jaxpr: FlatJaxpr, primitive: str = "transpose") -> int:
    return Counter(eqn.primitive.name for eqn in jaxpr.eqns)[primitive]


@functools.partial(jax.jit, static_argnums=0)
def run(jaxpr: FlatJaxpr, *args: Any) -> list[Any]:
    values = dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        (out,) = eqn.outvars
        values[out] = eqn.primitive.bind(
            *ins, **eqn.primitive.get_bind_params(eqn.params)
        )
        assert values[out].shape == aval_of(out).shape
    return [values[v] for v in jaxpr.outvars]


def test_tokens_by_expert_are_read_and_made_as_they_lie() -> None:
    """Groups stand outside of experts: only these two dims change places."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum(EXPERTS, x, w)

    args = array(4, 2, 3, 5), array(2, 5, 6, seed=1)
    _, made = flat(f, *args)
    product, transpose = made.eqns
    assert product.params["dimension_numbers"] == (((3,), (1,)), ((1,), (0,)))
    assert transpose.params["permutation"] == (1, 0, 2, 3)

    before, made = flat(vjp(f), array(4, 2, 3, 6, seed=2), *args)
    assert (count(before), count(made)) == (4, 2)  # the result's and x's
    chex.assert_trees_all_equal(
        run(made, array(4, 2, 3, 6, seed=2), *args),
        run(before, array(4, 2, 3, 6, seed=2), *args),
    )


@st.composite
def einsums(draw: st.DrawFn) -> tuple[str, list[tuple[int, ...]]]:
    """Two operands and a result with their dims in any order."""
    letters = iter("abcdefghij")
    batch, left, right, contracted = (
        "".join(next(letters) for _ in range(draw(st.integers(0, 2)))) for _ in range(4)
    )
    operands = [batch + left + contracted, batch + right + contracted]
    lhs, rhs, out = (
        "".join(draw(st.permutations(names)))
        for names in (*operands, batch + left + right)
    )
    sizes = {name: draw(st.sampled_from([2, 3, 1, 4, 0])) for name in lhs + rhs}
    shapes = [tuple(sizes[name] for name in names) for names in (lhs, rhs)]
    return f"{lhs},{rhs}->{out}", shapes


@settings(settings.get_profile("programs"))
@given(einsums(), st.booleans())
def test_any_product_is_what_it_was(
    einsum: tuple[str, list[tuple[int, ...]]], transposed_before: bool
) -> None:
    names, shapes = einsum

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        if transposed_before:
            x, y = jnp.transpose(x.T), y.T.T
        return jnp.einsum(names, x, y)

    args = [array(*shape, seed=n) for n, shape in enumerate(shapes)]
    cotangent = jnp.ones(jax.eval_shape(f, *args).shape)
    before, made = flat(vjp(f), cotangent, *args)
    assert count(made) <= count(before)
    assert count(made, "dot_general") == count(before, "dot_general")
    chex.assert_trees_all_equal(
        *(run(each, cotangent, *args) for each in (made, before))
    )


def test_precision_and_dtype_go_along() -> None:
    """Each operand keeps its own precision, and the result its type."""
    high, low = lax.Precision.HIGHEST, lax.Precision.DEFAULT

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        made = lax.dot_general(
            w,
            x,
            (((1,), (3,)), ((0,), (1,))),
            precision=(high, low),
            preferred_element_type=jnp.float32,
        )
        return jnp.transpose(made, (2, 0, 3, 1))

    _, made = flat(f, *(jnp.ones(s, jnp.bfloat16) for s in ((4, 2, 3, 5), (2, 5, 6))))
    product, _ = made.eqns
    assert product.params["precision"] == (low, high)
    assert all(aval_of(eqn.outvars[0]).dtype == jnp.float32 for eqn in made.eqns)


def test_what_else_reads_a_product_has_it_as_it_was() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        made = lax.dot_general(w, x, (((1,), (3,)), ((0,), (1,))))
        return made, jnp.transpose(made, (2, 0, 3, 1))

    before, made = flat(f, array(4, 2, 3, 5), array(2, 5, 6))
    assert [str(eqn) for eqn in made.eqns] == [str(eqn) for eqn in before.eqns]


def test_matrices_stay_as_they_were_written() -> None:
    """XLA does without their transposes."""
    before, made = flat(lambda x, w: (x @ w.T).T, array(4, 3), array(5, 3))
    assert count(before) == count(made) == 2


# --- On devices --------------------------------------------------------------------- #

SPECS = {
    "groups and experts": (P("a"), P("b")),
    "groups and features": (P("a", None, None, "b"), P(None, "b")),
    "places": (P(None, None, "a"), P(None, None, "b")),
    "experts": (P(None, ("a", "b")), P(("a", "b"))),
}


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS.keys())
def test_on_any_devices(specs: tuple[P, P]) -> None:
    """Parts are products of matrices there, forward and backward."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            made = jnp.einsum(EXPERTS, x, w)
            return jnp.sum(made * lax.stop_gradient(made))

        return jax.value_and_grad(loss, (0, 1))(x, w)

    args = array(4, 4, 2, 6), array(4, 6, 8, seed=1)
    exact(f, *args, **on({"a": 2, "b": 2}, specs, (P(), specs)))
