"""A call primitive goes through every transform, with the plain function's numbers.

The primitive here evaluates its program where `jhost_p` lowers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from jhost._jax import (
    def_impl,
    define_call_primitive,
    evaluate,
    is_tracing,
    register_lowering,
    trace,
    under_outer_trace,
)

call_p = define_call_primitive("call")
register_lowering(
    call_p, lambda *args, call_jaxpr, **params: evaluate(call_jaxpr, args)
)


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, as one equation."""

    def call(*args: Any, **kwargs: Any) -> Any:
        traced = trace(function, args, kwargs)
        operands = (*traced.consts, *traced.args)
        results = call_p.bind(*operands, call_jaxpr=traced.jaxpr, tag=("a", 1))
        return jax.tree.unflatten(traced.out_tree, results)

    return call


def calls_in(function: Callable[..., Any], *args: Any) -> list[JaxprEqn]:
    def walk(jaxpr: Any) -> Iterator[JaxprEqn]:
        for eqn in jaxpr.eqns:
            if eqn.primitive is call_p and eqn.outvars:
                yield eqn
            for inner in jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*args).jaxpr))


X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
W = jnp.linspace(-0.5, 0.8, 9).reshape(3, 3)


def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) * x


def loss(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, w: jnp.sum(f(x, w) ** 2)


def hvp(f: Callable[..., Any], *args: Any) -> Any:
    return jax.jvp(jax.grad(loss(f), (0, 1)), args, args)


def scan_of_layers(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        ws = jnp.stack([w, -w, 2.0 * w])
        return jnp.sum(jax.lax.scan(lambda h, w: (f(h, w), None), x, ws)[0])

    return run


def pair(x: jax.Array) -> jax.Array:
    return jnp.stack([x, jnp.sin(x)])


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "plain": lambda f: f(X, W),
    "jit": lambda f: jax.jit(f)(X, W),
    "jvp": lambda f: jax.jvp(f, (X, W), (W[:2], W)),
    "jvp of one operand": lambda f: jax.jvp(lambda x: f(x, W), (X,), (W[:2],)),
    "linearize": lambda f: jax.linearize(f, X, W)[1](W[:2], W),
    "vjp": lambda f: jax.vjp(f, X, W)[1](X),
    "grad": lambda f: jax.grad(loss(f), (0, 1))(X, W),
    "grad of one operand": lambda f: jax.grad(loss(f), 1)(X, W),
    "value_and_grad": lambda f: jax.value_and_grad(loss(f))(X, W),
    "jit of grad": lambda f: jax.jit(jax.grad(loss(f), (0, 1)))(X, W),
    "grad of jit": lambda f: jax.grad(loss(jax.jit(f)), (0, 1))(X, W),
    "hessian-vector product": lambda f: hvp(f, X, W),
    "jit of hessian-vector product": lambda f: jax.jit(lambda *a: hvp(f, *a))(X, W),
    "jacfwd": lambda f: jax.jacfwd(f, 1)(X, W),
    "jacrev": lambda f: jax.jacrev(f, 1)(X, W),
    "hessian": lambda f: jax.hessian(loss(f), 1)(X, W),
    "vmap": lambda f: jax.vmap(f, (0, None))(pair(X), W),
    "vmap of another axis": lambda f: jax.vmap(f, (None, 2), 1)(
        X, jnp.stack([W, W], 2)
    ),
    "vmap of grad": lambda f: jax.vmap(jax.grad(loss(f), 1), (0, None))(pair(X), W),
    "grad of vmap": lambda f: jax.grad(loss(jax.vmap(f, (0, None))), 1)(pair(X), W),
    "checkpoint": lambda f: jax.grad(loss(jax.checkpoint(f)), (0, 1))(X, W),
    "checkpoint with a policy": lambda f: jax.jit(
        jax.grad(loss(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)))
    )(X, W),
    "scan": lambda f: scan_of_layers(f)(X, W),
    "grad of scan": lambda f: jax.jit(jax.grad(scan_of_layers(f), (0, 1)))(X, W),
    "grad of scan of checkpoint": lambda f: jax.grad(
        scan_of_layers(jax.checkpoint(f)), (0, 1)
    )(X, W),
    "vmap of grad of scan": lambda f: jax.vmap(
        jax.grad(scan_of_layers(f), 1), (0, None)
    )(pair(X), W),
    "cond": lambda f: jax.grad(
        lambda x: jax.lax.cond(x[0, 0] < 0, f, lambda x, w: x, x, W).sum()
    )(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_called_function_gives_the_plain_function_s_numbers(
    transform: Callable[[Callable[..., Any]], Any],
) -> None:
    with jax.enable_checks(True):  # so that JAX checks every derived jaxpr
        result = transform(called(dense))
    chex.assert_trees_all_close(result, transform(dense), rtol=1e-6)


@pytest.mark.parametrize(
    ("derived", "count"),
    [
        (called(dense), 1),
        (jax.grad(loss(called(dense)), (0, 1)), 2),
        (jax.value_and_grad(loss(called(dense)), (0, 1)), 2),
        (jax.vmap(called(dense), (0, None)), 1),
        (lambda x, w: jax.jvp(called(dense), (x, w), (x, w)), 1),
        (jax.grad(loss(jax.checkpoint(called(dense))), (0, 1)), 3),
        (jax.grad(scan_of_layers(called(dense)), (0, 1)), 2),
    ],
    ids=["plain", "grad", "value", "vmap", "jvp", "checkpoint", "scan"],
)
def test_derived_programs_are_calls_with_the_same_parameters(
    derived: Callable[..., Any], count: int
) -> None:
    calls = calls_in(derived, X, W)
    assert [eqn.params["tag"] for eqn in calls] == [("a", 1)] * count


def test_values_that_the_function_closes_over_become_operands() -> None:
    def outer(call: Callable[..., Any]) -> Callable[..., jax.Array]:
        return lambda x, w: jnp.sum(call(lambda x: jnp.sin(x @ w) @ W)(x) ** 2)

    def plain(f: Any) -> Any:
        return f

    for transform in (jax.grad, lambda f, n: jax.jit(jax.grad(f, n))):
        result = transform(outer(called), (0, 1))(X, W)
        chex.assert_trees_all_close(result, transform(outer(plain), (0, 1))(X, W))
    (eqn,) = calls_in(outer(called), X, W)
    assert len(eqn.invars) == 3  # both of `w`, `W`, and the argument


def test_trees_integers_and_weak_types_pass_through() -> None:
    def lookup(params: dict[str, Any], index: jax.Array, scale: float) -> Any:
        rows = params["table"][index] * scale
        return rows.sum(), {"index": index + 1, "rows": rows}

    def run(f: Callable[..., Any]) -> Any:
        args = {"table": W}, jnp.array([2, 0])
        return jax.value_and_grad(f, has_aux=True)(*args, scale=2.0)

    (value, aux), grads = run(called(lookup))
    chex.assert_trees_all_close(((value, aux), grads), run(lookup))
    assert aux["index"].dtype == jnp.int32
    bf16 = called(lambda x, scale: x * scale)(W.astype(jnp.bfloat16), 2.0)
    assert bf16.dtype == jnp.bfloat16


def test_an_operand_without_a_gradient_has_a_zero_one() -> None:
    grad = jax.grad(lambda x, w: called(lambda x, w: x.sum())(x, w), 1)
    chex.assert_trees_all_equal(grad(X, W), jnp.zeros_like(W))


def test_gradients_of_integers_are_float0() -> None:
    index = jnp.array([1, 0])
    call = called(lambda x, i: x[i].sum())
    grad = jax.grad(call, (0, 1), allow_int=True)(X, index)
    assert grad[1].dtype == jax.dtypes.float0
    chex.assert_trees_all_equal(grad[0], jnp.ones_like(X))


def test_results_that_nobody_uses_are_removed() -> None:
    def both(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x), jnp.cos(w) @ w

    jaxpr = jax.make_jaxpr(called(both))(X, W).jaxpr
    pruned, used = dce_jaxpr(jaxpr, [True, False])
    (eqn,) = pruned.eqns
    (inner,) = eqn.params["call_jaxpr"].eqns
    assert used == [True, False]
    assert inner.primitive.name == "sin"
    assert eqn.params["tag"] == ("a", 1)


def test_only_the_known_part_runs_before_the_unknown_is_given() -> None:
    def both(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x), jnp.cos(w) * x

    primals, tangent = jax.linearize(lambda w: called(both)(X, w), W[:2])
    chex.assert_trees_all_close(primals, both(X, W[:2]))
    chex.assert_trees_all_close(tangent(X), (0 * X, -jnp.sin(W[:2]) * X * X))


def test_effects_inside_a_call_are_kept() -> None:
    seen: list[float] = []

    def report(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return jnp.sin(x)

    jax.jit(lambda x: (called(report)(x), x)[1])(jnp.ones(3))
    jax.grad(lambda x: called(report)(x).sum())(jnp.ones(4))
    jax.effects_barrier()
    assert seen == [3.0, 4.0]


def test_the_implementation_runs_at_top_level_only() -> None:
    """So that it may give XLA options: an eager transform calls it on arrays."""
    prim = define_call_primitive("counted")
    register_lowering(
        prim, lambda *args, call_jaxpr, **params: evaluate(call_jaxpr, args)
    )
    runs: list[int] = []

    def run(*args: Any, call_jaxpr: Any) -> Any:
        runs.append(len(args))
        assert not is_tracing(*args)
        assert not under_outer_trace()
        options = {"xla_cpu_enable_fast_math": True}
        compiled = jax.jit(lambda *a: evaluate(call_jaxpr, a), compiler_options=options)
        return compiled(*args)

    def_impl(prim, run)

    def call(x: jax.Array) -> jax.Array:
        traced = trace(jnp.sin, (x,), {})
        return prim.bind(x, call_jaxpr=traced.jaxpr)[0]

    chex.assert_trees_all_close(call(X), jnp.sin(X))
    chex.assert_trees_all_close(jax.grad(lambda x: call(x).sum())(X), jnp.cos(X))
    chex.assert_trees_all_close(jax.linearize(call, X)[1](X), jnp.cos(X) * X)
    chex.assert_trees_all_close(jax.vmap(call)(X), jnp.sin(X))
    eager = len(runs)
    assert eager == 6  # forward; forward and backward, twice; batched
    chex.assert_trees_all_close(jax.jit(call)(X), jnp.sin(X))
    assert len(runs) == eager


def test_neither_implementation_nor_lowering_sees_an_empty_call() -> None:
    """Partial evaluation leaves one beside a scan, without operands or results."""
    prim = define_call_primitive("not_empty")

    def run(*args: Any, call_jaxpr: Any, **_: Any) -> Any:
        assert call_jaxpr.outvars
        return evaluate(call_jaxpr, args)

    def_impl(prim, run)
    register_lowering(prim, run)

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        traced = trace(dense, (h, w), {})
        return prim.bind(h, w, call_jaxpr=traced.jaxpr)[0], None

    grad = jax.grad(lambda x: jax.lax.scan(layer, x, jnp.stack([W, W]))[0].sum())
    chex.assert_trees_all_close(grad(X), jax.jit(grad)(X))


def test_the_same_function_on_the_same_types_is_the_same_program() -> None:
    """Compilations are cached by it."""
    again = jnp.array(np.asarray(X) + 1)
    assert trace(dense, (X, W), {}).jaxpr is trace(dense, (again, W), {}).jaxpr
    assert trace(dense, (X, W), {}).jaxpr is not trace(dense, (X[:1], W), {}).jaxpr
