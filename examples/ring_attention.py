"""Causal attention over one long sequence: keys and values go around, queries stay.

JAX_NUM_CPU_DEVICES=4 python examples/ring_attention.py

The stream is along the keys, and what a loop adds up along its stream is a plain sum:
no row may need its maximum first.  Queries and keys are normalized, as in Qwen 3, so no
score exceeds the root of the head's size, and a float32 holds the `exp` of that.  (With
`jax.nn.softmax` the numbers are right as well, in two loops that keep all scores.)

What this is not: a kernel.  A chunk's scores are written to memory, and each device
computes all of its own, those too that the causal mask hides.  The Host IR keeps no
scores from chunk to chunk; how much XLA has in memory at a time is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from measure import difference, milliseconds

import jhost

ROWS = P("sp")  # each device has a part of the sequence: its queries, keys and values


def unit(x: jax.Array) -> jax.Array:
    """Each head's vector with a mean square of one."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True))).astype(x.dtype)


@jax.checkpoint  # the backward makes the scores again, a chunk at a time
def sums(
    q: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sums over the keys: of values, weighted by `exp(scores)`, and of the weights."""
    scores = jnp.einsum("qhgd,khd->hgqk", q, k, preferred_element_type=jnp.float32)
    seen = at[:, None] >= jnp.arange(len(k))
    weights = jnp.where(seen, jnp.exp(scores * q.shape[-1] ** -0.5), 0)
    weights = jhost.stream(weights, axis=3)  # the keys
    weights = jhost.shard(weights, P(None, None, "sp", None))  # the queries stay apart
    values = jnp.einsum(
        "hgqk,khd->hgqd",
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    return values, jnp.sum(weights, axis=3)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array) -> jax.Array:
    """Queries `[s, h, g, d]` at positions `at`, keys and values `[s, h, d]`.

    Each head of keys and values is shared by `g` heads of queries.
    """
    values, weights = sums(unit(q), unit(k), v, at)
    return jnp.einsum("hgqd->qhgd", values / weights[..., None]).astype(v.dtype)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, at: jax.Array) -> jax.Array:
    """The same by JAX's own attention, which takes a softmax."""
    mask = at[:, None] >= jnp.arange(len(k))
    heads = unit(q).reshape(len(q), -1, q.shape[-1])
    y = jax.nn.dot_product_attention(heads, unit(k), v, mask=mask[None])
    return y.reshape(q.shape)


def main(argv: Sequence[str] | None = None) -> None:
    """Attends to the keys in chunks, and says what became of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pieces", type=int, help="chunks of each device's keys")
    parser.add_argument("--large", action="store_true", help="Qwen 3 8B's, for GPUs")
    arguments = parser.parse_args(argv)

    devices, large = jax.device_count(), arguments.large
    pieces = arguments.pieces or (4 if large else 2)
    tokens, heads, shared, size = (8192, 8, 4, 128) if large else (64, 2, 3, 16)
    tokens, dtype = tokens * devices, jnp.bfloat16 if large else jnp.float32

    mesh = jax.make_mesh((devices,), ("sp",), axis_types=(AxisType.Auto,))
    pipelined = jhost.jit(
        attention,
        mesh=mesh,
        in_shardings=ROWS,
        out_shardings=ROWS,
        pipeline="p2p",
        chunks=pieces * devices,
    )
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (tokens, heads, shared, size), (tokens, heads, size), (tokens, heads, size)
    arrays = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]
    q, k, v, at = jax.device_put(
        (*arrays, jnp.arange(tokens)), NamedSharding(mesh, ROWS)
    )
    print(jhost.explain(pipelined, q, k, v, at))

    # The last queries see all keys; all queries may have too many scores to compare.
    last = slice(-min(tokens, 256), None)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.mean(pipelined(q, k, v, at)[last].astype(jnp.float32) ** 2)

    def plain_loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.mean(reference(q[last], k, v, at[last]).astype(jnp.float32) ** 2)

    backward = jax.jit(
        jax.grad(loss, (0, 1, 2)), compiler_options=jhost.compiler_options()
    )
    y = pipelined(q, k, v, at)[last], backward(q, k, v)
    plain = (
        jax.jit(reference)(q[last], k, v, at[last]),
        jax.jit(jax.grad(plain_loss, (0, 1, 2)))(q, k, v),
    )
    print(f"JAX's attention differs by {difference(y, plain):.0e}, gradients included")

    scores = heads * shared * tokens * (tokens // devices) * 4
    print(f"all scores of a device: {scores / 1e6:.1f} MB")
    for name, f, args in (
        ("forward", pipelined, (q, k, v, at)),
        ("forward and backward", backward, (q, k, v)),
    ):
        print(f"{name}: {milliseconds(f, *args):.2f} ms", end="")
        if memory := f.lower(*args).compile().memory_analysis():
            size = memory.temp_size_in_bytes / 1e6
            print(f" with {size:.1f} MB of temporary memory", end="")
        print()


if __name__ == "__main__":
    main()
