"""A tiny transformer trains by jhost as it does without: flax, optax, orbax.

The state is a tree of arrays as always; what jhost compiles is the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from tests.lowering.hand_built import mesh_of

optax: Any = pytest.importorskip("optax")
nn: Any = pytest.importorskip("flax.linen")
ocp: Any = pytest.importorskip("orbax.checkpoint")

# What these libraries warn of is theirs; and the loss is part of a larger program.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

STEPS, TOKENS, WIDTH, VOCABULARY = 20, 16, 8, 12
MESH = mesh_of(tp=4)
Loss = Callable[..., jax.Array]


def batch(step: int) -> jax.Array:
    """Sequences that count on from some number, so that there is something to learn."""
    start = np.random.default_rng(step).integers(0, VOCABULARY, (2, 1))
    return jnp.array((start + np.arange(TOKENS + 1)) % VOCABULARY)


def cross_entropy(logits: jax.Array, wanted: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, wanted)
    return jnp.mean(losses)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Two heads; each token sees those before it."""
    q, k, v = (x.reshape(*x.shape[:2], 2, -1) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(2)
    past = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    weights = jax.nn.softmax(jnp.where(past, scores, -np.float32(1e9)), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return mixed.reshape(*mixed.shape[:2], -1)


def stream(x: jax.Array) -> jax.Array:
    return jhost.stream(x, axis=1)


# --- Models ------------------------------------------------------------------- #


class LinenModel(nn.Module):
    """One layer, with a stream through its tokens."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        linear = functools.partial(nn.Dense, use_bias=False)
        q, k, v = jnp.split(linear(3 * WIDTH)(x), 3, axis=-1)
        x = x + linear(WIDTH)(attention(q, k, v))
        h = nn.relu(linear(4 * WIDTH)(nn.RMSNorm()(x)))
        return linear(VOCABULARY)(stream(x + linear(WIDTH)(h)))


class Model(NamedTuple):
    """The first parameters, and the loss of parameters and tokens."""

    params: Any
    loss: Loss


@functools.cache
def linen() -> Model:
    model = LinenModel()
    with jax.numpy_dtype_promotion("standard"):
        params = model.init(jax.random.key(0), batch(0)[:, :-1])

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    return Model(params, loss)


# --- Training ----------------------------------------------------------------- #


def specs(params: Any) -> Any:
    """Matrices are sharded along the dim that four devices divide, wide ones first."""

    def spec(x: jax.Array) -> P:
        if x.ndim < 2:
            return P()
        return P(None, "tp") if x.shape[1] >= x.shape[0] else P("tp")

    return jax.tree.map(spec, params)


@functools.cache
def hosted() -> Loss:
    model = linen()
    return jhost.jit(
        model.loss,
        mesh=MESH,
        in_shardings=(specs(model.params), P()),
        pipeline="collective",
        chunks=2,
    )


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@functools.cache
def step_of(loss: Loss) -> Any:
    fast_to_compile = {"xla_backend_optimization_level": 0}

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=fast_to_compile)
    def step(state: Any, tokens: jax.Array) -> Any:
        params, optimizer = state
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), value

    return step


def first_state(model: Model, spread: bool) -> Any:
    params = jax.tree.map(jnp.copy, model.params)  # the step takes them over
    if spread:
        shardings = jax.tree.map(lambda s: NamedSharding(MESH, s), specs(params))
        params = jax.device_put(params, shardings)
    return params, OPTIMIZER.init(params)


def train(step: Any, state: Any, first: int, last: int) -> tuple[Any, list[float]]:
    losses: list[float] = []
    # optax and flax mix dtypes; the model's own arithmetic does not.
    with jax.numpy_dtype_promotion("standard"):
        for number in range(first, last):
            state, value = step(state, batch(number))
            losses.append(float(value))
    return state, losses


def test_a_flax_model_ends_with_the_same_loss(tmp_path: Path) -> None:
    """With a checkpoint after ten steps, which is written and read as shards."""
    model = linen()
    _, wanted = train(step_of(model.loss), first_state(model, False), 0, STEPS)
    step = step_of(hosted())
    state, before = train(step, first_state(model, True), 0, STEPS // 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        read = checkpointer.restore(tmp_path / "state", state)
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(state), strict=True):
        assert one.sharding == other.sharding
    _, after = train(step, read, STEPS // 2, STEPS)
    np.testing.assert_allclose(before + after, wanted, rtol=1e-4)
    assert wanted[-1] < wanted[0] * 0.9  # it did learn


def test_donated_weights_have_no_second_copy() -> None:
    """The new state lies where the old one was, but for the step's count."""
    model = linen()
    state, step = first_state(model, True), step_of(hosted())
    with jax.numpy_dtype_promotion("standard"):
        compiled = step.lower(state, batch(0)).compile()
    memory = compiled.memory_analysis()
    on_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert memory.alias_size_in_bytes >= on_device
    train(compiled, state, 0, 1)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
