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
    """The sizes of an attention, by the letters of JAX's documentation.

    Attributes:
        B: the batch dims.
        N: the heads of queries.
        T: the length of queries.
        K: the heads of keys and values.
        S: the length of keys and values.
        features: of a query and a key, and of a value.
    """

    B: tuple[int, ...]
    N: int
    T: int
    K: int
    S: int
    features: tuple[int, int]


class Maps:
    """The maps of one equation: its factors are batches and groups of heads.

    A group is the heads of queries that share one head of keys and values.  `cut` has
    reducers of the sequences of queries and of keys, which are then two more factors.
    `batch` has reducers of the batch dims, which stay whole without.  A query sees as
    many keys as `left` and `right` say on each side of its own position; None is all.
    `counts` says whether the equation needs the positions of its part.
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
        # Arrays may be empty, and then there are no heads.
        self.group = sizes.N // max(sizes.K, 1)
        self.shared = FactorDim(self.factors.new(sizes.K, heads))
        self.heads = FactorDim(self.shared.factor, self.group)
        self.queries = self.keys = None
        if cut is not None:
            self.queries = FactorDim(self.factors.new(sizes.T, cut[0]))
            self.keys = FactorDim(self.factors.new(sizes.S, cut[1]))

    def of_queries(self) -> Dims:
        """The map of queries, of their results, and of the cotangents of both."""
        return self._in_layout(self.heads, self.queries)

    def of_keys(self) -> Dims:
        """The map of keys, of values, and of their cotangents."""
        return self._in_layout(self.shared, self.keys)

    def of_scores(self, shape: Sequence[int]) -> Dims:
        """The map of what scores take besides, such as a mask; sizes of 1 stretch."""
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
        """The scores made at `shard`: heads of all batches, queries, keys a query."""
        batch = part_shape(self.batch, self.sizes.B, shard)
        times = math.prod(batch) * self.group * shard.size(self.shared.factor)
        rows = _positions(shard, self.queries, self.sizes.T)
        columns = _positions(shard, self.keys, self.sizes.S)
        return times, len(rows), keys_seen(rows, columns, self.left, self.right)

    def _in_blocks(
        self, made: DimRule, blocks: MakeBlocks, combine: Combine | None
    ) -> DimRule:
        """The rule with sequences in parts: how a part runs, and what it must know."""
        assert self.queries is not None
        assert self.keys is not None
        queries, keys = self.queries.factor, self.keys.factor
        window = AttentionWindow(
            queries=queries, keys=keys, left=self.left, right=self.right
        )
        rebind = blocks(
            window=window,
            sizes=(self.sizes.T, self.sizes.S),
            operands=(*made.operands, (self.queries,), (self.keys,)),
            results=made.results,
            combine=combine,
        )
        return dataclasses.replace(
            made,
            rebind=rebind,
            choices=rebind.choices,
            counted=frozenset({queries, keys} if self.counts else ()),
            window=None if window.sees_all else window,
            # Two parts combine by their softmax statistics.  A layout holds one array
            # and no statistics with it, so no collective can combine them.
            unsharded=frozenset({keys}),
            combine=combine,
            reason="a loop can combine the results of parts of the keys, but no "
            "collective can",
        )

    def _in_layout(self, heads: FactorDim, sequence: FactorDim | None) -> Dims:
        dims = (heads, sequence) if self.heads_first else (sequence, heads)
        return *self.batch, *dims, None


def keys_seen(
    queries: np.ndarray, keys: np.ndarray, left: int | None, right: int | None
) -> int:
    """How many of the `keys` a query sees on average; both are positions."""
    # `searchsorted` needs ascending keys, and zigzag order has two stretches of them.
    ordered = np.sort(keys)
    first, last = 0, len(keys)
    if left is not None:
        first = np.searchsorted(ordered, queries - left)
    if right is not None:
        last = np.searchsorted(ordered, queries + right, side="right")
    seen = np.broadcast_to(np.maximum(last - first, 0), queries.shape)
    return int(np.ceil(np.mean(seen))) if len(queries) else 0


def _positions(shard: Shard, dim: FactorDim | None, size: int) -> np.ndarray:
    """The positions in a sequence that `shard`, whose starts are known, works on."""
    if dim is None:
        return np.arange(size)
    starts, here = shard.starts(dim.factor), shard.size(dim.factor)
    local = np.arange(here // len(starts))
    return np.concatenate([start + local for start in starts])
