"""Causal attention over a sequence that is sharded, by hand: one device's part.

`gathered` has all keys on every device, and attends to those that its queries see.  In
a ring keys and values go from neighbour to neighbour, and each device combines its
results for all of them (Ring Attention, Liu et al. 2023).  In the backward they go
around again, with their gradients.  Keys that no query of a device sees are left out.
In zigzag order each device has an early and a late part of the sequence, so all have
the same work.  Parts are exchanged before and after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.kernels import Found, Gradients, Kernels, combined

Attend: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def gathered(kernels: Kernels, axis: str) -> Attend:
    """Attention of a device's queries to the keys of all, once these are gathered."""

    def whole(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, axis, tiled=True)

    def by_rank(branch: Callable[[int], Callable[..., Any]], *args: Any) -> Any:
        branches = [branch(rank) for rank in range(lax.axis_size(axis))]
        return lax.switch(lax.axis_index(axis), branches, *args)

    @jax.custom_vjp
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        keys, values = whole(k), whole(v)

        def branch(rank: int) -> Callable[..., Found]:
            def find(q: jax.Array, k: jax.Array, v: jax.Array) -> Found:
                before, own = _before_and_own(len(q), rank)
                found = kernels.attend(q, k[own], v[own], causal=True)
                if rank:
                    earlier = kernels.attend(q, k[before], v[before], causal=False)
                    found = combined(found, earlier)
                return found[0].astype(q.dtype), found[1]

            return find

        found = by_rank(branch, q, keys, values)
        return found[0], (q, keys, values, found)

    def backward(saved: Any, cotangent: jax.Array) -> Gradients:
        q, keys, values, found = saved

        def branch(rank: int) -> Callable[..., Gradients]:
            def pull(
                q: jax.Array,
                k: jax.Array,
                v: jax.Array,
                found: Found,
                cotangent: jax.Array,
            ) -> Gradients:
                before, own = _before_and_own(len(q), rank)
                parts = [
                    kernels.gradients(q, k[at], v[at], found, cotangent, causal)
                    for at, causal in ((before, False), (own, True))
                    if causal or rank
                ]
                of_q, of_k, of_v = zip(*parts, strict=True)
                later = len(k) - (rank + 1) * len(q)
                return _sum(of_q), _padded(of_k, later), _padded(of_v, later)

            return pull

        of_q, of_k, of_v = by_rank(branch, q, keys, values, found, cotangent)
        of_keys = (lax.psum_scatter(x, axis, tiled=True) for x in (of_k, of_v))
        return of_q, *of_keys

    attend.defvjp(forward, backward)
    return attend


def _before_and_own(rows: int, rank: int) -> tuple[slice, slice]:
    """The keys of the devices before one, and its own."""
    return slice(0, rank * rows), slice(rank * rows, (rank + 1) * rows)


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
    wide = (part.astype(jnp.float32) for part in parts)
    return functools.reduce(jnp.add, wide).astype(parts[0].dtype)


def _padded(parts: Sequence[jax.Array], later: int) -> jax.Array:
    """One after another, with zeros for keys that no query here sees."""
    return jnp.pad(jnp.concatenate(parts), ((0, later), (0, 0), (0, 0)))


def ring(kernels: Kernels, axis: str, zigzag: bool) -> Attend:
    """Attention of a device's queries to the keys that come around."""
    part: Part = _Zigzag(kernels) if zigzag else _InOrder(kernels)

    def place(x: jax.Array, back: bool = False) -> jax.Array:
        return _exchanged(x, axis, back) if zigzag else x

    def sent(tree: Any) -> Any:
        size = lax.axis_size(axis)
        pairs = [(device, (device + 1) % size) for device in range(size)]
        return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)

    def distance(step: int) -> jax.Array:
        """How many devices the queries stand behind the keys that came `step` far."""
        rank = lax.axis_index(axis)
        return rank - (rank - step) % lax.axis_size(axis)

    @jax.custom_vjp
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        q, k, v = map(place, (q, k, v))
        coming = sent((k, v))
        total = kernels.attend(q, k, v, causal=True)
        for step in range(1, steps := lax.axis_size(axis)):
            # A step's keys are sent on while it works on them, and not before.
            here, total = lax.optimization_barrier((coming, total))
            coming = sent(here) if step < steps - 1 else here
            total = combined(total, part.attend(distance(step), q, *here))
        found = total[0].astype(q.dtype), total[1]
        return place(found[0], back=True), (q, k, v, found)

    def backward(saved: Any, cotangent: jax.Array) -> Gradients:
        q, k, v, found = saved
        cotangent, coming = place(cotangent), sent((k, v))
        sums = _wide(kernels.gradients(q, k, v, found, cotangent, causal=True))
        for step in range(1, steps := lax.axis_size(axis)):
            here, sums = lax.optimization_barrier((coming, sums))
            coming = sent(here) if step < steps - 1 else here
            of_q, *of_keys = sums
            coming_sums = of_q, *sent(of_keys)
            more = part.gradients(distance(step), q, *here, found, cotangent)
            sums = tuple(map(jnp.add, coming_sums, more))
        of_q, *of_keys = sums
        wide = of_q, *sent(of_keys)
        return tuple(
            place(each.astype(x.dtype), back=True)
            for each, x in zip(wide, (q, k, v), strict=True)
        )

    attend.defvjp(forward, backward)
    return attend


class _InOrder:
    """Keys of a device before this one are seen whole, and those of later ones not."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def attend(
        self, distance: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> Found:
        def seen(q: jax.Array, k: jax.Array, v: jax.Array) -> Found:
            return self._kernels.attend(q, k, v, causal=False)

        return lax.cond(distance > 0, seen, lambda q, k, v: _nothing(q), q, k, v)

    def gradients(
        self,
        distance: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        found: Found,
        cotangent: jax.Array,
    ) -> Gradients:
        def seen(*args: Any) -> Gradients:
            return _wide(self._kernels.gradients(*args, causal=False))

        def hidden(q: jax.Array, k: jax.Array, v: jax.Array, *_: Any) -> Gradients:
            return _zeros(q), _zeros(k), _zeros(v)

        return lax.cond(distance > 0, seen, hidden, q, k, v, found, cotangent)


class _Zigzag:
    """All queries see the early keys of a device before this one; late queries see all
    keys of a later one."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def attend(
        self, distance: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
    ) -> Found:
        half = len(q) // 2

        def early_keys(q: jax.Array, k: jax.Array, v: jax.Array) -> Found:
            return self._kernels.attend(q, k[:half], v[:half], causal=False)

        def late_queries(q: jax.Array, k: jax.Array, v: jax.Array) -> Found:
            found, lse = self._kernels.attend(q[half:], k, v, causal=False)
            none, hidden = _nothing(q[:half])
            return jnp.concatenate([none, found]), jnp.concatenate([hidden, lse], 1)

        return lax.cond(distance > 0, early_keys, late_queries, q, k, v)

    def gradients(
        self,
        distance: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        found: Found,
        cotangent: jax.Array,
    ) -> Gradients:
        half = len(q) // 2

        def early_keys(
            q: jax.Array, k: jax.Array, v: jax.Array, found: Found, cotangent: jax.Array
        ) -> Gradients:
            early = k[:half], v[:half]
            parts = self._kernels.gradients(q, *early, found, cotangent, causal=False)
            of_q, *of_keys = _wide(parts)
            ends = (jnp.concatenate([each, _zeros(k[half:])]) for each in of_keys)
            return of_q, *ends

        def late_queries(
            q: jax.Array, k: jax.Array, v: jax.Array, found: Found, cotangent: jax.Array
        ) -> Gradients:
            late = found[0][half:], found[1][:, half:]
            parts = self._kernels.gradients(
                q[half:], k, v, late, cotangent[half:], causal=False
            )
            of_q, of_k, of_v = _wide(parts)
            return jnp.concatenate([_zeros(q[:half]), of_q]), of_k, of_v

        return lax.cond(
            distance > 0, early_keys, late_queries, q, k, v, found, cotangent
        )


Part: TypeAlias = _InOrder | _Zigzag


def _nothing(q: jax.Array) -> Found:
    lse = jnp.full((q.shape[1], len(q)), -jnp.inf, jnp.float32)
    return jnp.zeros_like(q), lse


def _zeros(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape, jnp.float32)


def _wide(gradients: Gradients) -> Gradients:
    return tuple(each.astype(jnp.float32) for each in gradients)


def _exchanged(x: jax.Array, axis: str, back: bool) -> jax.Array:
    """A device's two parts of the sequence in zigzag order, or `back` in their order.

    Of 2 D parts device r has 2 r and 2 r + 1, and in zigzag order r and 2 D - 1 - r:
    one of an even and one of an odd number either way, which two permutes exchange.
    """
    size = lax.axis_size(axis)
    ways = [
        [
            (part // 2, min(part, 2 * size - 1 - part))
            for part in range(first, 2 * size, 2)
        ]
        for first in (0, 1)
    ]
    # In zigzag order a device of an even number has its even part first.
    turned = lax.axis_index(axis) % 2 == 1
    halves = x.reshape(2, len(x) // 2, *x.shape[1:])
    if back:
        halves = jnp.where(turned, halves[::-1], halves)
        ways = [[(there, here) for here, there in way] for way in ways]
    halves = jnp.stack(
        [lax.ppermute(half, axis, way) for half, way in zip(halves, ways, strict=True)]
    )
    if not back:
        halves = jnp.where(turned, halves[::-1], halves)
    return halves.reshape(x.shape)
