"""Dim rules of `jhost.dot_product_attention`, which is written out in JAX.

They are like the rules of cuDNN's kernels (`attention.py`), but a part gets the
positions of its queries and keys.  So windows and lengths count in the whole array, and
segment ids are cut as queries and keys are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from jax import lax
from jax.extend.core import JaxprEqn

from jhost._attention import written_out
from jhost._attention.written_out import AttentionSettings, width
from jhost._jax import aval_of
from jhost.lowering.rules.attention import backward_depth, forward_depth
from jhost.lowering.rules.attention_maps import AttentionSizes, Maps
from jhost.lowering.rules.attention_parts import AttentionBlocks, weighted
from jhost.lowering.rules.dim_rule import Combine, DimRule, Dims, Shard, shape_of
from jhost.lowering.rules.position_runs import PositionRun, blocks_of, sees
from jhost.lowering.rules.reducers import Reducer
from jhost.lowering.rules.registry import rule


@rule("dot_product_attention")
def attention(eqn: JaxprEqn) -> DimRule:
    """The results of the queries, and the logarithm of each row's sum."""
    maps = _maps(eqn, cut=(None, "softmax"))
    results, depth = _of_results(maps), forward_depth(maps.sizes)
    combine = weighted(heads_first=True)  # as the sums stand
    return _rule(eqn, maps, written_out.attention, (), results, depth, combine)


@rule("dot_product_attention_jvp")
def attention_jvp(eqn: JaxprEqn) -> DimRule:
    """The tangents of both results; those for parts of the keys add up."""
    maps = _maps(eqn, cut=(None, "sum"))
    operands, results = _operands(eqn, maps), _of_results(maps)
    more = [*results, *(operands[number] for number in eqn.params["argnums"])]
    depth = backward_depth(maps.sizes)
    return _rule(eqn, maps, written_out.attention_jvp, more, results, depth)


@rule("dot_product_attention_vjp")
def attention_vjp(eqn: JaxprEqn) -> DimRule:
    """The gradient of a bias is summed over the dims along which it was stretched."""
    maps = _maps(eqn, _bias_reducers(eqn), cut=("sum", "sum"))
    operands, given = _operands(eqn, maps), _of_results(maps)
    results = [operands[number] for number in eqn.params["argnums"]]
    depth = backward_depth(maps.sizes)
    more = [*given, *given][: len(eqn.invars) - len(operands)]
    return _rule(eqn, maps, written_out.attention_vjp, more, results, depth)


def _rule(
    eqn: JaxprEqn,
    maps: Maps,
    compute: Callable[..., list[Any]],
    more: Sequence[Dims],
    results: Sequence[Dims],
    depth: int,
    combine: Combine | None = None,
) -> DimRule:
    """The rule, with the traffic of scores, which XLA's kernels keep in memory."""
    operands = [*_operands(eqn, maps), *more]
    blocks = partial(WrittenBlocks, compute=compute)
    made = maps.rule(operands, results, depth, blocks, combine)
    rebind = cast(WrittenBlocks, made.rebind)
    dtype = aval_of(eqn.invars[0]).dtype
    # Between the products XLA's kernels move a score three times in the dtype that it
    # is made in, and two or three times as a weight.  The numbers fit times measured on
    # an H200 (docs/attention.md).
    each = 3 * width(dtype).itemsize + (3 if more else 2) * dtype.itemsize

    def matmul(shard: Shard) -> tuple[int, int, int, int]:
        times, rows, seen = maps.scores(shard)
        return times, rows, rebind.made(shard) if seen else 0, depth

    def traffic(shard: Shard) -> int:
        return math.prod(matmul(shard)[:3]) * each

    return dataclasses.replace(made, matmul=matmul, traffic=traffic)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBlocks(AttentionBlocks):
    """Runs `compute`, which masks keys by their positions."""

    compute: Callable[..., list[Any]]

    def as_it_is(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        *args, rows, columns = args
        return self.compute(*args, positions=(rows, columns), **eqn.params)

    def unmasked(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        return self.as_it_is(eqn, args)

    def made(self, shard: Shard) -> int:
        """For how many keys a query's scores are made, on the average: by blocks."""
        here = shard.size(self.queries), shard.size(self.keys)
        if 0 in here or here == self.sizes:
            return here[1]
        rows, columns = blocks_of(self.window, self.sizes, shard)
        made = sum(
            column.size
            for row, column in itertools.product(rows, columns)
            if not sees(self.window, row, column, row.first - column.first)[0]
        )
        return math.ceil(made / len(rows))

    def masked(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        return self.as_it_is(eqn, args)

    def block(
        self, eqn: JaxprEqn, args: Sequence[Any], row: PositionRun, column: PositionRun
    ) -> list[Any]:
        """Nothing is computed where all keys are hidden."""
        hidden, _ = sees(self.window, row, column, row.first - column.first)
        return lax.cond(
            hidden,
            lambda *args: self.nothing(eqn, args),
            lambda *args: self.as_it_is(eqn, args),
            *args,
        )


def _maps(
    eqn: JaxprEqn,
    reducers: Sequence[Reducer | None] = (),
    *,
    cut: tuple[Reducer | None, Reducer],
) -> Maps:
    settings: AttentionSettings = eqn.params["settings"]
    (*sizes, T, N, H), (*_, S, K, _) = (shape_of(v) for v in eqn.invars[:2])
    *batch, heads = reducers or (None,) * (len(sizes) + 1)
    return Maps(
        AttentionSizes(tuple(sizes), N, T, K, S, (H, H)),
        batch=batch,
        heads=heads,
        cut=cut,
        left=settings.left,
        right=settings.right,
        counts=settings.counts,
    )


def _of_results(maps: Maps) -> list[Dims]:
    """The maps of both results: of the queries, and of the logarithms of sums."""
    found = maps.of_queries()
    return [found, found[:-1]]


def _operands(eqn: JaxprEqn, maps: Maps) -> list[Dims]:
    """The maps of queries, keys, values, and the operands that mask them."""
    settings: AttentionSettings = eqn.params["settings"]
    queries, keys = maps.of_queries(), maps.of_keys()
    of: dict[str, Dims] = {
        "query_seq_lengths": maps.batch,
        "key_value_seq_lengths": maps.batch,
        "query_segment_ids": (*maps.batch, maps.queries),
        "key_value_segment_ids": (*maps.batch, maps.keys),
    }
    shapes = map(shape_of, eqn.invars[3:])
    named = zip(settings.more, shapes, strict=False)  # others follow
    more = (of[name] if name in of else maps.of_scores(s) for name, s in named)
    return [queries, keys, keys, *more]


def _bias_reducers(eqn: JaxprEqn) -> list[Reducer | None]:
    """The reducers over batch and heads, for dims that a bias's gradient lacks."""
    bias = eqn.params["settings"].bias
    *full, _, heads, _ = shape_of(eqn.invars[0])
    full.append(heads)
    if bias not in eqn.params["argnums"]:
        return [None] * len(full)
    pairs = zip(shape_of(eqn.invars[bias]), full, strict=False)  # not over sequences
    return [None if size == most else "sum" for size, most in pairs]
