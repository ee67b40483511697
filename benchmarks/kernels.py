"""Attention to a part of the keys, with what parts are combined by, and its gradients.

`jax.nn.dot_product_attention` rounds the logarithms of the rows' sums to 16 bits, and
drops their gradient, so whoever combines parts calls the kernels himself: cuDNN's, or
on other devices, and for a reference, attention written out in blocks of queries.

Queries are [rows, heads, size], keys and values likewise with fewer heads, and the
logarithms [heads, rows].
"""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Found: TypeAlias = tuple[jax.Array, jax.Array]
"""What queries find among some keys, and the logarithms of the sums of their rows."""

Gradients: TypeAlias = tuple[jax.Array, ...]
"""By queries, keys and values."""


class Kernels(Protocol):
    """Both passes over some queries and some keys; `causal` counts both from 0."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, causal: bool
    ) -> Found: ...

    def gradients(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        found: Found,
        cotangent: jax.Array,
        causal: bool,
    ) -> Gradients:
        """`found` and the cotangent are those of all keys."""
        ...


def kernels(attention: str) -> Kernels:
    """Those of a model's `attention`."""
    return CuDNN() if attention == "cudnn" else WrittenOut()


def combined(one: Found, other: Found) -> Found:
    """The result for the keys of both, in float32."""
    lse = jnp.logaddexp(one[1], other[1])
    parts = (_weighted(part, lse) for part in (one, other))
    return functools.reduce(jnp.add, parts), lse


def _weighted(part: Found, lse: jax.Array) -> jax.Array:
    found, own = part
    return found.astype(jnp.float32) * jnp.exp(own - lse).T[:, :, None]


class CuDNN:
    """The calls that JAX makes of cuDNN's kernels, taken from a trace of its own."""

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> Found:
        found, lse = _bound("fwd", causal, (q, k, v))
        return found[0], lse[0]

    def gradients(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        found: Found,
        cotangent: jax.Array,
        causal: bool,
    ) -> Gradients:
        of_q, of_k, of_v = _bound(
            "bwd", causal, (q, k, v), found[1], found[0], cotangent
        )
        return of_q[0], of_k[0], of_v[0]


def _bound(
    kernel: str, causal: bool, operands: tuple[jax.Array, ...], *others: jax.Array
) -> Any:
    """A kernel on one sequence; what it takes for masks and lengths stays empty."""

    def both(*operands: jax.Array) -> Any:
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn"
        )
        result, pull = jax.vjp(attend, *operands)
        return result, pull(result)

    given = [x[None] for x in operands]
    eqns = jax.make_jaxpr(both)(*given).eqns
    (eqn,) = [eqn for eqn in eqns if kernel in eqn.primitive.name]
    rest = [x[None] for x in others]
    unused = len(eqn.invars) - len(given) - len(rest)
    empty = jnp.zeros(0, given[0].dtype)
    return eqn.primitive.bind(*given, *[empty] * unused, *rest, **eqn.params)


class WrittenOut:
    """Softmax and matmuls, a block of queries at a time, in float32 between them."""

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> Found:
        def block(part: tuple[jax.Array, jax.Array]) -> Found:
            scores = _scores(*part, k, causal)
            lse = jax.nn.logsumexp(scores, axis=-1)
            weights = jnp.exp(scores - lse[..., None]).astype(v.dtype)
            found = jnp.einsum("kgqs,skh->qkgh", weights, v)
            return found.reshape(part[0].shape), lse

        found, lse = lax.map(block, _blocks(q))
        return found.reshape(q.shape), _rows_last(lse, q)

    def gradients(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        found: Found,
        cotangent: jax.Array,
        causal: bool,
    ) -> Gradients:
        wide = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

        def block(sums: Any, parts: Any) -> Any:
            queries, at, result, given, lse = parts
            scores, pull = jax.vjp(
                lambda queries, k: _scores(queries, at, k, causal), queries, k
            )
            weights = jnp.exp(scores - _by_groups(lse, k)[..., None])
            given, result = (
                x.reshape(*_grouped(queries, k).shape) for x in (given, result)
            )
            rows = jnp.sum(
                given.astype(jnp.float32) * result.astype(jnp.float32), axis=-1
            )
            of_weights = wide("qkgh,skh->kgqs", given, v)
            shifted = of_weights - jnp.moveaxis(rows, 0, -1)[..., None]
            of_queries, of_k = pull(weights * shifted)
            of_v = wide("kgqs,qkgh->skh", weights.astype(given.dtype), given)
            sums = sums[0] + of_k.astype(jnp.float32), sums[1] + of_v
            return sums, of_queries

        zeros = jnp.zeros(k.shape, jnp.float32)
        queries, at = _blocks(q)
        parts = queries, at, _blocks(found[0])[0], _blocks(cotangent)[0]
        lse = jnp.moveaxis(found[1].reshape(len(found[1]), *at.shape), 1, 0)
        (of_k, of_v), of_q = lax.scan(block, (zeros, zeros), (*parts, lse))
        return of_q.reshape(q.shape), of_k.astype(k.dtype), of_v.astype(v.dtype)


def _blocks(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows in blocks, and their positions."""
    size = math.gcd(len(x), 64)
    return x.reshape(-1, size, *x.shape[1:]), jnp.arange(len(x)).reshape(-1, size)


def _grouped(q: jax.Array, k: jax.Array) -> jax.Array:
    """Queries `[q, k, g, h]`, by the keys that a group of heads shares."""
    return q.reshape(len(q), k.shape[1], -1, q.shape[-1])


def _by_groups(lse: jax.Array, k: jax.Array) -> jax.Array:
    return lse.reshape(k.shape[1], -1, lse.shape[-1])


def _scores(q: jax.Array, at: jax.Array, k: jax.Array, causal: bool) -> jax.Array:
    scores = jnp.einsum(
        "qkgh,skh->kgqs", _grouped(q, k), k, preferred_element_type=jnp.float32
    )
    scores = scores * (q.shape[-1] ** -0.5)
    if not causal:
        return scores
    return jnp.where(at[:, None] >= jnp.arange(len(k)), scores, -jnp.inf)


def _rows_last(lse: jax.Array, q: jax.Array) -> jax.Array:
    """Of blocks `[block, k, g, row]`: `[heads, rows]`."""
    return jnp.moveaxis(lse, 0, 2).reshape(q.shape[1], len(q))
