"""The primitives that make windows on devices, and their rules.

No user's function has them: `layouts/exchange.py` writes them around the permutes that
bring the elements of neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jhost._dtypes import bits
from jhost._jax import define_primitive
from jhost.lowering.rules.building import Factors, first_step
from jhost.lowering.rules.dim_rule import DimRule, Shard, shape_of
from jhost.lowering.rules.registry import rule
from jhost.lowering.rules.row_of_pieces import plan_row
from jhost.lowering.rules.windows import padded


def _edge(
    *arrays: jax.Array,
    dim: int,
    size: int,
    starts: tuple[int, ...],
    chosen: tuple[int, ...],
) -> list[jax.Array]:
    return [_slice_at(arrays[chosen[0]], starts[0], size, dim)]


def _window(
    *pieces: jax.Array,
    dim: int,
    size: int,
    places: tuple[tuple[int, ...], ...],
    lengths: tuple[tuple[int, ...], ...],
) -> list[jax.Array]:
    first = [at[:1] for at in places]
    own = [length[:1] for length in lengths]
    return [_assembled(pieces, first, own, lambda table: table[0], dim, size)]


edge_p = define_primitive("edge", _edge)
"""`size` elements of a dim of one of some arrays.

`starts` has the first one for each device's number, and `chosen` the array.
"""

window_p = define_primitive("window", _window)
"""`size` elements of a dim, from pieces.

`places` has each one's place by device, and `lengths` how many elements of it count.
"""


@rule("edge")
def edge(eqn: JaxprEqn) -> DimRule:
    """One factor: the devices, which have a start each."""
    names = "dim", "size", "starts", "chosen"
    dim, size, starts, chosen = (eqn.params[name] for name in names)

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        start, number = _here(starts, shard), _here(chosen, shard)
        if isinstance(number, int):
            return [_slice_at(args[number], start, size, dim)]
        edges = [_slice_at(x, start, size, dim) for x in args]
        return [lax.select_n(number, *edges)]

    return _of_devices(eqn, len(starts), rebind)


@rule("window")
def window(eqn: JaxprEqn) -> DimRule:
    """One factor: the devices, which have a place for each piece."""
    names = "dim", "size", "places", "lengths"
    dim, size, places, lengths = (eqn.params[name] for name in names)

    def rebind(eqn: JaxprEqn, args: Sequence[Any], shard: Shard) -> list[Any]:
        here = functools.partial(_here, shard=shard)
        return [_assembled(args, places, lengths, here, dim, size)]

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
    """This device's entry of `values`: an int where all devices have the same."""
    if len(set(values)) == 1:
        return values[0]
    table = np.array(values, np.int32)
    return lax.dynamic_index_in_dim(table, first_step(shard, 0), keepdims=False)


def _slice_at(x: Any, start: Any, size: int, dim: int) -> Any:
    """`size` elements from `start` on; behind a shorter array there are zeros."""
    more = size - x.shape[dim]
    if more > 0:
        x = padded(x, dim, lax.full((), 0, x.dtype), (0, more))
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def _assembled(
    pieces: Sequence[Any],
    places: Sequence[Sequence[int]],
    counting: Sequence[Sequence[int]],
    here: Callable[[Sequence[int]], Any],
    dim: int,
    size: int,
) -> Any:
    """Pieces at their places, cut at the ends, with any values between them.

    `places` has each piece's place on all devices, and `counting` how many elements of
    it count.  `here` takes a number for each device, and gives the one of this device.
    """
    lengths = [piece.shape[dim] for piece in pieces]
    # XLA:CPU (of JAX 0.12) ends the process where dtypes narrower than a byte are
    # concatenated.
    in_bytes = pieces[0].dtype == np.bool_ or bits(pieces[0].dtype) >= 8
    row = plan_row(places, lengths, size) if in_bytes else None
    if row is not None:
        pairs = [(pieces[n], at) for n, at in row.places]
        made = _side_by_side(pairs, pieces[0], dim, row.length)
        return _slice_at(made, here(row.starts), size, dim)
    # Updates of one buffer, and no selects: XLA would write a buffer of the window's
    # size for each piece that selects pick a place for.
    shape = list(pieces[0].shape)
    shape[dim] = size
    made = lax.full(shape, 0, pieces[0].dtype)
    for piece, at, counted in zip(pieces, places, counting, strict=True):
        made = _updated(made, piece, at, counted, here, dim)
    return made


def _updated(
    made: Any,
    piece: Any,
    at: Sequence[int],
    counted: Sequence[int],
    here: Callable[[Sequence[int]], Any],
    dim: int,
) -> Any:
    """A window with the elements of a piece that count, each at its place."""
    size, left = made.shape[dim], piece.shape[dim]
    length = min(size, left)
    # All devices update so many elements inside of their windows.
    begins = [min(max(place, 0), size - length) for place in at]
    # The piece's element that stands first there; a place that has none gives others.
    pairs = zip(begins, at, strict=True)
    firsts = [min(max(begin - place, -length), left) for begin, place in pairs]
    ends = max(0, -min(firsts)), max(0, max(firsts) + length - left)
    wide = padded(piece, dim, lax.full((), 0, piece.dtype), ends)
    start = here([first + ends[0] for first in firsts])
    new, begin = _slice_at(wide, start, length, dim), here(begins)
    if any(firsts) or min(counted) < length:
        number = lax.broadcasted_iota(np.int32, new.shape, dim) + here(firsts)
        counts = lax.bitwise_and(number >= 0, number < here(counted))
        new = lax.select(counts, new, _slice_at(made, begin, length, dim))
    return lax.dynamic_update_slice_in_dim(made, new, begin, dim)


def _side_by_side(
    pairs: Iterable[tuple[Any, int]], like: Any, dim: int, size: int
) -> Any:
    """Pieces at their places in a row of that size, with zeros between them."""
    parts: list[Any] = []
    end = 0

    def fill_up_to(place: int) -> None:
        if place > end:
            shape = [*like.shape[:dim], place - end, *like.shape[dim + 1 :]]
            parts.append(lax.full(shape, 0, like.dtype))

    for piece, at in pairs:
        fill_up_to(at)
        first, last = max(-at, 0), min(piece.shape[dim], size - at)
        parts.append(lax.slice_in_dim(piece, first, last, axis=dim))
        end = at + last
    fill_up_to(size)
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, dim)
