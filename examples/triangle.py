"""AlphaFold's triangle update, of pairs that are sharded over two axes of a mesh.

JAX_NUM_CPU_DEVICES=4 python examples/triangle.py

Pair [i, j] gets a sum over k of products of the pairs [i, k] and [j, k].  One factor is
gathered over one axis, and sums are scattered over the other.  Both move in chunks,
beside the products of earlier chunks.  By default permutes move them from device to
device.  With `--pipeline collective` collectives do.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from measure import difference, milliseconds

import jhost

PAIRS = P("row", "column")  # [i, j, features]


def norm(x: jax.Array) -> jax.Array:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def update(z: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """The outgoing update (Jumper et al. 2021, supplement, algorithm 11)."""
    given = norm(z)
    a, b = (
        jax.nn.sigmoid(given @ w[f"{name}_gate"]) * (given @ w[name]) for name in "ab"
    )
    sums = jhost.stream(jnp.einsum("ikc,jkc->ijc", a, b), axis=1)
    return z + jax.nn.sigmoid(given @ w["gate"]) * (norm(sums) @ w["out"])


def main(argv: Sequence[str] | None = None) -> jhost.Explanation:
    """Compares the update with `jax.jit`, and returns its explanation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pipeline", choices=("p2p", "collective"), default="p2p")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--large", action="store_true", help="2048 residues, for GPUs")
    arguments = parser.parse_args(argv)
    residues, features = (2048, 128) if arguments.large else (32, 16)

    mesh = jax.make_mesh(
        (2, 2),
        ("row", "column"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    keys = iter(jax.random.split(jax.random.key(0), 8))
    names = "a", "a_gate", "b", "b_gate", "gate", "out"
    weights = {
        name: jax.random.normal(next(keys), (features, features)) * features**-0.5
        for name in names
    }
    z = jax.random.normal(next(keys), (residues, residues, features))
    z = jax.device_put(z, NamedSharding(mesh, PAIRS))
    pipelined = jhost.jit(
        update,
        mesh=mesh,
        in_shardings=(PAIRS, P()),
        out_shardings=PAIRS,
        pipeline=arguments.pipeline,
        chunks=arguments.chunks,
    )
    explanation = jhost.explain(pipelined, z, weights)
    print(explanation)
    off = difference(pipelined(z, weights), jax.jit(update)(z, weights))
    print(f"the results of `jax.jit` differ by {off:.0e}")
    for name, f in (("jhost", pipelined), ("jax.jit", jax.jit(update))):
        print(f"{name}: {milliseconds(f, z, weights):.2f} ms", end="")
        if memory := f.lower(z, weights).compile().memory_analysis():
            print(f", {memory.temp_size_in_bytes / 1e6:.2f} MB of temporary memory")
    return explanation


if __name__ == "__main__":
    main()
