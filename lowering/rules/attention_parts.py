"""Attention on a part of the queries and a part of the keys.

The result for some of the keys comes with the logarithm of each row's sum of
exponentials.  Two such results are weighted by these sums (FlashAttention, Dao et al.
2022, section 3.1).  A backward gets the logarithms for all keys, so its parts add up.

Positions of queries and of keys are cut into runs, and each pair of runs is a block.  A
hidden block is not computed.  One that is seen whole needs no mask.  Other pieces mask
keys one by one, and those on the diagonal have the mask of the whole.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._dtypes import summed_in
from jhost._jax import aval_of
from jhost.lowering.rules.dim_rule import AttentionWindow, Combine, Dims, Shard
from jhost.lowering.rules.position_runs import PositionRun, blocks_of, sees

PartKind: TypeAlias = Literal["whole", "as it is", "halves", "masked", "blocks"]


@functools.cache
def weighted(heads_first: bool) -> Combine:
    """How results for two parts of the keys, with their logarithms, become one."""

    def combine(held: Sequence[Any], new: Sequence[Any]) -> tuple[Any, Any]:
        (one, log_one), (other, log_other) = held, new
        one, other = (x.astype(log_one.dtype) for x in (one, other))
        most = jnp.maximum(log_one, log_other)
        # Where no key was seen so far, -inf less -inf would be NaN.
        most = jnp.where(jnp.isneginf(most), 0, most)
        sums = jnp.exp(log_one - most), jnp.exp(log_other - most)
        total = sums[0] + sums[1]
        shares = [each / jnp.where(total == 0, 1, total) for each in sums]
        if not heads_first:
            shares = [jnp.swapaxes(share, 1, 2) for share in shares]
        found = one * shares[0][..., None] + other * shares[1][..., None]
        return found, most + jnp.log(total)

    return combine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlocks(abc.ABC):
    """The rebind of attention that is cut along the factors of a `window`.

    Attributes:
        window: the factors of queries and keys, and how far a query sees.
        sizes: the queries and keys of the whole array.
        operands: the map of each operand.  The last two operands are the positions of
            queries and of keys in the whole array, in ascending order.
        results: the map of each result.
        combine: makes one result of two for parts of the keys; None adds them up.
    """

    window: AttentionWindow
    sizes: tuple[int, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    combine: Combine | None = None

    @abc.abstractmethod
    def as_it_is(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """The results where queries and keys of the part begin at one position."""

    @abc.abstractmethod
    def unmasked(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """The results where no key is hidden from any query of the part."""

    @abc.abstractmethod
    def masked(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """The results of any part: each key is masked by its position."""

    def whole(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """The results of all queries and all keys."""
        return self.as_it_is(eqn, args)

    def __call__(
        self, eqn: JaxprEqn, args: Sequence[Any], shard: Shard
    ) -> Sequence[Any]:
        positions = map(shard.positions, (self.queries, self.keys))
        outs = self.on_parts(eqn, [*args, *positions], shard)
        if shard.accumulator is not None:
            return outs  # an accumulator takes sums that are not rounded yet
        dtypes = [aval_of(var).dtype for var in eqn.outvars]
        return [*map(lax.convert_element_type, outs, dtypes)]

    @property
    def queries(self) -> int:
        return self.window.queries

    @property
    def keys(self) -> int:
        return self.window.keys

    def cut(
        self, args: Sequence[Any], factor: int, start: int, size: int
    ) -> Sequence[Any]:
        """The operands of a part of a factor."""
        dims = [_dim_of(mapped, factor) for mapped in self.operands]
        return [
            x if dim is None else lax.slice_in_dim(x, start, start + size, axis=dim)
            for x, dim in zip(args, dims, strict=True)
        ]

    def on_parts(
        self, eqn: JaxprEqn, args: Sequence[Any], shard: Shard
    ) -> Sequence[Any]:
        """The results of a part, by the way that costs least where the part stands."""
        match self.kind(shard):
            case "whole":
                return self.whole(eqn, args)
            case "as it is":
                return self.as_it_is(eqn, args)
            case "halves":
                both = self.queries, self.keys
                first, *_ = map(operator.sub, *map(shard.starts, both))
                return self.halves(eqn, args, shard.size(self.queries) // 2, first)
            case "masked":
                return self.masked(eqn, args)
            case "blocks":
                rows, columns = blocks_of(self.window, self.sizes, shard)
                return self.along(
                    self.queries, [self.row(eqn, args, row, columns) for row in rows]
                )

    def kind(self, shard: Shard) -> PartKind:
        """How a part is computed."""
        here = shard.size(self.queries), shard.size(self.keys)
        if here == self.sizes:
            return "whole"
        # Without a mask positions do not matter, so a part runs like the whole.
        if self.window.sees_all:
            return "as it is"
        # All that a device has in zigzag order: two halves, one early and one late.
        if self.sizes == tuple(size * shard.zigzag for size in here):
            return "halves"
        return "masked" if 0 in here else "blocks"

    def choices(self, shard: Shard) -> int:
        """How many branches a part chooses when it runs, because devices differ."""
        match self.kind(shard):
            case "halves":
                return 1
            case "blocks" if shard.varies(self.queries) or shard.varies(self.keys):
                rows, columns = blocks_of(self.window, self.sizes, shard)
                return len(rows) * len(columns)
            case _:
                return 0

    def seen(self, args: Sequence[Any]) -> Any:
        """Which queries see which keys: a mask of queries by keys."""
        *_, rows, columns = args
        behind = rows[:, None] - columns
        seen = jnp.ones(behind.shape, bool)
        if (left := self.window.left) is not None:
            seen &= behind <= left
        if (right := self.window.right) is not None:
            seen &= behind >= -right
        return seen

    def halves(
        self, eqn: JaxprEqn, args: Sequence[Any], half: int, distance: Any
    ) -> Sequence[Any]:
        """The results of one device's queries and one device's keys, in zigzag order.

        Each device has an early half of positions and a late one.  Keys of a device
        before it: all queries see the early half, and none the late one.  Keys of a
        device behind it: late queries see all of them, and early ones none.  Its own
        keys: the causal mask holds as it is.
        """

        def late_queries(*args: Any) -> list[Any]:
            queries = self.cut(args, self.queries, half, half)
            return self.beside_nothing(
                self.queries, self.unmasked(eqn, queries), last=True
            )

        def early_keys(*args: Any) -> list[Any]:
            keys = self.cut(args, self.keys, 0, half)
            return self.beside_nothing(self.keys, self.unmasked(eqn, keys), last=False)

        branches = [late_queries, early_keys, lambda *args: self.as_it_is(eqn, args)]
        return lax.switch(_case(distance), branches, *args)

    def beside_nothing(
        self, factor: int, found: Sequence[Any], last: bool
    ) -> list[Any]:
        """The results of half a factor, and those of hidden keys for the other half."""
        dims = [_dim_of(mapped, factor) for mapped in self.results]
        pairs = zip(found, self.nothing_like(found), strict=True)
        return [
            x if dim is None else lax.concatenate([none, x] if last else [x, none], dim)
            for dim, (x, none) in zip(dims, pairs, strict=True)
        ]

    def row(
        self,
        eqn: JaxprEqn,
        args: Sequence[Any],
        row: PositionRun,
        columns: Sequence[PositionRun],
    ) -> Sequence[Any]:
        """What a run of queries finds among all runs of keys."""
        args = self.cut(args, self.queries, row.at, row.size)
        blocks = [
            self.block(
                eqn, self.cut(args, self.keys, column.at, column.size), row, column
            )
            for column in columns
        ]
        return self.along(self.keys, blocks)

    def block(
        self, eqn: JaxprEqn, args: Sequence[Any], row: PositionRun, column: PositionRun
    ) -> Sequence[Any]:
        """What a run of queries finds among a run of keys."""
        # Of two scalars XLA finds the difference of equal ones, and drops branches.
        distance = row.first - column.first
        hidden, seen = sees(self.window, row, column, distance)
        branches = [
            lambda *args: self.nothing(eqn, args),
            lambda *args: self.unmasked(eqn, args),
            lambda *args: self.masked(eqn, args),
        ]
        case = jnp.where(hidden, 0, jnp.where(seen, 1, 2))
        if self.window.right == 0 and row.is_like(column):
            branches.append(lambda *args: self.as_it_is(eqn, args))
            case = jnp.where(distance == 0, 3, case)
        return lax.switch(case, branches, *args)

    def nothing(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """The results of a hidden block."""
        shapes = jax.eval_shape(lambda *args: self.unmasked(eqn, args), *args)
        return self.nothing_like(shapes)

    def nothing_like(self, results: Sequence[Any]) -> list[Any]:
        """The results of hidden keys: 0, and the logarithm of a sum of 0."""
        found, *rest = results
        fill = 0 if self.combine is None else -np.inf
        return [
            jnp.zeros(found.shape, found.dtype),
            *(jnp.full(each.shape, fill, each.dtype) for each in rest),
        ]

    def along(self, factor: int, parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """The results of all parts of a factor, from the results of each part."""
        if len(parts) == 1:
            return parts[0]
        if factor == self.keys and self.combine is not None:
            return functools.reduce(self.combine, parts)
        dims = [_dim_of(mapped, factor) for mapped in self.results]
        each = zip(dims, zip(*parts, strict=True), strict=True)
        return [
            _sum(values) if dim is None else lax.concatenate(values, dim)
            for dim, values in each
        ]


def _case(distance: Any) -> Any:
    """0 where queries stand before keys, 1 behind them, and 2 at the same place."""
    return jnp.where(distance > 0, 1, jnp.where(distance == 0, 2, 0))


def _dim_of(dims: Dims, factor: int) -> int | None:
    found = [n for n, dim in enumerate(dims) if dim and dim.factor == factor]
    return found[0] if found else None


def _sum(parts: Sequence[Any]) -> Any:
    # Wide: the sum is rounded once, in `__call__`, and not with each part.
    wide = summed_in(parts[0].dtype)
    return functools.reduce(lax.add, [part.astype(wide) for part in parts])
