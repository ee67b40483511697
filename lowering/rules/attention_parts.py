"""Attention on a part of the queries and a part of the keys.

What queries find among some of the keys comes with the logarithms of the sums of their
rows' exponentials, by which such parts are weighted (FlashAttention, Dao et al. 2022,
section 3.1).  A backward has the logarithms for all keys, and its parts are added up.

Parts of what a causal mask leaves are worked on in square blocks: one is hidden, and
not computed; or it is seen whole; or the diagonal is its own.  Where that makes too
many blocks, and at the far edge of a sliding window, keys are masked one by one.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._dtypes import summed_in
from jhost._jax import aval_of
from jhost.lowering.rules.dim_rule import AttentionWindow, Combine, Dims, Shard

_MOST_BLOCKS = 64


@functools.cache
def weighted(heads_first: bool) -> Combine:
    """How what was found in two parts of the keys, and the logarithms, become one."""

    def combine(held: Sequence[Any], new: Sequence[Any]) -> tuple[Any, Any]:
        (one, log_one), (other, log_other) = held, new
        one, other = (x.astype(log_one.dtype) for x in (one, other))
        most = jnp.maximum(log_one, log_other)
        most = jnp.where(jnp.isneginf(most), 0, most)  # no key was seen so far
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

    `sizes` are those of the whole; `operands` and `results` map its values.  The last
    operands are where queries and keys stand in the whole, in ascending order.  Parts
    of the keys make one by `combine`; without, and along queries, they are added up.
    """

    window: AttentionWindow
    sizes: tuple[int, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    combine: Combine | None = None

    @abc.abstractmethod
    def as_it_is(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """On operands that stand to each other as those of the whole do."""

    @abc.abstractmethod
    def unmasked(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """On queries that see all of the keys, as far as the window goes."""

    @abc.abstractmethod
    def masked(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """On any, by where each query and each key stands."""

    def whole(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """On all queries and all keys."""
        return self.as_it_is(eqn, args)

    def __call__(
        self, eqn: JaxprEqn, args: Sequence[Any], shard: Shard
    ) -> Sequence[Any]:
        positions = map(shard.positions, (self.queries, self.keys))
        outs = self.on_parts(eqn, [*args, *positions], shard)
        if shard.accumulator is not None:
            return outs  # which takes them as wide as they are
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
        """What the parts of queries and keys give, by where they stand in the whole."""
        both = self.queries, self.keys
        here = tuple(map(shard.size, both))
        if here == self.sizes:
            return self.whole(eqn, args)
        # No position matters, so any part is as the whole.
        if self.window.sees_all:
            return self.as_it_is(eqn, args)
        if self.sizes == tuple(size * shard.zigzag for size in here):
            first, *_ = map(operator.sub, *map(shard.starts, both))
            return self.halves(eqn, args, here[0] // 2, first)
        side, rows, columns = self.blocks(shard)
        if not side:
            return self.masked(eqn, args)
        parts = [
            self.row(
                eqn, self.cut(args, self.queries, n * side, side), row, columns, side
            )
            for n, row in enumerate(rows)
        ]
        return self.along(self.queries, parts)

    def blocks(self, shard: Shard) -> tuple[int, list[Any], list[Any]]:
        """The side of the blocks, and where those of queries and of keys begin.

        The side is 0 where there are none, or too many.
        """
        both = self.queries, self.keys
        starts, here = [*map(shard.starts, both)], [*map(shard.size, both)]
        stretches = [n // len(each) for n, each in zip(here, starts, strict=True)]
        side = math.gcd(*stretches)
        count = math.prod(size // max(side, 1) for size in here)
        # A causal mask alone leaves blocks that are hidden, whole or on the diagonal.
        if self.window.right != 0 or not 0 < count <= _MOST_BLOCKS:
            return 0, [], []
        rows, columns = (
            [start + at for start in each for at in range(0, stretch, side)]
            for each, stretch in zip(starts, stretches, strict=True)
        )
        return side, rows, columns

    def seen(self, args: Sequence[Any]) -> Any:
        """Which queries see which keys, as far as the window goes."""
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
        """What a device's queries find among a device's keys, both in zigzag order.

        Among those of a device before it all queries see the early half, and of a later
        one the late queries see all.  Its own stand in their order.
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
        """The results of a half of a factor, with nothing for the other half."""
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
        row: Any,
        columns: Sequence[Any],
        side: int,
    ) -> Sequence[Any]:
        """A row of blocks, from where its queries begin, and where the keys do."""
        # Of two scalars XLA finds the difference of equal ones, and drops branches.
        blocks = [
            self.block(
                eqn, self.cut(args, self.keys, n * side, side), row - column, side
            )
            for n, column in enumerate(columns)
        ]
        return self.along(self.keys, blocks)

    def block(
        self, eqn: JaxprEqn, args: Sequence[Any], distance: Any, side: int
    ) -> Sequence[Any]:
        """A block whose first query stands `distance` behind its first key.

        That is a whole number of blocks.
        """
        branches = [
            lambda *args: self.nothing(eqn, args),
            lambda *args: self.unmasked(eqn, args),
            lambda *args: self.as_it_is(eqn, args),
        ]
        case = _case(distance)
        if (left := self.window.left) is not None:
            # The pair farthest apart is `distance + side - 1` apart.  If that is more
            # than `left`, keys are masked one by one; and all are hidden if the nearest
            # pair, `distance - side + 1` apart, is too far as well.
            branches.append(lambda *args: self.masked(eqn, args))
            far = jnp.where(distance - side < left, 3, 0)
            case = jnp.where((case == 1) & (distance + side > left + 1), far, case)
        return lax.switch(case, branches, *args)

    def nothing(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """What a hidden block gives."""
        shapes = jax.eval_shape(lambda *args: self.unmasked(eqn, args), *args)
        return self.nothing_like(shapes)

    def nothing_like(self, results: Sequence[Any]) -> list[Any]:
        """What hidden keys give: nothing is found, and the sum of a row is 0."""
        found, *rest = results
        fill = 0 if self.combine is None else -np.inf
        return [
            jnp.zeros(found.shape, found.dtype),
            *(jnp.full(each.shape, fill, each.dtype) for each in rest),
        ]

    def along(self, factor: int, parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """The results of all parts of a factor, from those of each."""
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
    # Rounded once, in `__call__`, and not with each part.
    wide = summed_in(parts[0].dtype)
    return functools.reduce(lax.add, [part.astype(wide) for part in parts])
