"""`jhost.dot_product_attention`: what it takes, and what it refuses."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jhost import errors
from jhost._attention.primitives import attention_p
from jhost._attention.written_out import AttentionSettings
from jhost._jax import varying_alike

_LETTERS = {
    "query": "BTNH",
    "key": "BSKH",
    "value": "BSKH",
    "bias": "BNTS",
    "mask": "BNTS",
    "query_seq_lengths": "B",
    "key_value_seq_lengths": "B",
    "query_segment_ids": "BT",
    "key_value_segment_ids": "BS",
}
"""The dims of each array, by the letters of `jax.nn.dot_product_attention`."""

_STRETCHED = "bias", "mask"
"""Any of their dims may have size 1."""


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Computes `jax.nn.dot_product_attention`, and can be pipelined along the keys.

    It runs wherever JAX runs, inside and outside of jhost functions, with derivatives
    of every order and mode.  A backward keeps no scores: it computes them again from
    queries and keys. (Second derivatives keep some.) In a jhost function keys and
    values may be sharded along their sequence.  A stream along it then sends chunks of
    them from device to device: ring attention.

    B is the batch, T and S are the lengths of queries and of keys, N and K their heads,
    and H is the size of a head.  N is a multiple of K, as in grouped-query attention.
    A query that sees no key gives 0, and adds nothing to any gradient. (JAX gives the
    mean of all values, hidden ones included.)

    Args:
        query: floats of shape `(B, T, N, H)`.  You may leave out B in all arrays.
        key: of shape `(B, S, K, H)` and the query's dtype.
        value: of the key's shape and dtype.
        bias: floats of shape `(B, N, T, S)`, which are added to the scaled scores.  Any
            of these sizes may be 1 instead.
        mask: bools of shape `(B, N, T, S)`, True where a query sees a key.  Any of
            these sizes may be 1 instead.
        scale: the factor of the scores; by default `H ** -0.5`.
        is_causal: whether a query sees only keys up to its own position.
        query_seq_lengths: the length of each sequence of queries; of shape `(B,)` and
            dtype int32.  Queries behind the length see no key.
        key_value_seq_lengths: the length of each sequence of keys, of the same shape
            and dtype.  Keys behind the length are hidden.
        local_window_size: how many keys a query sees to the left and to the right of
            its own position.  One int stands for both sides.
        query_segment_ids: integers of shape `(B, T)` and any dtype.  Several sequences
            are packed into one, and each query sees only keys with its own number.
        key_value_segment_ids: integers of shape `(B, S)` and the same dtype.

    Returns:
        The result for each query, of `query`'s shape and dtype.  Scores and sums over
        the keys are at least float32, and float64 if the arrays are float64.

    Raises:
        OperandsError: shapes or dtypes do not fit, or only one side has segments.
        ArgumentError: the scale is not a number, or the window is not a size.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import jhost
        >>> from jax.sharding import PartitionSpec as P
        >>> @jhost.jit(
        ...     mesh=jax.make_mesh((1,), ("sp",)),
        ...     in_shardings=P(None, "sp"),
        ...     out_shardings=P(None, "sp"),
        ...     pipeline="p2p",
        ... )
        ... def ring(q, k, v):  # each device has a part of the sequence
        ...     k = jhost.stream(k, axis=1)
        ...     return jhost.dot_product_attention(q, k, v, is_causal=True)
        >>> x = jnp.ones((2, 8, 4, 16))
        >>> ring(x, x[:, :, :2], x[:, :, :2]).shape
        (2, 8, 4, 16)
    """
    given = dict(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=mask,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
    )
    arrays = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    shape = arrays["query"].shape
    arrays = {name: _with_batch(name, x) for name, x in arrays.items()}
    _check(arrays)
    left, right = _window(local_window_size)
    if is_causal:
        # A causal mask is a window that ends at the query itself: one bound for both.
        right = 0 if right is None else min(right, 0)
    settings = AttentionSettings(
        scale=_scale(scale, shape[-1]),
        left=left,
        right=right,
        # In the order of `given`, behind query, key and value.
        more=tuple(arrays)[3:],
        # A param: a backward may be traced under another setting.
        precision=jax.config.jax_default_matmul_precision,
    )
    # In a `jax.shard_map` each may vary along other axes, and a primitive wants the
    # same.
    operands = varying_alike(list(arrays.values()))
    found, _ = attention_p.bind(*operands, settings=settings)
    return found.reshape(shape)


def _with_batch(name: str, x: jax.Array) -> jax.Array:
    """`x` with a batch dim, and dims of size 1 where JAX does without them."""
    missing = len(_LETTERS[name]) - x.ndim
    return jnp.expand_dims(x, range(missing)) if missing > 0 else x


def _window(size: Any) -> tuple[int | None, int | None]:
    """How far a query sees to the left and to the right."""
    sides = size if isinstance(size, tuple) else (size, size)
    if size is None:
        return None, None
    integers = all(isinstance(each, numbers.Integral) for each in sides)
    if len(sides) != 2 or not integers:
        raise errors.ArgumentError(
            "jhost.dot_product_attention takes an int, two of them or None as "
            f"local_window_size, but got {size!r}."
        )
    return int(sides[0]), int(sides[1])


def _scale(scale: Any, size: int) -> float:
    if scale is None:
        # A head may have no features, and Python refuses `0 ** -0.5`.
        return max(size, 1) ** -0.5
    try:
        return float(scale)
    except (TypeError, jax.errors.ConcretizationTypeError) as error:
        raise errors.ArgumentError(
            f"jhost.dot_product_attention takes a number as scale, but got {scale!r}. "
            "If it is an array, multiply the query by it, and use scale=1."
        ) from error


def _check(arrays: Mapping[str, jax.Array]) -> None:
    if offenders := [*_offenders(arrays)]:
        raise errors.OperandsError(
            "jhost.dot_product_attention got arrays that do not fit together. The "
            "letters are those of jax.nn.dot_product_attention: batch B, lengths T and "
            "S, heads N and K, and features H.",
            offenders,
        )


def _offenders(arrays: Mapping[str, jax.Array]) -> Iterator[str]:
    query, key = arrays["query"], arrays["key"]
    sizes: dict[str, int] = {}
    # Only from arrays that have all dims: others are offenders themselves.
    for name in ("query", "key"):
        if arrays[name].ndim == 4:
            # The query comes first, and its sizes stay: others are measured by it.
            sizes = dict(zip(_LETTERS[name], arrays[name].shape, strict=True)) | sizes
    for name, x in arrays.items():
        yield from _shape_offenders(name, x.shape, sizes)
        yield from _dtype_offenders(name, x.dtype, query.dtype)
    if {"N", "K"} <= sizes.keys() and sizes["N"] % max(sizes["K"], 1):
        yield (
            f"query has {sizes['N']} heads, which is no multiple of the {sizes['K']} "
            f"that key has: their shapes are {query.shape} and {key.shape}"
        )
    for name in ("query_segment_ids", "key_value_segment_ids"):
        if name not in arrays and any("segment" in other for other in arrays):
            yield f"{name} is missing: segments are compared"


def _shape_offenders(
    name: str, shape: Sequence[int], sizes: Mapping[str, int]
) -> Iterator[str]:
    letters = _LETTERS[name]
    if len(shape) != len(letters):
        yield f"{name} has shape {shape}, but needs the dims {', '.join(letters)}"
        return
    stretched = name in _STRETCHED
    wrong = [
        f"{letter} is {sizes[letter]}"
        for letter, size in zip(letters, shape, strict=True)
        if letter in sizes
        # JAX stretches a bias or a mask along any dim of size 1.
        if size != sizes[letter] and not (stretched and size == 1)
    ]
    if wrong:
        more = ", each of which may be 1" if stretched else ""
        dims = f"({', '.join(letters)}){more}"
        yield f"{name} has shape {shape} for {dims}, but {' and '.join(wrong)}"


def _dtype_offenders(name: str, dtype: Any, of_query: Any) -> Iterator[str]:
    if name in ("query", "key", "value"):
        if not jnp.issubdtype(dtype, np.floating):
            yield f"{name} is {dtype}, but attention is of floats"
        elif dtype != of_query:
            yield f"{name} is {dtype}, but query is {of_query}: cast one of them"
    elif name == "mask" and dtype != np.bool_:
        yield f"mask is {dtype}, not bool: what is added to scores is a bias"
    elif name.endswith("lengths") and dtype != np.int32:
        yield f"{name} is {dtype}, but lengths are int32"
    elif name.endswith("ids") and not jnp.issubdtype(dtype, np.integer):
        yield f"{name} is {dtype}, but segments are numbered by integers"
