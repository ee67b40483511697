"""Dim rules of cuDNN's attention: batches and groups of heads are worked on apart.

JAX binds wrappers, which XLA partitions, around the kernels.  Where all mesh axes are
manual, as in what jhost emits, a wrapper is lowered to its kernel for the shapes that
it is bound to, so both have one rule.  Sequences and features stay whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jhost.lowering.rules.dim_rule import (
    DimRule,
    Dims,
    FactorDim,
    Factors,
    Place,
    Reducer,
    rule,
    shape_of,
    without_factors,
)

_BNTH = 1  # of JAX's two layouts; the other is BTNH


@dataclasses.dataclass(frozen=True, slots=True)
class _Sizes:
    """What JAX's letters stand for, of queries (T) and keys (S), and their features."""

    B: int
    N: int
    T: int
    K: int
    S: int
    features: tuple[int, int]


def _sizes(eqn: JaxprEqn) -> _Sizes:
    query, key, value = (shape_of(v) for v in eqn.invars[:3])
    if not _heads_first(eqn):
        query, key = (_swapped(shape) for shape in (query, key))
    features = query[3], value[3]
    return _Sizes(query[0], query[1], query[2], key[1], key[2], features)


def _swapped(shape: Sequence[Any]) -> tuple[Any, ...]:
    first, second, third, last = shape
    return first, third, second, last


def _heads_first(eqn: JaxprEqn) -> bool:
    return eqn.params["layout"] == _BNTH


class _Maps:
    """The maps of one equation: the factors are the batch and groups of heads.

    A group are the heads of queries that share one of keys and values.
    """

    def __init__(
        self, eqn: JaxprEqn, batch: Reducer | None = None, heads: Reducer | None = None
    ) -> None:
        self.eqn, self.sizes, self.factors = eqn, _sizes(eqn), Factors()
        self.batch = None
        if not _is_paged(eqn):
            self.batch = FactorDim(self.factors.new(self.sizes.B, batch))
        self.group = self.sizes.N // self.sizes.K
        self.keys = FactorDim(self.factors.new(self.sizes.K, heads))
        self.queries = FactorDim(self.keys.factor, self.group)

    def of_queries(self) -> Dims:
        """The map of queries, of what they find, and of the cotangents of both."""
        return self._in_layout((self.batch, self.queries, None, None))

    def of_keys(self) -> Dims:
        """The map of keys, of values, and of their cotangents."""
        return self._in_layout((self.batch, self.keys, None, None))

    def of_statistics(self) -> Dims:
        """The map of the logarithms of what the rows of scores were divided by."""
        return self.batch, self.queries, None

    def of_bias(self, shape: Sequence[int]) -> Dims:
        """The map of a bias, which a size of 1 stretches; one that is not is empty."""
        followed = zip(
            (self.batch, self.queries, None, None),
            shape,
            (self.sizes.B, self.sizes.N, self.sizes.T, self.sizes.S),
            strict=len(shape) > 1,
        )
        return tuple(dim if size == full else None for dim, size, full in followed)

    def of_lengths(self, shape: Sequence[int]) -> Dims:
        """The map of a length for each sequence; where there are none, it is empty."""
        return (self.batch if shape == (self.sizes.B,) else None,)

    def rule(
        self, operands: Sequence[Dims], results: Sequence[Dims], depth: int
    ) -> DimRule:
        """The rule, with the work of a product of that depth for each head."""

        def matmul(place: Place) -> tuple[int, int, int, int]:
            heads = self.group * place.size(self.keys.factor)
            batch = self.sizes.B if self.batch is None else place.size(0)
            return batch * heads, self.sizes.T, self.sizes.S, depth

        made = self.factors.rule(operands, results)
        return dataclasses.replace(made, matmul=matmul)

    def _in_layout(self, dims: Dims) -> Dims:
        return dims if _heads_first(self.eqn) else _swapped(dims)


def _forward_depth(sizes: _Sizes) -> int:
    """Queries times keys, and weights times values."""
    return sum(sizes.features)


def _backward_depth(sizes: _Sizes) -> int:
    """The scores and three gradients, two of them by what keys and queries have."""
    keys, values = sizes.features
    return 3 * keys + 2 * values


# --- In 16 bits ------------------------------------------------------------------- #

# Operands, in the order in which JAX binds them; a result of `score_mod` comes last.
_BIAS, _LENGTHS, _OFFSETS, _TABLE, _STATISTICS = 3, (4, 5), 6, 8, 10


@rule("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")
def attention(eqn: JaxprEqn) -> DimRule:
    """What the queries find, and, for a backward, statistics of each row of scores."""
    reason = _whole_reason(eqn)
    if reason:
        return without_factors(eqn, reason)
    maps = _Maps(eqn)
    results = (maps.of_queries(), maps.of_statistics())[: len(eqn.outvars)]
    return maps.rule(_operands(maps), results, _forward_depth(maps.sizes))


@rule("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper")
def attention_gradients(eqn: JaxprEqn) -> DimRule:
    """The gradient of a bias is summed over all that it was stretched over."""
    reason = _whole_reason(eqn)
    if reason:
        return without_factors(eqn, reason)
    maps = _Maps(eqn, *_bias_reducers(eqn))
    operands = _operands(maps)
    query, key = maps.of_queries(), maps.of_keys()
    operands[_STATISTICS : _STATISTICS + 3] = maps.of_statistics(), query, query
    results = (query, key, key, operands[_BIAS])[: len(eqn.outvars)]
    return maps.rule(operands, results, _backward_depth(maps.sizes))


def _operands(maps: _Maps) -> list[Dims]:
    shapes = [shape_of(v) for v in maps.eqn.invars]
    operands: list[Dims] = [(None,) * len(shape) for shape in shapes]
    operands[:3] = maps.of_queries(), maps.of_keys(), maps.of_keys()
    operands[_BIAS] = maps.of_bias(shapes[_BIAS])
    for position in _LENGTHS:
        operands[position] = maps.of_lengths(shapes[position])
    return operands


def _bias_reducers(eqn: JaxprEqn) -> tuple[Reducer | None, Reducer | None]:
    """Over the batch, and over heads: where the gradient of a bias lacks them."""
    if len(eqn.outvars) < 4:
        return None, None
    batch, heads, *_ = shape_of(eqn.invars[_BIAS])
    sizes = _sizes(eqn)
    return (
        None if batch == sizes.B else "sum",
        None if heads == sizes.N else "sum",
    )


def _is_paged(eqn: JaxprEqn) -> bool:
    """Whether keys and values are blocks, of which a table says whose they are."""
    if "fp8" in eqn.primitive.name:
        return False
    return len(shape_of(eqn.invars[_TABLE])) == 4


def _whole_reason(eqn: JaxprEqn) -> str:
    """Why a kernel cannot work on parts; empty where it can."""
    if eqn.params["dropout_rate"] > 0:
        return "what attention drops is drawn for the whole"
    # The wrapper has the function, the kernel its jaxpr.
    if eqn.params.get("score_mod") or eqn.params.get("score_mod_jaxpr"):
        return "the function of the scores was written for all of them"
    if len(shape_of(eqn.invars[_OFFSETS])) == 2:
        return "sequences are packed, and their offsets are those in the whole"
    return ""


# --- In 8 bits ---------------------------------------------------------------------- #

# The largest magnitudes, which results are scaled by next time, are of all heads.


@rule("dot_product_attention_fp8_fwd", "dot_product_attention_fp8_fwd_wrapper")
def attention_fp8(eqn: JaxprEqn) -> DimRule:
    """The largest magnitudes of scores and results come between the two others."""
    maps = _Maps(eqn, "max", "max")
    query, key = maps.of_queries(), maps.of_keys()
    results = [query, *map(_whole, eqn.outvars[1:3]), maps.of_statistics()]
    return maps.rule(
        [query, key, key, *map(_whole, eqn.invars[3:])],
        results[: len(eqn.outvars)],
        _forward_depth(maps.sizes),
    )


@rule("dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper")
def attention_fp8_gradients(eqn: JaxprEqn) -> DimRule:
    """The largest magnitudes of all gradients, and of the scores', come last."""
    maps = _Maps(eqn, "max", "max")
    query, key = maps.of_queries(), maps.of_keys()
    operands = [query, key, key, query, query, maps.of_statistics()]
    return maps.rule(
        [*operands, *map(_whole, eqn.invars[6:])],
        [query, key, key, *map(_whole, eqn.outvars[3:])],
        _backward_depth(maps.sizes),
    )


def _whole(atom: Any) -> Dims:
    return (None,) * len(shape_of(atom))
