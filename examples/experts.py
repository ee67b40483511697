"""Experts that drop no token: a mixture of them learns a function in pieces.

JAX_NUM_CPU_DEVICES=4 python examples/experts.py

Each device has some of the experts, and a part of the tokens.  Tokens move to the
devices of the experts that they choose, and back.  Any number of them may choose one
expert.  No weights and no gradients of experts move.  It needs flax and optax.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from measure import difference, milliseconds

import jhost.nnx

BALANCE = 0.01  # the share of the loss for uneven choices of tokens


def loss(layer: jhost.nnx.MoE, x: jax.Array, y: jax.Array) -> jax.Array:
    """The error of tokens `[batch, sequence, features]`, and of uneven choices."""
    return jnp.mean((layer(x) - y) ** 2) + BALANCE * layer.load_balance(x)


def data(batch: int, sequence: int, features: int, pieces: int) -> Any:
    """Tokens and their targets: a linear map for each of some directions."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (batch, sequence, features))
    maps = jax.random.normal(keys[1], (pieces, features, features)) / features**0.5
    directions = jax.random.normal(keys[2], (features, pieces))
    piece = jax.nn.one_hot(jnp.argmax(x @ directions, -1), pieces)
    return x, jnp.einsum("bsp,pfg,bsf->bsg", piece, maps, x)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains the mixture, compares it with the plain one, and returns the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--large", action="store_true", help="Mixtral 8x7B's, for GPUs")
    arguments = parser.parse_args(argv)
    batch, sequence, features, hidden, experts = 4, 64, 16, 64, 8
    if arguments.large:
        batch, sequence, features, hidden = 8, 4096, 4096, 14336

    auto = (AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=auto)
    tokens = P(None, "ep")
    x, y = (
        jax.device_put(value, NamedSharding(mesh, tokens))
        for value in data(batch, sequence, features, experts)
    )
    with jax.set_mesh(mesh):
        layer = jhost.nnx.MoE(features, hidden, experts, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(layer, optax.adam(3e-3), wrt=nnx.Param)
    graded = nnx.value_and_grad(loss)
    sharded = jhost.jit(graded, mesh=mesh, in_shardings=(None, tokens, tokens))

    @jax.jit(compiler_options=jhost.compiler_options(gradients=True))
    def step(layer: Any, optimizer: Any) -> Any:
        value, grads = sharded(layer, x, y)
        optimizer.update(layer, grads)
        return layer, optimizer, value

    alone = jhost.nnx.MoE(features, hidden, experts, rngs=nnx.Rngs(0))
    plain = jax.jit(graded)(alone, *jax.device_get((x, y)))
    both = jax.device_get((sharded(layer, x, y), plain))
    off = difference(*map(jax.tree.leaves, both))
    print(f"on one device loss and gradients differ by {off:.0e}")
    print(f"loss and gradients: {milliseconds(sharded, layer, x, y):.2f} ms")
    losses: list[float] = []
    for number in range(arguments.steps):
        layer, optimizer, value = step(layer, optimizer)
        losses.append(float(value))
        if number % 10 == 0:
            print(f"step {number}: loss {value:.4f}")
    print(f"step {len(losses)}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
