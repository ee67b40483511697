"""`jhost.nnx.jit` changes modules as `flax.nnx.jit` does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost.testing import mesh_of
from tests.jhost.quick_random import rngs

nnx: Any = pytest.importorskip("flax.nnx")
layers: Any = pytest.importorskip("jhost.nnx")
optax: Any = pytest.importorskip("optax")

X = np.linspace(-1, 1, 4 * 8 * 8, dtype=np.float32).reshape(4, 8, 8)
MODES = {"references": {}, "a tree": {"graph": False}}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of({"tp": 4})


class Model(nnx.Module):
    """Layers that count how often they are called."""

    def __init__(self) -> None:
        self.up = layers.ColumnParallelLinear(8, 16, rngs=rngs())
        self.down = layers.RowParallelLinear(16, 8, rngs=rngs())
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] += 1
        return self.down(jax.nn.relu(self.up(x)))


def train(model: Any, optimizer: Any, x: jax.Array, scale: float = 1.0) -> jax.Array:
    def loss(model: Any) -> jax.Array:
        return jnp.mean((model(x) - x) ** 2) * scale

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def new(mesh: Mesh) -> tuple[Any, Any]:
    with jax.set_mesh(mesh):
        model = Model()
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def rows(mesh: Mesh) -> jax.Array:
    return jax.device_put(X, NamedSharding(mesh, P(None, "tp")))


@pytest.mark.parametrize("mode", MODES)
def test_a_step_changes_its_model_and_optimizer(mode: str, mesh: Mesh) -> None:
    ends: list[Any] = []
    shared: Any = {
        "static_argnames": "scale",
        "donate_argnames": ("model", "optimizer"),
    }
    for jit, more in ((nnx.jit, {}), (layers.jit, {"mesh": mesh})):
        step = jit(**shared, **more, **MODES[mode])(train)
        model, optimizer = new(mesh)
        before = model.up.kernel.get_raw_value()
        losses = [step(model, optimizer, rows(mesh)) for _ in range(2)]
        losses.append(step(model, optimizer, rows(mesh), scale=2.0))
        assert before.is_deleted()
        assert model.calls[...] == 3
        ends.append((losses, nnx.to_pure_dict(nnx.state((model, optimizer)))))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), *ends
    )
    shardings = [jax.tree.map(lambda a: a.sharding, state) for _, state in ends]
    assert shardings[0] == shardings[1]


def test_a_module_may_have_shardings_of_its_own(mesh: Mesh) -> None:
    whole = NamedSharding(mesh, P())
    state = nnx.StateSharding(
        {nnx.PathContains("kernel"): NamedSharding(mesh, P("tp")), ...: whole}
    )

    @layers.jit(mesh=mesh, in_shardings=(state, whole), out_shardings=state)
    def add(layer: Any, x: jax.Array) -> Any:
        layer.kernel[...] += 1
        made = nnx.Linear(8, 8, rngs=rngs())
        made.bias[...] += x
        return made

    layer = nnx.Linear(8, 8, rngs=rngs())
    kernel = jax.device_put(layer.kernel[...], NamedSharding(mesh, P("tp")))
    layer.kernel = nnx.Param(kernel)
    made = add(layer, np.arange(8, dtype=np.float32))
    assert layer.kernel[...].sharding.spec == made.kernel[...].sharding.spec == P("tp")
    np.testing.assert_array_equal(layer.kernel[...], kernel + 1)
    np.testing.assert_array_equal(made.bias[...], np.arange(8, dtype=np.float32))


def test_the_step_is_explained_lowered_and_compiled(mesh: Mesh) -> None:
    step = layers.jit(train, mesh=mesh, pipeline="collective", chunks=2)
    model, optimizer = new(mesh)
    assert jhost.explain(step, model, optimizer, rows(mesh)).loops > 0
    compiled = step.lower(model, optimizer, rows(mesh)).compile()
    assert model.calls[...] == 0
    compiled(model, optimizer, rows(mesh))
    assert model.calls[...] == 1
    assert step.eval_shape(model, optimizer, rows(mesh)).shape == ()


def test_what_is_no_option_is_refused() -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        layers.jit(train, no_such_option=1)
