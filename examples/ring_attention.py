"""Ring attention: each device has a part of a sequence, and keys and values move.

JAX_NUM_CPU_DEVICES=4 python examples/ring_attention.py

`--large`, for GPUs, is a layer of Qwen 3 8B with 8192 tokens a device, by cuDNN.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from measure import difference, milliseconds

import jhost

ROWS = P(None, "sp")  # a part of the sequence, of [batch, sequence, heads, size]

cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, kernel: Callable[..., jax.Array]
) -> jax.Array:
    """Causal, with a head of keys and values for each group of heads of queries."""
    k = jhost.stream(k, axis=1)
    return kernel(q, k, v, is_causal=True)


def of_the_last(q: jax.Array, k: jax.Array, v: jax.Array, count: int) -> jax.Array:
    """The same for the last queries, which see most keys, with all scores at once."""
    seen = jnp.arange(k.shape[1]) <= jnp.arange(k.shape[1])[-count:, None]
    return jax.nn.dot_product_attention(q[:, -count:], k, v, mask=seen[None, None])


def main(argv: Sequence[str] | None = None) -> None:
    """Attends to the keys of all devices, and compares the result with JAX's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--large", action="store_true", help="for GPUs")
    large, devices = parser.parse_args(argv).large, jax.device_count()
    tokens, heads, shared, size = (8192, 32, 8, 128) if large else (128, 6, 2, 16)
    tokens, dtype = tokens * devices, jnp.bfloat16 if large else jnp.float32

    mesh = jax.make_mesh((devices,), ("sp",), axis_types=(AxisType.Auto,))
    kernel = cudnn if large else jhost.dot_product_attention
    ring = jhost.jit(
        functools.partial(attention, kernel=kernel),
        mesh=mesh,
        in_shardings=ROWS,
        out_shardings=ROWS,
        pipeline="p2p",
    )
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(1, tokens, count, size) for count in (heads, shared, shared)]
    q, k, v = (
        jax.device_put(jax.random.normal(key, shape, dtype), NamedSharding(mesh, ROWS))
        for key, shape in zip(keys, shapes, strict=True)
    )
    print(jhost.explain(ring, q, k, v))

    last = min(tokens, 256)  # the scores of all queries may need too much memory

    def loss(y: jax.Array) -> jax.Array:
        return jnp.mean(y[:, -last:].astype(jnp.float32) ** 2)

    backward = jax.jit(
        jax.grad(lambda *x: loss(ring(*x)), (0, 1, 2)),
        compiler_options=jhost.compiler_options(),
    )
    plain = jax.jit(functools.partial(of_the_last, count=last))
    gradients = jax.grad(lambda *x: loss(plain(*x)), (0, 1, 2))
    given = ring(q, k, v)[:, -last:], backward(q, k, v)
    off = difference(given, (plain(q, k, v), gradients(q, k, v)))
    print(f"JAX's attention differs by {off:.0e}, gradients included")

    scores = heads * tokens * (tokens // devices) * 4
    print(f"all scores of a device: {scores / 1e6:.1f} MB")
    for name, f in (("forward", ring), ("forward and backward", backward)):
        print(f"{name}: {milliseconds(f, q, k, v):.2f} ms", end="")
        if memory := f.lower(q, k, v).compile().memory_analysis():
            print(f", {memory.temp_size_in_bytes / 1e6:.1f} MB of temporary memory")


if __name__ == "__main__":
    main()
