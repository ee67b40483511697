"""What attention, its tangents and its cotangents are, written out in JAX.

All three have the operands `query, key, value, *settings.more`, whose leading dims are
a batch.  What queries find comes with the logarithm of the sum of their scores'
exponentials.  Derivatives have both as operands, for all keys, then tangents or
cotangents; they make the scores again.

Each works on some of the queries and of the keys, which stand at `positions` in their
sequences, and gives results as wide as scores are: float32 at least.  The logarithms
put results of parts of the keys together.  Derivatives of parts add up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jhost._dtypes import summed_in

Positions: TypeAlias = tuple[Any, Any]
"""Of queries and of keys, int32, one each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSettings:
    """What attention is to do, but for its arrays.

    A query sees keys as far `left` and `right` of its own position, or all of them
    there.  `more` names the operands that follow queries, keys and values.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    more: tuple[str, ...] = ()
    precision: Any = None

    @property
    def counts(self) -> bool:
        """Whether it matters where in their sequences queries and keys stand."""
        limited = self.left is not None or self.right is not None
        return limited or any(name.endswith("lengths") for name in self.more)

    @property
    def bias(self) -> int | None:
        """Which operand is the bias, if there is one."""
        return 3 + self.more.index("bias") if "bias" in self.more else None


def width(dtype: Any) -> np.dtype:
    """The dtype of scores between queries and keys of some dtype."""
    return summed_in(dtype)


def attention(
    *operands: Any, settings: AttentionSettings, positions: Positions | None = None
) -> list[Any]:
    """What queries find, and the logarithms of the sums; 0 and -inf of no keys."""
    with jax.default_matmul_precision(settings.precision):
        scores = _scores(operands, settings, positions)
        # `initial`, because a part may have no keys at all.
        most = _finite(jnp.max(scores, axis=-1, keepdims=True, initial=-np.inf))
        weights = jnp.exp(scores - most)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights / jnp.where(total == 0, 1, total)
        sums = (most + jnp.log(total))[..., 0]
        return [_found(weights, operands[2]), jnp.swapaxes(sums, -1, -2)]


def attention_jvp(
    *args: Any,
    argnums: Sequence[int],
    settings: AttentionSettings,
    positions: Positions | None = None,
) -> list[Any]:
    """The tangents of both results, from the tangents of the operands `argnums`.

    Of parts of the keys they add up.
    """
    operands, (found, sums, *tangents) = parted(args, settings)
    moving = dict(zip(argnums, tangents, strict=True))
    query, key, value = operands[:3]
    bias = settings.bias
    with jax.default_matmul_precision(settings.precision):
        weights = _weights(operands, sums, settings, positions)
        of_scores = jnp.zeros_like(weights)
        if 0 in moving:
            of_scores += _products(moving[0], key) * settings.scale
        if 1 in moving:
            of_scores += _products(query, moving[1]) * settings.scale
        if bias is not None and bias in moving:
            of_scores += moving[bias].astype(of_scores.dtype)
        of_scores *= weights
        of_sums = jnp.swapaxes(jnp.sum(of_scores, axis=-1), -1, -2)
        found = found.astype(weights.dtype)
        of_found = _found(of_scores, value) - of_sums[..., None] * found
        if 2 in moving:
            of_found += _found(weights, moving[2])
        return [of_found, of_sums]


def attention_vjp(
    *args: Any,
    argnums: Sequence[int],
    settings: AttentionSettings,
    positions: Positions | None = None,
) -> list[Any]:
    """The cotangents of the operands `argnums`, from the results' cotangents.

    The cotangents of the sums count as well; they are 0 if they are not given.
    """
    operands, (found, sums, of_found, *of_sums) = parted(args, settings)
    query, key, value = operands[:3]
    with jax.default_matmul_precision(settings.precision):
        weights = _weights(operands, sums, settings, positions)
        both = (x.astype(weights.dtype) for x in (of_found, found))
        # D of FlashAttention-2 (Dao 2023): made of results, so for all keys at once.
        rows = sum(of_sums) - jnp.sum(math.prod(both), axis=-1)
        of_scores = weights * (_products(of_found, value) + _as_rows(rows))
        made: dict[int, Callable[[], Any]] = {
            0: lambda: _found(of_scores, key) * settings.scale,
            1: lambda: _given(of_scores, query, key) * settings.scale,
            2: lambda: _given(weights, of_found, value),
        }
        if (bias := settings.bias) is not None:
            made[bias] = lambda: _summed_to(operands[bias].shape, of_scores)
        return [made[number]() for number in argnums]


def parted(
    args: Sequence[Any], settings: AttentionSettings
) -> tuple[list[Any], list[Any]]:
    """The operands of attention, and what its derivatives have besides."""
    count = 3 + len(settings.more)
    return [*args[:count]], [*args[count:]]


# --- Scores ----------------------------------------------------------------------- #


def _scores(
    operands: Sequence[Any], settings: AttentionSettings, positions: Positions | None
) -> Any:
    """Of each query and key, by head: `[..., N, T, S]`; -inf where a key is hidden."""
    query, key, _, *rest = operands
    more = dict(zip(settings.more, rest, strict=True))
    scores = _products(query, key) * settings.scale
    if "bias" in more:
        scores += more["bias"].astype(scores.dtype)
    for seen in _masks(scores.shape, settings, more, positions):
        scores = jnp.where(seen, scores, -np.inf)
    return scores


def _masks(
    shape: Sequence[int],
    settings: AttentionSettings,
    more: Mapping[str, Any],
    positions: Positions | None,
) -> Iterator[Any]:
    """What hides keys from queries, each of a shape that stretches to the scores'."""
    if positions is None:
        positions = jnp.arange(shape[-2]), jnp.arange(shape[-1])
    batch = (1,) * (len(shape) - 2)
    rows, columns = (x.astype(np.int32) for x in positions)
    rows, columns = rows.reshape(*batch, -1, 1), columns.reshape(*batch, 1, -1)
    if settings.left is not None:
        yield rows - columns <= settings.left
    if settings.right is not None:
        yield columns - rows <= settings.right  # their sum may be too large
    if "mask" in more:
        yield more["mask"]
    if "query_seq_lengths" in more:
        yield rows < more["query_seq_lengths"][..., None, None, None]
    if "key_value_seq_lengths" in more:
        yield columns < more["key_value_seq_lengths"][..., None, None, None]
    if "query_segment_ids" in more:
        own = more["query_segment_ids"][..., None, :, None]
        yield own == more["key_value_segment_ids"][..., None, None, :]


def _weights(
    operands: Sequence[Any],
    sums: Any,
    settings: AttentionSettings,
    positions: Positions | None,
) -> Any:
    """What each query takes of each key's value; nothing where it sees no key."""
    scores = _scores(operands, settings, positions)
    return jnp.exp(scores - _as_rows(_finite(sums)))


def _finite(x: Any) -> Any:
    return jnp.where(jnp.isneginf(x), 0, x)


def _as_rows(sums: Any) -> Any:
    """What there is of each query, `[..., T, N]`, as the scores' rows."""
    return jnp.swapaxes(sums, -1, -2)[..., None]


# --- Products, by heads and by the groups of them that share one of keys ------------ #

# XLA gives and reads scores with the keys last.  Each product has its operands in the
# order for that, so no scores are transposed.


def _products(query: Any, key: Any) -> Any:
    """The product of each query, `[..., T, N, H]`, with each key, `[..., S, K, H]`."""
    made = jnp.einsum(
        "...kgth,...skh->...kgts",
        _grouped(query, key),
        key,
        preferred_element_type=width(query.dtype),
    )
    return _merged(made, -4)


def _found(weights: Any, value: Any) -> Any:
    """Values by their weights: `[..., N, T, S]`, `[..., S, K, H]`."""
    made = jnp.einsum(
        "...kgts,...skh->...kgth",
        _split(weights, -3, value.shape[-2]).astype(value.dtype),
        value,
        preferred_element_type=weights.dtype,
    )
    return jnp.swapaxes(_merged(made, -4), -2, -3)


def _given(weights: Any, query: Any, key: Any) -> Any:
    """What keys get of queries, by weights: `[..., N, T, S]`, `[..., T, N, H]`."""
    made = jnp.einsum(
        "...kgts,...kgth->...ksh",
        _split(weights, -3, key.shape[-2]).astype(query.dtype),
        _grouped(query, key),
        preferred_element_type=weights.dtype,
    )
    return jnp.swapaxes(made, -2, -3)


def _grouped(query: Any, key: Any) -> Any:
    """Queries by the heads of keys that they share: `[..., K, G, T, H]`."""
    return _split(jnp.swapaxes(query, -2, -3), -3, key.shape[-2])


def _split(x: Any, dim: int, groups: int) -> Any:
    """`x` with so many groups of heads in place of heads."""
    shape, dim = x.shape, dim + x.ndim
    each = shape[dim] // max(groups, 1)
    return x.reshape(*shape[:dim], groups, each, *shape[dim + 1 :])


def _merged(x: Any, dim: int) -> Any:
    """`x` with heads in place of groups of them."""
    shape, dim = x.shape, dim + x.ndim
    heads = math.prod(shape[dim : dim + 2])
    return x.reshape(*shape[:dim], heads, *shape[dim + 2 :])


def _summed_to(shape: Sequence[int], x: Any) -> Any:
    """The sums of `x` over the dims along which an array of `shape` was stretched."""
    pairs = zip(shape, x.shape, strict=True)
    stretched = tuple(n for n, (size, full) in enumerate(pairs) if size != full)
    return jnp.sum(x, axis=stretched, keepdims=True)
