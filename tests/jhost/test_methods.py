"""`jhost.jit` on methods, partial functions and objects that can be called."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.testing import assert_equals_plain, mesh_of

X = jnp.arange(32.0).reshape(8, 4)
W = jnp.eye(4) * 2 + 1

ON_FOUR: dict[str, Any] = {"mesh": mesh_of({"tp": 4}), "out_shardings": P("tp")}


@dataclasses.dataclass(frozen=True)
class Power:
    """Hashable, so that it may be a static argument."""

    exponent: int

    @functools.partial(jhost.jit, static_argnums=0, **ON_FOUR)
    def __call__(self, x: jax.Array) -> jax.Array:
        return jhost.stream(x**self.exponent, axis=0)

    @functools.partial(jax.jit, static_argnums=0)
    def by_jax(self, x: jax.Array) -> jax.Array:
        return x**self.exponent

    @staticmethod
    @jhost.jit
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    @classmethod
    @functools.partial(jhost.jit, static_argnums=0)
    def named(cls, x: jax.Array) -> dict[str, jax.Array]:
        return {cls.__name__: x + 1}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """A tree of arrays, which is an argument like any other."""

    w: jax.Array

    @functools.partial(jhost.jit, **ON_FOUR)
    def apply(self, x: jax.Array) -> jax.Array:
        return jhost.stream(jnp.tanh(x @ self.w), axis=0)


def test_a_method_gets_its_object() -> None:
    for exponent in (2, 3):
        power = Power(exponent)
        np.testing.assert_array_equal(power(X), X**exponent)
        np.testing.assert_array_equal(power(X), power.by_jax(X))
    np.testing.assert_array_equal(Power.__call__(Power(2), X), X * X)


def test_static_and_class_methods() -> None:
    for owner in (Power, Power(2)):
        np.testing.assert_array_equal(owner.double(X), 2 * X)
        np.testing.assert_array_equal(owner.named(X)["Power"], X + 1)


def test_a_method_of_a_tree_is_differentiated_by_it() -> None:
    def loss(layer: Layer) -> jax.Array:
        return jnp.sum(layer.apply(X))

    wanted = jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(W / 64)
    np.testing.assert_allclose(jax.grad(loss)(Layer(W / 64)).w, wanted, rtol=1e-5)


def test_tools_take_a_method_as_it_is_called() -> None:
    layer = Layer(W / 64)
    assert jhost.explain(layer.apply, X).streams[0].where.startswith("test_methods.py")
    assert_equals_plain(layer.apply, X, pipelines=["off"])
    assert jhost.profile(layer.apply, X).devices
    tuning = jhost.tune(layer.apply, X, rounds=1, cache=False, progress=False)
    assert tuning.function == "apply"
    with pytest.raises(
        jhost.errors.ArgumentError, match="which calls no jhost function"
    ):
        jhost.explain(X.sum)  # pyright: ignore[reportArgumentType]


def test_a_partial_function_and_an_object() -> None:
    class Scaled:
        def __call__(self, x: jax.Array) -> jax.Array:
            return 3 * x

    def power(x: jax.Array, exponent: int) -> jax.Array:
        return x**exponent

    cubed = jhost.jit(functools.partial(power, exponent=3), **ON_FOUR)
    scaled = jhost.jit(Scaled(), **ON_FOUR)
    np.testing.assert_array_equal(cubed(X), X**3)
    np.testing.assert_array_equal(scaled(X), 3 * X)
    assert (cubed.__name__, scaled.__name__) == ("power", "Scaled")
    assert cubed.lower(X).host_ir.name == "power"
    np.testing.assert_array_equal(functools.partial(cubed, X)(), X**3)


def test_a_bound_method_is_a_function() -> None:
    class Scale:
        factor = 4

        def by(self, x: jax.Array) -> jax.Array:
            return self.factor * x

    f = jhost.jit(Scale().by, **ON_FOUR)
    np.testing.assert_array_equal(f(X), 4 * X)


def test_an_equinox_module() -> None:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        up: jax.Array
        activation: Any = eqx.field(static=True)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jhost.stream(self.activation(x @ self.up), axis=0)

        @functools.partial(jhost.jit, **ON_FOUR)
        def compiled(self, x: jax.Array) -> jax.Array:
            return self(x)

    block = Block(W / 64, jnp.tanh)
    wanted = jnp.tanh(X @ W / 64)
    np.testing.assert_allclose(jhost.jit(block, **ON_FOUR)(X), wanted, rtol=1e-6)
    np.testing.assert_allclose(block.compiled(X), wanted, rtol=1e-6)
    of_module = jhost.jit(lambda block, x: jnp.sum(block(x)), mesh=ON_FOUR["mesh"])
    gradient = jax.grad(of_module)(block, X)
    assert isinstance(gradient, Block)
    slope = jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(W / 64)
    np.testing.assert_allclose(gradient.up, slope, rtol=1e-5)


def test_equinox_s_own_jit_around() -> None:
    """It takes what is no array as static, which a jhost function does not."""
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.Linear(4, 4, use_bias=False, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, W.T / 64)
    f = jhost.jit(lambda x, w: jhost.stream(x @ w.T, axis=0), mesh=ON_FOUR["mesh"])
    np.testing.assert_array_equal(eqx.filter_jit(f)(X, W.T), X @ W)
    step = eqx.filter_jit(lambda layer, x: f(x, layer.weight))
    np.testing.assert_allclose(step(layer, X), X @ W / 64, rtol=1e-6)
