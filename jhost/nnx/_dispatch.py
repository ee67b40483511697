"""Rows of tokens go to the experts that they have chosen, and come back.

Nothing is dropped: as many rows go to an expert as have chosen it.  On one device that
is a sort by expert; on several, rows go to the devices of their experts in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jhost._ragged.order import inverse_of, permuted

Experts: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""What experts make of rows that are sorted by expert, and the number for each."""


def dispatch(
    x: jax.Array, chosen: jax.Array, weights: jax.Array, count: int, experts: Experts
) -> jax.Array:
    """The weighted sum, `[t, d]`, of what each token's experts make of it.

    Of tokens `[t, d]`, the experts that they have chosen among `count`, `[t, k]`, and
    their weights `[t, k]`, in whose dtype is summed.
    """
    tokens, each = chosen.shape
    # Stable, so that the sums of a kernel's gradient have one order.
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    counts = jnp.bincount(chosen.reshape(-1), length=count)
    rows = _in_order(experts, jnp.repeat(x, each, 0), counts, order)
    rows = rows.reshape(tokens, each, x.shape[-1])
    weighted = weights[..., None] * rows.astype(weights.dtype)
    return jnp.sum(weighted, 1).astype(x.dtype)


def on_their_devices(experts: Experts, axis: str, most: int) -> Experts:
    """Experts that are spread over the devices of a mesh axis, for rows of each device.

    No device has more than `most` rows for another.  There is room for so many rows
    from each device.  To be called in a `jax.shard_map` over the axis.
    """

    def apply(rows: jax.Array, counts: jax.Array) -> jax.Array:
        devices = lax.axis_size(axis)
        # From each device, to each device, for each of its experts.
        # All counts on all devices: each has to know where its rows begin at the
        # others.
        counts = lax.all_gather(counts, axis).reshape(devices, devices, -1)
        here = counts[:, lax.axis_index(axis)]
        moved = jnp.sum(counts, -1)
        come = _exchange(rows, moved, axis, most, devices * most)
        order = _by_expert(here, devices * most)
        done = _in_order(experts, come, jnp.sum(here, 0), order)
        return _exchange(done, moved.T, axis, most, len(rows))

    return apply


def _in_order(
    experts: Experts, rows: jax.Array, counts: jax.Array, order: jax.Array
) -> jax.Array:
    """What experts make of rows that an order sorts by expert, where the rows were."""
    back = inverse_of(order)
    return permuted(experts(permuted(rows, order, back), counts), back, order)


def _by_expert(counts: jax.Array, rows: int) -> jax.Array:
    """The order that sorts rows by expert; they come sorted by device, then by expert.

    `counts` is `[device, expert]`; the rows behind all of them stay there.
    """
    ends = jnp.cumsum(counts.reshape(-1))
    group = jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right")
    expert = jnp.where(group < ends.size, group % counts.shape[1], counts.shape[1])
    return jnp.argsort(expert, stable=True)


# --- Between devices ---------------------------------------------------------------- #


def _exchange(
    rows: jax.Array, moved: jax.Array, axis: str, most: int, room: int
) -> jax.Array:
    """Sends the rows to their devices; each device has room for so many.

    They are sorted by device, and `moved` of them go `[from, to]` each.  What comes is
    sorted by device, with zeros behind.
    """
    ways: dict[str, Any] = {
        # XLA has no ragged exchange on CPUs.
        "cpu": functools.partial(_padded, axis=axis, most=most, room=room),
        "default": functools.partial(_ragged, axis=axis, room=room),
    }
    return lax.platform_dependent(rows, moved, **ways)


def _ragged(rows: jax.Array, moved: jax.Array, *, axis: str, room: int) -> jax.Array:
    me = lax.axis_index(axis)
    sent, received = moved[me], moved[:, me]
    return lax.ragged_all_to_all(
        rows,
        jnp.zeros((room, *rows.shape[1:]), rows.dtype),
        _starts(sent),
        sent,
        _starts(moved)[me],
        received,
        axis_name=axis,
    )


def _padded(
    rows: jax.Array, moved: jax.Array, *, axis: str, most: int, room: int
) -> jax.Array:
    """Exchange blocks of equal size, with room for the most rows that a device gets."""
    me = lax.axis_index(axis)
    sent, received = moved[me], moved[:, me]
    place = jnp.arange(most, dtype=moved.dtype)
    index = jnp.where(place < sent[:, None], _starts(sent)[:, None] + place, len(rows))
    blocks = rows.at[index].get(mode="fill", fill_value=0)
    blocks = lax.all_to_all(blocks, axis, 0, 0)
    ends = jnp.cumsum(received)
    place = jnp.arange(room, dtype=ends.dtype)
    device = jnp.searchsorted(ends, place, side="right").astype(ends.dtype)
    first = _starts(received).at[device].get(mode="fill", fill_value=0)
    # Behind all that came is a device that there is not.
    return blocks.at[device, place - first].get(mode="fill", fill_value=0)


def _starts(sizes: jax.Array) -> jax.Array:
    """Where each of so many begins, along the first dim."""
    return jnp.cumsum(sizes, 0) - sizes
