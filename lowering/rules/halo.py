"""The primitives of which windows are made on devices, and their rules.

No function of a user's has them: `layouts/exchange.py` writes them around the permutes
that bring what neighbours have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._dtypes import bits
from jhost._jax import define_primitive
from jhost.lowering.rules.building import Factors, first_step
from jhost.lowering.rules.dim_rule import DimRule, Shard, rule, shape_of


def _edge(
    x: jax.Array, *, dim: int, size: int, starts: tuple[int, ...]
) -> list[jax.Array]:
    return [_slice_at(x, starts[0], size, dim)]


def _window(
    *pieces: jax.Array, dim: int, size: int, places: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
    return [_assembled(pieces, [at[0] for at in places], dim, size)]


edge_p = define_primitive("edge", _edge)
"""`size` elements of a dim, on the device of each number from its `starts` on."""

window_p = define_primitive("window", _window)
"""`size` elements of a dim: pieces, each at its `places` by the device's number."""


@rule("edge")
def edge(eqn: JaxprEqn) -> DimRule:
    """One factor: the devices, which have a start each."""
    dim, size, starts = (eqn.params[name] for name in ("dim", "size", "starts"))

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        (x,) = args
        return [_slice_at(x, _here(starts, shard), size, dim)]

    return _of_devices(eqn, len(starts), rebind)


@rule("window")
def window(eqn: JaxprEqn) -> DimRule:
    """One factor: the devices, which have a place for each piece."""
    dim, size, places = (eqn.params[name] for name in ("dim", "size", "places"))

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        here = [_here(at, shard) for at in places]
        return [_assembled(args, here, dim, size)]

    return _of_devices(eqn, len(places[0]), rebind)


def _of_devices(eqn: JaxprEqn, devices: int, rebind: Callable[..., Any]) -> DimRule:
    factors = Factors()
    factors.new(devices)
    operands, results = (
        [(None,) * len(shape_of(v)) for v in values]
        for values in (eqn.invars, eqn.outvars)
    )
    return factors.rule(operands, results, rebind)


def _here(values: Sequence[int], shard: Shard) -> Any:
    """What the device here has of a number for each: an int where all have one."""
    if len(set(values)) == 1:
        return values[0]
    table = np.array(values, np.int32)
    return lax.dynamic_index_in_dim(table, first_step(shard, 0), keepdims=False)


def _slice_at(x: Any, start: Any, size: int, dim: int) -> Any:
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def _assembled(
    pieces: Sequence[Any], places: Sequence[Any], dim: int, size: int
) -> Any:
    """Pieces at their places; anything elsewhere, and what is outside is left out."""
    # XLA:CPU (of JAX 0.12) ends the process at a concatenation of less than bytes.
    in_bytes = pieces[0].dtype == np.bool_ or bits(pieces[0].dtype) >= 8
    lasts = [size - piece.shape[dim] for piece in pieces]
    pairs = zip(places, lasts, strict=True)
    if in_bytes and all(isinstance(at, int) and 0 <= at <= n for at, n in pairs):
        return _side_by_side(pieces, places, dim, size)
    # Selected, not written one into another: XLA makes it where it is read.
    shape = list(pieces[0].shape)
    shape[dim] = size
    number = lax.broadcasted_iota(np.int32, shape, dim)
    made = lax.full(shape, 0, pieces[0].dtype)
    for piece, at in zip(pieces, places, strict=True):
        config = [(0, 0, 0)] * piece.ndim
        # XLA moves a dynamic slice that is not inside; in this one all of them are.
        config[dim] = (size, size, 0)
        wide = lax.pad(piece, lax.full((), 0, piece.dtype), config)
        moved = lax.dynamic_slice_in_dim(wide, size - at, size, axis=dim)
        here = lax.bitwise_and(number >= at, number < at + piece.shape[dim])
        made = lax.select(here, moved, made)
    return made


def _side_by_side(
    pieces: Sequence[Any], places: Sequence[int], dim: int, size: int
) -> Any:
    """Pieces that share no place, with zeros between them."""
    parts: list[Any] = []
    here = 0
    first = pieces[0]

    def fill_up_to(shard: int) -> None:
        if shard > here:
            shape = [*first.shape[:dim], shard - here, *first.shape[dim + 1 :]]
            parts.append(lax.full(shape, 0, first.dtype))

    for at, piece in sorted(zip(places, pieces, strict=True), key=lambda each: each[0]):
        fill_up_to(at)
        parts.append(piece)
        here = at + piece.shape[dim]
    fill_up_to(size)
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, dim)
