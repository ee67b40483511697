"""The maps of cuDNN's attention: which dims follow batches, heads and sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jhost.lowering.rules.attention_parts import Blocks, is_causal, keys_seen
from jhost.lowering.rules.dim_rule import (
    Causal,
    Combine,
    DimRule,
    Dims,
    FactorDim,
    Factors,
    Place,
    Reducer,
    shape_of,
)

_BNTH = 1  # of JAX's two layouts; the other is BTNH
_TABLE = 8  # the place of a page table among the operands


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """What JAX's letters stand for, of queries (T) and keys (S), and their features."""

    B: int
    N: int
    T: int
    K: int
    S: int
    features: tuple[int, int]


def sizes_of(eqn: JaxprEqn) -> Sizes:
    """The sizes of an equation, whichever its layout."""
    query, key, value = (shape_of(v) for v in eqn.invars[:3])
    if not heads_first(eqn):
        query, key = (_swapped(shape) for shape in (query, key))
    features = query[3], value[3]
    return Sizes(query[0], query[1], query[2], key[1], key[2], features)


def _swapped(shape: Sequence[Any]) -> tuple[Any, ...]:
    first, second, third, last = shape
    return first, third, second, last


def heads_first(eqn: JaxprEqn) -> bool:
    """Whether heads stand before the sequence."""
    return eqn.params["layout"] == _BNTH


class Maps:
    """The maps of one equation: the factors are the batch and groups of heads.

    A group are the heads of queries that share one of keys and values.  Where `cut`
    says how each is reduced, the sequences of queries and of keys are two more.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        batch: Reducer | None = None,
        heads: Reducer | None = None,
        cut: tuple[Reducer | None, Reducer] | None = None,
    ) -> None:
        self.eqn, self.sizes, self.factors = eqn, sizes_of(eqn), Factors()
        self.batch = None
        if not is_paged(eqn):
            self.batch = FactorDim(self.factors.new(self.sizes.B, batch))
        self.group = self.sizes.N // self.sizes.K
        self.shared = FactorDim(self.factors.new(self.sizes.K, heads))
        self.heads = FactorDim(self.shared.factor, self.group)
        self.queries = self.keys = None
        if cut is not None:
            self.queries = FactorDim(self.factors.new(self.sizes.T, cut[0]))
            self.keys = FactorDim(self.factors.new(self.sizes.S, cut[1]))

    def of_queries(self) -> Dims:
        """The map of queries, of what they find, and of the cotangents of both."""
        return self._in_layout((self.batch, self.heads, self.queries, None))

    def of_keys(self) -> Dims:
        """The map of keys, of values, and of their cotangents."""
        return self._in_layout((self.batch, self.shared, self.keys, None))

    def of_statistics(self) -> Dims:
        """The map of the logarithms of what the rows of scores were divided by."""
        return self.batch, self.heads, self.queries

    def of_bias(self, shape: Sequence[int]) -> Dims:
        """The map of a bias, which a size of 1 stretches; one that is not is empty."""
        followed = zip(
            (self.batch, self.heads, self.queries, self.keys),
            shape,
            (self.sizes.B, self.sizes.N, self.sizes.T, self.sizes.S),
            strict=len(shape) > 1,
        )
        return tuple(dim if size == full else None for dim, size, full in followed)

    def of_lengths(self, shape: Sequence[int]) -> Dims:
        """The map of a length for each sequence; where there are none, it is empty."""
        return (self.batch if shape == (self.sizes.B,) else None,)

    def rule(
        self,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        depth: int,
        combine: Combine | None = None,
    ) -> DimRule:
        """The rule, with the work of a product of that depth for each head."""

        def matmul(place: Place) -> tuple[int, int, int, int]:
            heads = self.group * place.size(self.shared.factor)
            batch = self.sizes.B if self.batch is None else place.size(0)
            rows, columns = (
                _positions(place, dim, size)
                for dim, size in (
                    (self.queries, self.sizes.T),
                    (self.keys, self.sizes.S),
                )
            )
            seen = keys_seen(self.eqn, rows, columns)
            return batch * heads, len(rows), seen, depth

        made = self.factors.rule(operands, results)
        made = dataclasses.replace(made, matmul=matmul)
        return self._in_blocks(made, combine) if self.queries else made

    def _in_blocks(self, made: DimRule, combine: Combine | None) -> DimRule:
        """The rule on parts of the sequences, which a causal mask counts."""
        assert self.queries is not None
        assert self.keys is not None
        queries, keys = self.queries.factor, self.keys.factor
        blocks = Blocks(
            queries=queries,
            keys=keys,
            sizes=(self.sizes.T, self.sizes.S),
            operands=made.operands,
            results=made.results,
            combine=combine,
        )
        return dataclasses.replace(
            made,
            rebind=blocks,
            counted=frozenset({queries, keys} if is_causal(self.eqn) else ()),
            causal=self._causal(queries, keys) if is_causal(self.eqn) else None,
            unsharded=frozenset({keys}),
            combine=combine,
            reason="loops put parts of the keys together, and no communication",
        )

    def _causal(self, queries: int, keys: int) -> Causal:
        window = self.eqn.params["sliding_window_length"] or None
        return Causal(queries=queries, keys=keys, window=window)

    def _in_layout(self, dims: Dims) -> Dims:
        return dims if heads_first(self.eqn) else _swapped(dims)


def _positions(place: Place, dim: FactorDim | None, size: int) -> np.ndarray:
    """The positions in a sequence that are worked on at a place that is known."""
    if dim is None:
        return np.arange(size)
    starts, here = place.starts(dim.factor), place.size(dim.factor)
    local = np.arange(here // len(starts))
    return np.concatenate([start + local for start in starts])


def is_paged(eqn: JaxprEqn) -> bool:
    """Whether keys and values are blocks, of which a table says whose they are."""
    if "fp8" in eqn.primitive.name:
        return False
    return len(shape_of(eqn.invars[_TABLE])) == 4
