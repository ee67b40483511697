"""A flax block that trains on all devices, each with a part of every sequence."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P


class Block(nnx.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, features: int, heads: int, rngs: nnx.Rngs) -> None:
        hidden = 4 * features
        self.attention_norm = nnx.RMSNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, features, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(features, rngs=rngs)
        self.up = nnx.Linear(features, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Takes and returns `[batch, sequence, features]`."""
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the block to return its input, and prints how long a step takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--large", action="store_true", help="the size for GPUs")
    arguments = parser.parse_args(argv)
    batch, sequence, features, heads = 2, 32, 32, 8
    if arguments.large:
        batch, sequence, features, heads = 8, 2048, 4096, 32

    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=auto)
    tokens = P(None, "tp")

    @jax.jit
    def loss(block: Block, x: jax.Array) -> jax.Array:
        return jnp.mean((block(x) - x) ** 2)

    @jax.jit
    def step(block: Block, optimizer: Any, x: jax.Array) -> Any:
        value, grads = nnx.value_and_grad(loss)(block, x)
        optimizer.update(block, grads)
        return block, optimizer, value

    with jax.set_mesh(mesh):
        block = Block(features, heads, nnx.Rngs(0))
        optimizer = nnx.Optimizer(block, optax.adam(1e-3), wrt=nnx.Param)
        x = jax.random.normal(jax.random.key(0), (batch, sequence, features))
        x = jax.device_put(x, NamedSharding(mesh, tokens))
        for number in range(arguments.steps):
            begin = time.perf_counter()
            block, optimizer, value = jax.block_until_ready(step(block, optimizer, x))
            seconds = time.perf_counter() - begin
            print(f"step {number}: loss {value:.4f} in {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    main()
