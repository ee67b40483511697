"""Attention on a part of the queries and a part of the keys.

What queries find among some of the keys comes with the logarithms of the sums of their
rows' exponentials, by which such parts are weighted (FlashAttention, Dao et al. 2022,
section 3.1).  A backward has the logarithms for all keys, and its parts are added up.

A kernel counts queries and keys from the first that it gets, so parts of what a causal
mask leaves are worked on in square blocks: one is hidden, and not computed; or it is
seen whole; or the diagonal is its own.  Where that makes too many blocks, and at the
far edge of a sliding window, the mask becomes a bias.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._jax import aval_of
from jhost.lowering.rules.dim_rule import Combine, Dims, Place, bind

_MOST_BLOCKS = 64
BIAS = 3
"""Its place among the operands of all kernels."""


def is_causal(eqn: JaxprEqn) -> bool:
    """Whether each query sees the keys up to its own position."""
    return eqn.params["mask_type"].name == "CAUSAL"


def keys_seen(eqn: JaxprEqn, queries: np.ndarray, keys: np.ndarray) -> int:
    """How many of the keys at some positions queries at others see, on the average."""
    if "mask_type" not in eqn.params or not is_causal(eqn):
        return len(keys)
    ordered = np.sort(keys)
    seen = np.searchsorted(ordered, queries, side="right")
    if window := eqn.params.get("sliding_window_length"):
        seen -= np.searchsorted(ordered, queries - window, side="right")
    return int(np.ceil(np.mean(seen))) if len(queries) else 0


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
class Blocks:
    """The rebind of a kernel that is cut along the factors `queries` and `keys`.

    `sizes` are those of the whole; `operands` and `results` map its values.  Parts of
    the keys make one by `combine`; without, and along queries, they are added up.
    """

    queries: int
    keys: int
    sizes: tuple[int, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    combine: Combine | None = None

    def __call__(
        self, eqn: JaxprEqn, args: Sequence[Any], place: Place
    ) -> Sequence[Any]:
        here = place.size(self.queries), place.size(self.keys)
        if not is_causal(eqn) or here == self.sizes:
            return bind(eqn, args)
        outs = self.on_parts(eqn, args, place)
        if place.accumulator is not None:
            return outs  # which takes them as wide as they are
        dtypes = [aval_of(var).dtype for var in eqn.outvars]
        return [*map(lax.convert_element_type, outs, dtypes)]

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
        self, eqn: JaxprEqn, args: Sequence[Any], place: Place
    ) -> Sequence[Any]:
        """What the parts of queries and keys give, by where they stand in the whole."""
        both = self.queries, self.keys
        here, starts = tuple(map(place.size, both)), tuple(map(place.starts, both))
        if self.sizes == tuple(size * place.zigzag for size in here):
            return self.halves(eqn, args, here[0] // 2, starts[0][0] - starts[1][0])
        stretches = [n // len(each) for n, each in zip(here, starts, strict=True)]
        side = math.gcd(*stretches)
        if math.prod(size // side for size in here) > _MOST_BLOCKS:
            rows, columns = map(place.positions, both)
            return _masked(eqn, args, rows[:, None] - columns)
        rows, columns = (
            [start + at for start in each for at in range(0, stretch, side)]
            for each, stretch in zip(starts, stretches, strict=True)
        )
        parts = [
            self.row(
                eqn, self.cut(args, self.queries, n * side, side), row, columns, side
            )
            for n, row in enumerate(rows)
        ]
        return self.along(self.queries, parts)

    def halves(
        self, eqn: JaxprEqn, args: Sequence[Any], half: int, distance: Any
    ) -> Sequence[Any]:
        """What a device's queries find among a device's keys, both in zigzag order.

        Among those of a device before it all queries see the early half, and of a later
        one the late queries see all.  Its own stand in their order.
        """

        def late_queries(*args: Any) -> list[Any]:
            queries = self.cut(args, self.queries, half, half)
            return self.beside_nothing(self.queries, _unmasked(eqn, queries), last=True)

        def early_keys(*args: Any) -> list[Any]:
            keys = self.cut(args, self.keys, 0, half)
            return self.beside_nothing(self.keys, _unmasked(eqn, keys), last=False)

        branches = [late_queries, early_keys, lambda *args: bind(eqn, args)]
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
            lambda *args: _unmasked(eqn, args),
            lambda *args: bind(eqn, args),
        ]
        case = _case(distance)
        if window := eqn.params["sliding_window_length"]:
            local = np.arange(side)
            distances = distance + local[:, None] - local
            branches.append(lambda *args: _masked(eqn, args, distances))
            far = jnp.where(distance - side + 1 < window, 3, 0)
            case = jnp.where((case == 1) & (distance + side > window), far, case)
        return lax.switch(case, branches, *args)

    def nothing(self, eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
        """What a hidden block gives."""
        shapes = jax.eval_shape(lambda *args: _unmasked(eqn, args), *args)
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
    wide = parts[0].dtype if parts[0].dtype.itemsize >= 4 else np.float32
    return functools.reduce(lax.add, [part.astype(wide) for part in parts])


def _unmasked(eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    masks: Any = type(eqn.params["mask_type"])
    none = masks["NO_MASK"]
    return bind(eqn, args, mask_type=none, sliding_window_length=None, **changed)


def _masked(eqn: JaxprEqn, args: Sequence[Any], distances: Any) -> list[Any]:
    """The kernel with a bias that hides keys, by how far queries stand behind them."""
    window = eqn.params["sliding_window_length"]
    seen = distances >= 0
    if window:
        seen &= distances < window
    dtype = args[0].dtype
    # As large as JAX's own for masks: cuDNN subtracts two such numbers.
    least = -(2 << 14) if dtype == np.float16 else -(2 << 40)
    bias = jnp.where(seen, 0, jnp.asarray(least, dtype))[None, None]
    has_bias, has_gradient = eqn.params["variadic_args"]
    args = [*args]
    args[BIAS] = args[BIAS] + bias if has_bias else bias
    return _unmasked(eqn, args, variadic_args=(True, has_gradient))
