"""Attention as its definition has it, for tests; a query that sees no key finds 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    **masks: Any,
) -> jax.Array:
    """`jhost.dot_product_attention`, with all scores at once, in their dtype."""
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    key, value = (jnp.repeat(x, N // max(K, 1), axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key)
    scores *= H**-0.5 if scale is None else scale
    if bias is not None:
        scores += bias
    seen = jnp.broadcast_to(True if mask is None else mask, scores.shape)
    seen &= jnp.array(visible(B, T, S, **masks))
    some = jnp.any(seen, axis=-1, keepdims=True)
    weights = jax.nn.softmax(jnp.where(seen | ~some, scores, -np.inf))
    weights = jnp.where(seen, weights, 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def visible(
    B: int,
    T: int,
    S: int,
    *,
    is_causal: bool = False,
    local_window_size: Any = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
) -> np.ndarray:
    """Which keys each query sees, one by one."""
    seen = np.ones((B, 1, T, S), bool)
    size = local_window_size
    left, right = (size, size) if isinstance(size, int) else size or (S, S)
    for b, t, s in np.ndindex(B, T, S):
        hidden = (
            (is_causal and s > t)
            or (size is not None and not t - left <= s <= t + right)
            or (query_seq_lengths is not None and t >= query_seq_lengths[b])
            or (key_value_seq_lengths is not None and s >= key_value_seq_lengths[b])
            or (
                query_segment_ids is not None
                and query_segment_ids[b, t] != key_value_segment_ids[b, s]
            )
        )
        seen[b, 0, t, s] = not hidden
    return seen
