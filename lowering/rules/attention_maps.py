"""The maps of attention: which dims follow batches, heads and sequences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from jhost.lowering.rules.attention_parts import AttentionBlocks
from jhost.lowering.rules.building import Factors
from jhost.lowering.rules.dim_rule import (
    AttentionWindow,
    Combine,
    DimRule,
    Dims,
    FactorDim,
    Shard,
    part_shape,
)
from jhost.lowering.rules.reducers import Reducer

MakeBlocks: TypeAlias = Callable[..., AttentionBlocks]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionSizes:
    """What JAX's letters stand for, of queries (T) and keys (S), and their features."""

    B: tuple[int, ...]
    N: int
    T: int
    K: int
    S: int
    features: tuple[int, int]


class Maps:
    """The maps of one equation: the factors are batches and groups of heads.

    A group are the heads of queries that share one of keys and values.  Where `cut`
    says how each is reduced, the sequences of queries and of keys are two more.  A
    `batch` without reducers is whole.  A query sees keys `left` and `right` of its own
    position, or all of them there; if anything `counts` positions, parts know theirs.
    """

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        heads_first: bool = False,
        batch: Sequence[Reducer | None] | None = None,
        heads: Reducer | None = None,
        cut: tuple[Reducer | None, Reducer] | None = None,
        left: int | None = None,
        right: int | None = None,
        counts: bool = False,
    ) -> None:
        self.sizes, self.heads_first, self.factors = sizes, heads_first, Factors()
        self.left, self.right, self.counts = left, right, counts
        self.batch: Dims = (None,) * len(sizes.B)
        if batch is not None:
            pairs = zip(sizes.B, batch, strict=True)
            self.batch = tuple(FactorDim(self.factors.new(*pair)) for pair in pairs)
        # There may be no heads: arrays may be empty.
        self.group = sizes.N // max(sizes.K, 1)
        self.shared = FactorDim(self.factors.new(sizes.K, heads))
        self.heads = FactorDim(self.shared.factor, self.group)
        self.queries = self.keys = None
        if cut is not None:
            self.queries = FactorDim(self.factors.new(sizes.T, cut[0]))
            self.keys = FactorDim(self.factors.new(sizes.S, cut[1]))

    def of_queries(self) -> Dims:
        """The map of queries, of what they find, and of the cotangents of both."""
        return self._in_layout(self.heads, self.queries)

    def of_keys(self) -> Dims:
        """The map of keys, of values, and of their cotangents."""
        return self._in_layout(self.shared, self.keys)

    def of_scores(self, shape: Sequence[int]) -> Dims:
        """The map of what each score has, which a size of 1 stretches."""
        sizes = self.sizes
        followed = zip(
            (*self.batch, self.heads, self.queries, self.keys),
            shape,
            (*sizes.B, sizes.N, sizes.T, sizes.S),
            strict=True,
        )
        # A bias of one head or one query is read whole by each part.
        return tuple(dim if size == full else None for dim, size, full in followed)

    def rule(
        self,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        depth: int,
        blocks: MakeBlocks,
        combine: Combine | None = None,
    ) -> DimRule:
        """The rule, with the work of a product of that depth for each head."""

        def matmul(shard: Shard) -> tuple[int, int, int, int]:
            return *self.scores(shard), depth

        made = self.factors.rule(operands, results)
        made = dataclasses.replace(made, matmul=matmul)
        return self._in_blocks(made, blocks, combine) if self.queries else made

    def scores(self, shard: Shard) -> tuple[int, int, int]:
        """How many are made at a place: heads of all batches, queries, keys of each."""
        batch = part_shape(self.batch, self.sizes.B, shard)
        times = math.prod(batch) * self.group * shard.size(self.shared.factor)
        rows = _positions(shard, self.queries, self.sizes.T)
        columns = _positions(shard, self.keys, self.sizes.S)
        return times, len(rows), keys_seen(rows, columns, self.left, self.right)

    def _in_blocks(
        self, made: DimRule, blocks: MakeBlocks, combine: Combine | None
    ) -> DimRule:
        """The rule on parts of the sequences, which a window counts."""
        assert self.queries is not None
        assert self.keys is not None
        queries, keys = self.queries.factor, self.keys.factor
        window = AttentionWindow(
            queries=queries, keys=keys, left=self.left, right=self.right
        )
        return dataclasses.replace(
            made,
            rebind=blocks(
                window=window,
                sizes=(self.sizes.T, self.sizes.S),
                operands=(*made.operands, (self.queries,), (self.keys,)),
                results=made.results,
                combine=combine,
            ),
            counted=frozenset({queries, keys} if self.counts else ()),
            window=None if window.sees_all else window,
            # No layout holds softmax statistics, by which the results of two parts
            # combine.
            unsharded=frozenset({keys}),
            combine=combine,
            reason="loops put parts of the keys together, and no communication",
        )

    def _in_layout(self, heads: FactorDim, sequence: FactorDim | None) -> Dims:
        dims = (heads, sequence) if self.heads_first else (sequence, heads)
        return *self.batch, *dims, None


def keys_seen(
    queries: np.ndarray, keys: np.ndarray, left: int | None, right: int | None
) -> int:
    """How many of the keys at some positions queries at others see, on the average."""
    # In zigzag order a part's positions do not ascend.
    ordered = np.sort(keys)
    first, last = 0, len(keys)
    if left is not None:
        first = np.searchsorted(ordered, queries - left)
    if right is not None:
        last = np.searchsorted(ordered, queries + right, side="right")
    seen = np.broadcast_to(np.maximum(last - first, 0), queries.shape)
    return int(np.ceil(np.mean(seen))) if len(queries) else 0


def _positions(shard: Shard, dim: FactorDim | None, size: int) -> np.ndarray:
    """The positions in a sequence that are worked on at a place that is known."""
    if dim is None:
        return np.arange(size)
    starts, here = shard.starts(dim.factor), shard.size(dim.factor)
    local = np.arange(here // len(starts))
    return np.concatenate([start + local for start in starts])
