"""A training step: weights are sharded over `data` and gathered, activations over `tp`.

JAX_NUM_CPU_DEVICES=4 python examples/fsdp_tp.py

The stream is along the hidden dim, so a chunk of it is a part of each weight.  In the
loop of the forward the next parts of the weights come while the last ones are
multiplied.  The backward fetches the parts again, and sends the gradients of each part
to its owner, also in loops.  `JHOST_DUMP=host_ir` writes both programs.

A value has one stream.  This stream hides the transfers over `data`.  Activations move
over `tp` before and after the loops.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from measure import difference, milliseconds

import jhost

Weights: TypeAlias = tuple[jax.Array, ...]
Layers: TypeAlias = tuple[Weights, ...]

ROWS = P(("data", "tp"))  # of activations: a batch over data, its sequences over tp
HIDDEN = ("tp", "data")  # the hidden dim: over tp, and the shards again over data
WEIGHTS = P(None, HIDDEN), P(None, HIDDEN), P(HIDDEN)
RATE = 0.1


def block(x: jax.Array, weights: Weights) -> jax.Array:
    """A Llama's MLP block; float32 weights are cast before they are gathered."""
    gate, up, down = (weight.astype(x.dtype) for weight in weights)
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    normal = (wide * scale).astype(x.dtype)
    # In the backward too the rows come together over tp, rather than the columns.
    gated, h = (jhost.shard(normal @ w, P("data", "tp")) for w in (gate, up))
    return x + jhost.stream(jax.nn.silu(gated) * h, axis=1) @ down


def step(
    block: Callable[[jax.Array, Weights], jax.Array],
    layers: Layers,
    x: jax.Array,
    y: jax.Array,
) -> tuple[jax.Array, Layers, Layers]:
    """One step of gradient descent: loss, gradients and new weights."""

    def loss(layers: Layers) -> jax.Array:
        given = functools.reduce(block, layers, x)
        return jnp.mean((given - y).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(layers)
    return value, gradients, jax.tree.map(lambda w, g: w - RATE * g, layers, gradients)


def main(argv: Sequence[str] | None = None) -> None:
    """Takes a step with the hidden dim in chunks, and compares it with plain JAX."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pieces", type=int, default=2, help="chunks of a shard")
    parser.add_argument("--large", action="store_true", help="Llama-3 8B's, for GPUs")
    arguments = parser.parse_args(argv)

    devices, large = jax.device_count(), arguments.large
    tp = 2 if devices % 2 == 0 else 1
    data = devices // tp
    model, hidden = (4096, 14336) if large else (64, 192)
    rows, dtype = (8192, jnp.bfloat16) if large else (64, jnp.float32)

    mesh = jax.make_mesh((data, tp), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    how: tuple[Literal["p2p", "off"], ...] = ("p2p", "off")
    pipelined, whole = (
        jhost.jit(
            block,
            mesh=mesh,
            in_shardings=(ROWS, WEIGHTS),
            out_shardings=ROWS,
            pipeline=pipeline,
            chunks=arguments.pieces * data,
        )
        for pipeline in how
    )

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def normal(seed: int, shape: tuple[int, int], dtype: Any, spec: P) -> jax.Array:
        values = jax.random.normal(jax.random.key(seed), shape, dtype)
        return jax.lax.with_sharding_constraint(values, NamedSharding(mesh, spec))

    x, y = (normal(seed, (rows * data, model), dtype, ROWS) for seed in range(2))
    shapes = (model, hidden), (model, hidden), (hidden, model)
    layers = tuple(
        tuple(
            normal(10 * layer + number, shape, jnp.float32, spec) * shape[0] ** -0.5
            for number, (shape, spec) in enumerate(zip(shapes, WEIGHTS, strict=True))
        )
        for layer in range(1, 3)
    )
    in_chunks, without, plain = (
        jax.jit(
            functools.partial(step, block), compiler_options=jhost.compiler_options()
        )
        for block in (pipelined, whole, block)
    )

    print(jhost.explain(pipelined, x, layers[0]))
    loss, gradients, new = in_chunks(layers, x, y)
    off = difference((loss, gradients), plain(layers, x, y)[:2])
    print(f"the plain function's loss and gradients differ by {off:.0e}")
    print(f"the step takes the loss from {loss:.4f} to {in_chunks(new, x, y)[0]:.4f}")
    for name, f in (("in chunks", in_chunks), ("without", without)):
        print(f"{name}: {milliseconds(f, layers, x, y):.2f} ms")


if __name__ == "__main__":
    main()
