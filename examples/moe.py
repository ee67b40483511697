"""A mixture of experts: tokens go to their experts and come back, in one loop.

JAX_NUM_CPU_DEVICES=4 python examples/moe.py

Routing is that of GShard: each token of a group goes to two experts, if they have room
for it.  The stream is along the groups.  In a p2p pipeline the tokens for the experts
of one device move there and back while experts work on other tokens.  In a collective
pipeline a chunk of groups is routed, moves to the experts, and moves back, while other
chunks are elsewhere on this way.  On an H200 a collective slows the matmul that runs
beside it, so measure before you keep a loop.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from measure import difference, milliseconds

import jhost

EACH = 2  # experts for a token
PIPELINES: tuple[Literal["p2p", "collective", "off"], ...] = "p2p", "collective", "off"
ROOM = 1.25  # how many tokens an expert has room for, relative to an even spread


def route(x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The place of each token, `[g, t, e, c]`, and its weight."""
    tokens, experts = x.shape[1], router.shape[1]
    room = int(ROOM * EACH * tokens / experts)
    logits = jnp.einsum(
        "gtm,me->gte", x.astype(jnp.float32), router, precision="highest"
    )
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), EACH)
    chosen = jax.nn.one_hot(chosen, experts, dtype=jnp.int32)
    before = jnp.cumsum(chosen.reshape(len(x), -1, experts), axis=1) - 1
    place = jnp.where(chosen == 1, before.reshape(chosen.shape), -1)
    sent = jax.nn.one_hot(place, room, dtype=x.dtype)  # nowhere, where there is no room
    return jnp.sum(sent, axis=2), jnp.einsum(
        "gtk,gtkec->gtec", weights.astype(x.dtype), sent
    )


def moe(
    x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """Tokens `[g, t, m]`; router `[m, e]`; experts `[e, m, f]`, and `[e, f, m]`."""
    sent, weights = route(x, router)
    there = jnp.einsum("gtec,gtm->gecm", sent, x)
    there = jhost.shard(there, P(None, "ep"))  # an all-to-all
    h = jax.nn.silu(jnp.einsum("gecm,emf->gecf", there, gate))
    h = h * jnp.einsum("gecm,emf->gecf", there, up)
    back = jnp.einsum("gecf,efm->gecm", h, down)
    back = jhost.shard(jhost.stream(back, axis=0), P("ep"))  # and another
    return jnp.einsum("gtec,gecm->gtm", weights, back)


def main(argv: Sequence[str] | None = None) -> None:
    """Works on the groups in chunks, by both pipelines, and compares the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", type=int, default=4, help="of the collective one")
    parser.add_argument("--large", action="store_true", help="Mixtral 8x7B's, for GPUs")
    arguments = parser.parse_args(argv)

    devices, large = jax.device_count(), arguments.large
    tokens, model, hidden = (1024, 4096, 14336) if large else (32, 16, 32)
    groups, experts, dtype = 4 * devices, 8, jnp.bfloat16 if large else jnp.float32

    mesh = jax.make_mesh((devices,), ("ep",), axis_types=(AxisType.Auto,))
    specs = P("ep"), P(), P("ep"), P("ep"), P("ep")
    arms = {
        pipeline: jhost.jit(
            moe,
            mesh=mesh,
            in_shardings=specs,
            out_shardings=P("ep"),
            chunks=arguments.chunks if pipeline == "collective" else "auto",
            pipeline=pipeline,
        )
        for pipeline in PIPELINES
    }
    shapes = (
        ((groups, tokens, model), dtype),
        ((model, experts), jnp.float32),
        ((experts, model, hidden), dtype),
        ((experts, model, hidden), dtype),
        ((experts, hidden, model), dtype),
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    args = [
        jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)(
            key, *shape
        )
        for key, shape, sharding in zip(keys, shapes, shardings, strict=True)
    ]
    args[1:] = [weight * weight.shape[-2] ** -0.5 for weight in args[1:]]

    plain = jax.jit(moe)(*args)
    for pipeline in ("p2p", "collective"):
        print(jhost.explain(arms[pipeline], *args))
        off = difference(arms[pipeline](*args), plain)
        print(f"the plain function differs by {off:.0e}")
    arrived = jnp.sum(route(*args[:2])[0], dtype=jnp.float32) / (EACH * groups * tokens)
    print(f"{arrived:.1%} of the choices had room")
    for pipeline, f in arms.items():
        print(f"{pipeline}: {milliseconds(f, *args):.2f} ms")


if __name__ == "__main__":
    main()
