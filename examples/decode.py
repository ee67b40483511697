"""Decoding: a Llama whose cache of keys and values is sharded by heads or by positions.

JAX_NUM_CPU_DEVICES=4 python examples/decode.py --cache positions

The model reads a prompt at once.  Each token after it writes one position of the cache.
By heads, each device has all positions of some heads, and weights are sharded likewise.
By positions, each device has some positions of all heads.  It writes these positions,
and attends to its own keys.  The results of all devices are added up.  The cache never
moves.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import small_llama as llama
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from measure import difference
from small_llama import LARGE, SMALL, Params, Sizes

import jhost

Cache: TypeAlias = dict[str, jax.Array]
By: TypeAlias = Literal["heads", "positions"]

# [layers, batch, positions, heads, size]
CACHES: dict[By, P] = {
    "heads": P(None, None, None, "tp"),
    "positions": P(None, None, "tp"),
}
COLUMNS, ROWS = P(None, None, "tp"), P(None, "tp")
PARAMS: Params = {
    "embedding": P(),
    "layers": {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), COLUMNS),
        **dict.fromkeys(("out", "down"), ROWS),
        **dict.fromkeys(("attention_norm", "mlp_norm"), P()),
    },
    "norm": P(),
    "logits": P(None, "tp"),
}


def specs_of(by: By) -> Params:
    """The shardings of the parameters.

    If the cache is sharded by positions, each device needs the weights of all heads.
    """
    if by == "heads":
        return PARAMS
    whole = dict.fromkeys(("query", "key", "value", "out"), P())
    return PARAMS | {"layers": PARAMS["layers"] | whole}


def attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array
) -> jax.Array:
    """Attends to a cache.  The first query stands at `position`.

    Each query sees the positions up to its own.
    """
    batch, tokens, heads, size = q.shape
    q = q.reshape(batch, tokens, keys.shape[2], -1, size)
    scores = jnp.einsum("btkgs,bpks->btkgp", q, keys) * size**-0.5
    seen = jnp.arange(keys.shape[1]) <= (position + jnp.arange(tokens))[:, None]
    scores = jnp.where(seen[:, None, None], scores.astype(jnp.float32), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    mixed = jnp.einsum("btkgp,bpks->btkgs", weights, values)
    return mixed.reshape(batch, tokens, heads * size)


def step(
    sizes: Sizes,
    spec: P,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    position: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Returns the cache with the tokens from `position` on, and the next token."""

    def layer(x: jax.Array, given: tuple[Params, Cache]) -> tuple[jax.Array, Cache]:
        w, cache = given
        normal = llama.rms_norm(x, w["attention_norm"])
        positions = position + jnp.arange(x.shape[1])
        q, k, v = llama.heads_of(sizes, normal, w, positions)
        cache = {
            name: constrain(
                jax.lax.dynamic_update_slice_in_dim(cache[name], new, position, axis=1),
                P(*spec[1:]),
            )
            for name, new in (("keys", k), ("values", v))
        }
        x = x + attend(q, cache["keys"], cache["values"], position) @ w["out"]
        return x + llama.swiglu(llama.rms_norm(x, w["mlp_norm"]), w), cache

    x, cache = jax.lax.scan(
        layer, params["embedding"][tokens], (params["layers"], cache)
    )
    logits = llama.rms_norm(x[:, -1], params["norm"]) @ params["logits"]
    return cache, jnp.argmax(logits, axis=-1)[:, None]


def decoded(
    jitted: Any,
    params: Params,
    cache: Cache,
    prompt: jax.Array,
    count: int,
    given: np.ndarray | None = None,
) -> tuple[Cache, np.ndarray]:
    """Returns the cache at the end, and the `count` tokens chosen behind a prompt.

    It goes on with the tokens that are `given`, if any, whatever it chose.
    """
    cache, token = jitted(params, cache, prompt, 0)
    tokens = [token]
    for n in range(count - 1):
        token = token if given is None else given[:, n : n + 1]
        cache, token = jitted(params, cache, token, prompt.shape[1] + n)
        tokens.append(token)
    return cache, np.concatenate(tokens, axis=1)


def main(argv: Sequence[str] | None = None) -> jhost.Explanation:
    """Decodes with jhost and without, and returns the explanation of one token."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", choices=CACHES, default="heads")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--large", action="store_true", help="Llama-3 8B's, for GPUs")
    arguments = parser.parse_args(argv)

    sizes = LARGE if arguments.large else SMALL
    batch, read, places = (16, 1024, 4096) if arguments.large else (2, 16, 96)
    devices = jax.devices()[: sizes.kv_heads]
    mesh = jax.make_mesh(
        (len(devices),), ("tp",), axis_types=(AxisType.Auto,), devices=devices
    )
    spec, specs = CACHES[arguments.cache], specs_of(arguments.cache)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)

    params = jax.jit(
        functools.partial(llama.first_params, sizes), out_shardings=placed(specs)
    )(jax.random.key(0))
    prompt = jax.random.randint(jax.random.key(1), (batch, read), 0, sizes.vocab)
    shape = sizes.layers, batch, places, sizes.kv_heads, sizes.head
    caches: Any = {"keys": spec, "values": spec}

    def empty() -> Cache:
        return {
            name: jnp.zeros(shape, sizes.dtype, device=placed(spec)) for name in caches
        }

    function = functools.partial(step, sizes, spec)
    with jax.set_mesh(mesh):
        jitted = jhost.jit(
            function,
            mesh=mesh,
            in_shardings=(specs, caches, P(), P()),
            out_shardings=(caches, P()),
            donate_argnums=1,
        )
        count = arguments.tokens
        cache, tokens = decoded(jitted, params, empty(), prompt, count)
        # With roundings of its own `jax.jit` would choose another token soon.
        want, plain = decoded(jax.jit(function), params, empty(), prompt, count, tokens)
        explanation = jhost.explain(jitted, params, cache, prompt[:, :1], read)
        print(explanation)
        same = np.mean(tokens == plain)
        print(f"{same:.0%} of {tokens.size} tokens are those of `jax.jit`")
        print(f"the caches differ by {difference(cache, want):.0e}")
        moved = sum(row.bytes for row in explanation.communications)
        held = sum(x.nbytes for x in jax.tree.leaves(cache)) // mesh.size
        print(f"a token moves {moved:,} bytes to each device, which holds {held:,}")
    return explanation


if __name__ == "__main__":
    main()
