"""A decoder of flax's linen, written as MaxText writes its own: for tests.

Layers are in a scan with rematerialization, weights have partitionings over `fsdp` and
`tp`, activations have constraints, and float32 masters are cast where they are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH, SEQUENCES = 32000, 4096, 32, 14336, 2048, 8


def dense(features: int, axes: tuple[str | None, ...], name: str) -> nn.Dense:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), axes)
    return nn.Dense(
        features, use_bias=False, dtype=jnp.bfloat16, kernel_init=init, name=name
    )


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        queries, keys, values = (
            dense(WIDTH, ("fsdp", "tp"), name)(x).reshape(*x.shape[:2], HEADS, -1)
            for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        return dense(WIDTH, ("tp", "fsdp"), "out")(mixed.reshape(x.shape))


class MlpBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = dense(HIDDEN, ("fsdp", "tp"), "wi_0")(x)
        up = dense(HIDDEN, ("fsdp", "tp"), "wi_1")(x)
        hidden = constrain(nn.silu(gate) * up, P("fsdp", None, "tp"))
        return jhost.stream(dense(WIDTH, ("tp", "fsdp"), "wo")(hidden), axis=1)


class DecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)
        x = constrain(x, P("fsdp", "tp"))
        x = x + Attention(name="attention")(norm(name="pre_attention_norm")(x))
        x = x + MlpBlock(name="mlp")(norm(name="pre_mlp_norm")(x))
        return constrain(x, P("fsdp", "tp")), None


class Decoder(nn.Module):
    layers: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.with_partitioning(nn.initializers.normal(), ("tp", "fsdp"))
        embed = nn.Embed(
            VOCABULARY, WIDTH, dtype=jnp.bfloat16, embedding_init=init, name="embed"
        )
        stack: Any = nn.scan(
            nn.remat(DecoderLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = stack(name="layers")(embed(tokens), None)
        x = nn.RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
        return dense(VOCABULARY, ("fsdp", "tp"), "logits")(x)


def step_of(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of training by `jhost.jit`, and the types of its arguments."""
    model, optimizer = Decoder(), optax.adamw(1e-3)
    tokens = jax.ShapeDtypeStruct((SEQUENCES, LENGTH + 1), jnp.int32)
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        boxed = jax.eval_shape(model.init, jax.random.key(0), tokens)
    specs, params = nn.get_partition_spec(boxed), nn.meta.unbox(boxed)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    moments = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )
    batch = NamedSharding(mesh, P("fsdp"))

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens[:, :-1])
        logits = constrain(logits.astype(jnp.float32), P("fsdp", None, "tp"))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def train_step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jhost.jit(
        train_step,
        mesh=mesh,
        in_shardings=(shardings, moments, batch),
        out_shardings=(shardings, moments, None),
    )
    return step, (params, jax.eval_shape(optimizer.init, params), tokens)
