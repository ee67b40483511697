"""The layer functions that are measured, and the sizes of the models they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.communication import Communication, Exchanging

EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class Model:
    """The widths of one layer; `head` numbers to an attention head.

    Of `experts` each token goes to `chosen`.
    """

    name: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head: int = 128
    sequence: int = 2048
    attention: Literal["", "xla", "cudnn"] = ""
    """Of `jax.nn.dot_product_attention`; written out without."""
    experts: int = 0
    chosen: int = 0

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head

    @property
    def queries(self) -> int:
        """Query heads that share a key and a value."""
        return self.heads // self.kv_heads

    def shrunk(self, divisor: int) -> Model:
        return dataclasses.replace(
            self,
            hidden=self.hidden // divisor,
            ffn=self.ffn // divisor,
            head=self.head // divisor,
            sequence=self.sequence // divisor,
        )


MODELS = {
    "8b": Model("8b", hidden=4096, ffn=14336, heads=32, kv_heads=8),
    "70b": Model("70b", hidden=8192, ffn=28672, heads=64, kv_heads=8),
}

EXPERTS = {
    "8x7b": Model("8x7b", 4096, 14336, heads=32, kv_heads=8, experts=8, chosen=2),
    "dsv2": Model("dsv2", 5120, 1536, heads=128, kv_heads=128, experts=64, chosen=6),
}
"""Mixtral 8x7B; DeepSeek-V2's sizes with 64 routed experts, which 4 devices divide."""

Layer = Callable[[Exchanging, Model, Sequence[jax.Array]], jax.Array]


def gathered(comm: Communication, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    x, w = xs
    return comm.gather(x, lambda rows: rows @ w, ends=True)


def gathered_swiglu(
    comm: Communication, model: Model, xs: Sequence[jax.Array]
) -> jax.Array:
    x, gate, up = xs
    return comm.gather(x, lambda rows: _swiglu(rows, gate, up), ends=True)


def scattered(comm: Communication, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    x, w = xs
    return comm.scatter(x, w)


def reduced(comm: Communication, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    x, w = xs
    return comm.reduce(x, w)


def mlp(comm: Communication, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    x, up, down = xs
    return comm.scatter(comm.gather(x, lambda rows: jax.nn.gelu(rows @ up)), down)


def swiglu_mlp(comm: Communication, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    x, gate, up, down = xs
    return comm.scatter(comm.gather(x, lambda rows: _swiglu(rows, gate, up)), down)


def experts(comm: Exchanging, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    """Tokens in their experts' places, `[g, e, c, m]`, as GShard's routing has them."""
    x, gate, up, down = xs

    def work(tokens: jax.Array) -> jax.Array:
        h = jax.nn.silu(jnp.einsum("gecm,emf->gecf", tokens, gate))
        h = h * jnp.einsum("gecm,emf->gecf", tokens, up)
        return jnp.einsum("gecf,efm->gecm", h, down)

    return comm.exchange(x, work)


def context_parallel(
    comm: Exchanging, model: Model, xs: Sequence[jax.Array]
) -> jax.Array:
    """Causal attention over one sequence, of which each device has a part."""
    q, k, v = xs
    return comm.attend(q, k, v, model.attention)


def stages(comm: Exchanging, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    """A stage is an MLP; what it gives goes on before the next tick."""
    x, *weights = xs
    return comm.stages(_stage, weights, x, delay=False)


def delayed_stages(
    comm: Exchanging, model: Model, xs: Sequence[jax.Array]
) -> jax.Array:
    """What a stage gives is on its way for a tick."""
    x, *weights = xs
    return comm.stages(_stage, weights, x, delay=True)


def _stage(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    gate, up, down = weights
    return x + _swiglu(x, gate, up) @ down


def attention(comm: Communication, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    x, qkv, out = xs
    heads = comm.gather(x, lambda rows: rows @ qkv, ends=True)
    return comm.scatter(_attend(heads, model), out)


def layer(comm: Communication, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    x, first_gain, qkv, out, second_gain, gate, up, down = xs
    x = x + attention(comm, model, (_normalized(x, first_gain), qkv, out))
    block = (_normalized(x, second_gain), gate, up, down)
    return x + swiglu_mlp(comm, model, block)


def gelu_layer(comm: Communication, model: Model, xs: Sequence[jax.Array]) -> jax.Array:
    """GPT-3's: the same with gelu between two matmuls."""
    x, first_gain, qkv, out, second_gain, up, down = xs
    x = x + attention(comm, model, (_normalized(x, first_gain), qkv, out))
    return x + mlp(comm, model, (_normalized(x, second_gain), up, down))


def _swiglu(rows: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(rows @ gate) * (rows @ up)


def _normalized(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * lax.rsqrt(mean + EPSILON)).astype(x.dtype) * gain[None, :]


def _attend(qkv: jax.Array, model: Model) -> jax.Array:
    """Causal attention over the heads in `qkv`, a group's queries, key, value in turn.

    Written out unless the model names a kernel: every arm gets the same operations.
    """
    rows, width = qkv.shape
    queries, head, sequence = model.queries, model.head, model.sequence
    groups = width // ((queries + 2) * head)
    parts = qkv.reshape(rows // sequence, sequence, groups, queries + 2, head)
    q = lax.slice_in_dim(parts, 0, queries, axis=3)
    k, v = (
        lax.slice_in_dim(parts, n, n + 1, axis=3).squeeze(3)
        for n in (queries, queries + 1)
    )
    if model.attention:
        q = q.reshape(*q.shape[:2], groups * queries, head)
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=model.attention
        )
        return mixed.reshape(rows, groups * queries * head)
    scores = jnp.einsum(
        "bsgqd,btgd->bgqst", q, k, preferred_element_type=jnp.float32
    ) * (head**-0.5)
    later = lax.broadcasted_iota(jnp.int32, (sequence, sequence), 1) > (
        lax.broadcasted_iota(jnp.int32, (sequence, sequence), 0)
    )
    weights = jax.nn.softmax(jnp.where(later, jnp.float32(-1e30), scores), axis=-1)
    mixed = jnp.einsum("bgqst,btgd->bsgqd", weights.astype(v.dtype), v)
    return mixed.reshape(rows, groups * queries * head)
