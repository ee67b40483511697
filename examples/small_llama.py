"""The parts of a Llama that several examples share, in plain JAX."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Params: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model.  Each head of keys and values has a group of query heads."""

    layers: int = 4
    width: int = 64
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 192
    vocab: int = 128
    dtype: Any = jnp.float32

    @property
    def head(self) -> int:
        return self.width // self.heads

    def with_layers(self, layers: int) -> Sizes:
        return dataclasses.replace(self, layers=layers)


SMALL = Sizes()
LARGE = Sizes(  # Llama-3 8B's, with fewer layers and tokens
    layers=8,
    width=4096,
    heads=32,
    kv_heads=8,
    hidden=14336,
    vocab=32768,
    dtype=jnp.bfloat16,
)


def first_params(sizes: Sizes, key: jax.Array) -> Params:
    """Drawn with the variance that keeps activations' own; layers are stacked."""
    layers, width, hidden = sizes.layers, sizes.width, sizes.hidden
    queries, shared = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    keys = iter(jax.random.split(key, 9))

    def normal(*shape: int) -> jax.Array:
        drawn = jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
        return drawn.astype(sizes.dtype)

    return {
        "embedding": normal(sizes.vocab, width),
        "layers": {
            "attention_norm": jnp.ones((layers, width), sizes.dtype),
            "query": normal(layers, width, queries),
            "key": normal(layers, width, shared),
            "value": normal(layers, width, shared),
            "out": normal(layers, queries, width),
            "mlp_norm": jnp.ones((layers, width), sizes.dtype),
            "gate": normal(layers, width, hidden),
            "up": normal(layers, width, hidden),
            "down": normal(layers, hidden, width),
        },
        "norm": jnp.ones(width, sizes.dtype),
        "logits": normal(width, sizes.vocab),
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return normal.astype(x.dtype) * scale


def rotary(x: jax.Array, positions: jax.Array, base: float = 10_000.0) -> jax.Array:
    """Turns the halves of each head by angles that grow with the position."""
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def heads_of(
    sizes: Sizes, x: jax.Array, w: Params, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of `x`, [batch, tokens, heads, size]."""
    q, k, v = (
        (x @ w[name]).reshape(*x.shape[:2], -1, sizes.head)
        for name in ("query", "key", "value")
    )
    return rotary(q, positions), rotary(k, positions), v


def swiglu(x: jax.Array, w: Params) -> jax.Array:
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


def layer(sizes: Sizes, x: jax.Array, w: Params) -> jax.Array:
    """Causal attention and an MLP; `x` is [batch, tokens, width]."""
    normal = rms_norm(x, w["attention_norm"])
    q, k, v = heads_of(sizes, normal, w, jnp.arange(x.shape[1]))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(*x.shape[:2], -1) @ w["out"]
    return x + swiglu(rms_norm(x, w["mlp_norm"]), w)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """A sum over the vocabulary for each token, and never a gather of its logits."""
    logits = logits.astype(jnp.float32)
    vocabulary = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    target = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)
