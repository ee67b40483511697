"""Rules of `jax.custom_jvp` and `custom_vjp`, in derivatives of every order and mode.

The rules here are not the true derivatives, so that a rule that is lost shows; and each
derivative is what `jax.jit` gives, its refusals included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.testing import assert_close, mesh_of

Array = jax.Array
Function = Callable[[Array], Array]


@jax.custom_jvp
def three_halves(x: Array) -> Array:
    """The square, whose derivative is said to be 3 x."""
    return x * x


@three_halves.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return three_halves(*primals), 3 * primals[0] * tangents[0]


@jax.custom_vjp
def reversed_three_halves(x: Array) -> Array:
    """The same by a rule for reverse mode, which refuses the other."""
    return x * x


def _forward(x: Array) -> tuple[Array, Array]:
    return reversed_three_halves(x), x


def _backward(x: Array, cotangent: Array) -> tuple[Array]:
    return (3 * x * cotangent,)


reversed_three_halves.defvjp(_forward, _backward)


@jax.custom_jvp
def safe_root(x: Array) -> Array:
    """The root, whose slope at 0 is said to be 0, and elsewhere 1."""
    return jnp.sqrt(x)


@safe_root.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (t,) = primals, tangents
    return safe_root(x), jnp.where(x > 0, safe_root(x) * t, 0)


FUNCTIONS: dict[str, Function] = {
    "custom_jvp": three_halves,
    "custom_vjp": reversed_three_halves,
    "one in the other": lambda x: reversed_three_halves(three_halves(x) + x),
    "the other in the one": lambda x: three_halves(reversed_three_halves(x) * x),
    "a root that has no NaN": lambda x: safe_root(jnp.abs(x - 1)) * x,
    "relu at 0": lambda x: jax.nn.relu(x - 2) * x,
    "logsumexp": lambda x: x * jax.nn.logsumexp(x),
    "in jit": lambda x: jax.jit(three_halves)(x) * x,
    "in checkpoint": jax.checkpoint(lambda x: three_halves(jnp.sin(x))),
    "in a scan": lambda x: lax.scan(
        lambda c, _: (three_halves(c) / 4, None), x, None, 2
    )[0],
    "in a jhost function": jhost.jit(lambda x: three_halves(x) + x),
}

X, V = jnp.arange(1.0, 9.0), jnp.arange(8.0) - 3


def loss(f: Function) -> Function:
    return lambda x: jnp.sum(f(x) ** 2)


def gradient(f: Function) -> Function:
    return jax.grad(loss(f))


def slope(f: Function) -> Function:
    return lambda x: jax.jvp(f, (x,), (V,))[1]


FORWARD: dict[str, Callable[[Function], Function]] = {
    "jvp": slope,
    "jvp of jvp": lambda f: slope(slope(f)),
    "jvp of grad": lambda f: slope(gradient(f)),
    "grad of jvp": lambda f: gradient(slope(f)),
    "jvp of grad of grad": lambda f: slope(gradient(gradient(f))),
    "grad of jvp of grad": lambda f: gradient(slope(gradient(f))),
    "hessian": lambda f: jax.hessian(loss(f)),
    "jacfwd of jacrev": lambda f: jax.jacfwd(jax.jacrev(f)),
    "linearize of grad": lambda f: lambda x: jax.linearize(gradient(f), x)[1](V),
}
"""With a derivative in forward mode, which a `custom_vjp` refuses."""

REVERSE: dict[str, Callable[[Function], Function]] = {
    "grad of grad": lambda f: gradient(gradient(f)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
    "grad of grad of checkpoint": lambda f: gradient(gradient(jax.checkpoint(f))),
    "checkpoint between": lambda f: gradient(jax.checkpoint(gradient(f))),
    "jit between": lambda f: gradient(jax.jit(gradient(f))),
    "vmap of grad of grad": lambda f: (
        lambda x: jax.vmap(gradient(gradient(f)))(jnp.stack([x, x + 1]))
    ),
    "grad of grad of vmap": lambda f: (
        lambda x: gradient(gradient(jax.vmap(f)))(jnp.stack([x, x + 1]))
    ),
}


if jax.__version_info__ >= (0, 12):  # before, a scan of JAX's own loses rules as well
    REVERSE["grad of grad of scan"] = lambda f: gradient(
        gradient(lambda x: lax.scan(lambda c, _: (f(c) / 8, None), x, None, 2)[0])
    )


def derivatives(f: Function, kinds: Any) -> Any:
    """All of them, as one program: XLA takes a while for each."""
    return jax.jit(lambda x: {name: kind(f)(x) for name, kind in kinds.items()})(X)


# Those of a rule are its own in every order and mode; around it, these show its loss.
EACH_MODE = ("jvp of grad", "grad of jvp", "grad of grad", "grad of grad of vmap")


def check(by_jhost: Function, by_jit: Function, only: Sequence[str] = ()) -> None:
    kinds = {**FORWARD, **REVERSE}
    if refusal(by_jit, slope):
        for name, kind in FORWARD.items():
            if not only or name in only:
                assert refusal(by_jhost, kind) == refusal(by_jit, kind) is not None
        kinds = REVERSE
    kinds = {name: kind for name, kind in kinds.items() if not only or name in only}
    assert_close(derivatives(by_jhost, kinds), derivatives(by_jit, kinds))


def refusal(f: Function, kind: Callable[[Function], Function]) -> Any:
    """The type of JAX's error where a derivative cannot be taken so."""
    try:
        jax.jit(kind(f)).lower(X)
    except (TypeError, NotImplementedError) as error:
        return type(error)
    return None


ON_FOUR: dict[str, Any] = {
    "mesh": mesh_of({"tp": 4}),
    "in_shardings": P("tp"),
    "out_shardings": P("tp"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_around_are_those_of_jit(name: str) -> None:
    f = FUNCTIONS[name]
    alone = name in ("custom_jvp", "custom_vjp")
    check(jhost.jit(f, **ON_FOUR), jax.jit(f), only=() if alone else EACH_MODE)


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp"])
def test_derivatives_without_a_mesh_are_those_of_jit(name: str) -> None:
    f = FUNCTIONS[name]
    check(jhost.jit(f), jax.jit(f), only=EACH_MODE)


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp"])
def test_derivatives_inside_and_composed_are_those_of_jit(name: str) -> None:
    """The first derivative is taken inside, the others around."""
    inner = jax.grad(loss(FUNCTIONS[name]))
    check(jhost.jit(inner, **ON_FOUR), jax.jit(inner), only=EACH_MODE)


def test_what_one_derivative_leaves_still_has_the_rule() -> None:
    """As with `jax.jit`: the forward's jaxpr calls the function, not its body."""

    def calls(f: Function) -> list[str]:
        _, pullback = jax.vjp(f, X)
        del pullback
        text = str(jax.make_jaxpr(lambda x: jax.vjp(f, x)[0])(X))
        return [word for word in text.split() if word.startswith("custom_jvp_call")]

    assert calls(jhost.jit(three_halves)) == calls(jax.jit(three_halves)) != []


def test_a_relu_network_with_a_row_of_zeros() -> None:
    """At 0 the rule of `jax.nn.relu` says 0, and that of `max` one half."""

    def f(x: Array, w: Array) -> Array:
        return jax.nn.relu(x @ w)

    x = jnp.asarray(np.array([[0, 0], [1, 2], [-1, 1], [2, 0]], np.float32))
    w = jnp.asarray(np.array([[1, -1], [2, 1]], np.float32))

    def curvature(f: Any) -> Array:
        pulled = jax.grad(lambda x: jnp.sum(f(x, w) ** 2 + f(x, w)))
        return jax.jvp(pulled, (x,), (x + 1,))[1]

    settings: Any = {"mesh": mesh_of({"tp": 2}), "in_shardings": (P("tp"), P())}
    chex.assert_trees_all_equal(curvature(jhost.jit(f, **settings)), curvature(f))


# --- Symbolic zeros ----------------------------------------------------------------- #


def some_zeros(asks: bool) -> Callable[[Array], tuple[Array, Array]]:
    """Two results, of which the second's tangent is a symbolic zero."""

    @jax.custom_jvp
    def f(x: Array) -> tuple[Array, Array]:
        return jnp.sin(x), x + 1

    def rule(primals: Any, tangents: Any) -> Any:
        (x,), (t,) = primals, tangents
        if isinstance(t, jax.custom_derivatives.SymbolicZero):
            t = jnp.zeros_like(x)
        first, second = f(x)
        zero = jax.custom_derivatives.zero_from_primal(second, symbolic_zeros=True)
        return (first, second), (3 * t, zero)

    f.defjvp(rule, symbolic_zeros=asks)
    return lambda x: f(x)


READ: dict[str, Callable[[Any], Function]] = {
    "both": lambda f: lambda x: f(x)[0] * f(x)[1],
    "zero": lambda f: lambda x: f(x)[1],
    "other": lambda f: lambda x: f(x)[0] + x,
    "scan": lambda f: (
        lambda x: lax.scan(lambda h, _: (f(h)[1], f(h)[0]), x, None, 2)[0]
    ),
    "checkpoint": lambda f: jax.checkpoint(lambda x: f(x)[1] + x),
}


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("read", READ)
def test_a_rule_may_give_symbolic_zeros(read: str, asks: bool) -> None:
    f = READ[read](some_zeros(asks))
    x = np.arange(4, dtype=np.float32)
    every: list[dict[str, Any]] = [{}, {"mesh": mesh_of({"tp": 2})}]
    for settings in every:
        given, wanted = (
            jax.jvp(g, (x,), (x,)) for g in (jhost.jit(f, **settings), jax.jit(f))
        )
        assert_close(given, wanted, tolerance=1e-6)


def test_a_rule_may_give_no_cotangent() -> None:
    @jax.custom_vjp
    def f(x: Array, y: Array) -> Array:
        return x * y

    f.defvjp(lambda x, y: (f(x, y), y), lambda y, g: (5 * g * y, None))
    x = np.arange(4, dtype=np.float32)

    def loss(g: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, y: jnp.sum(g(x, y))

    given = jax.grad(loss(jhost.jit(f, mesh=mesh_of({"tp": 2}))), (0, 1))
    assert_close(given(x, x), jax.grad(loss(jax.jit(f)), (0, 1))(x, x))
