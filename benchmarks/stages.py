"""Microbatches that go through stages (GPipe), by roll in a scan and by hand.

A stage sends its result on before the next tick.  With a delay the result takes a tick
to arrive, beside that tick's work (MaxText's `pipeline_delay_activation_forwarding`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Work: TypeAlias = Callable[[Any, jax.Array], jax.Array]
Place: TypeAlias = Callable[[jax.Array, int], jax.Array]
"""Says that a dim is that of the stages."""


def ticks_of(count: int, stages: int, delay: bool) -> int:
    """How long so many microbatches take."""
    return count + (1 + delay) * (stages - 1)


def rolled(
    work: Work, weights: Any, xs: jax.Array, delay: bool, place: Place
) -> jax.Array:
    """Global arrays: `vmap` over the stages, and `jnp.roll` along their dim."""
    stages, (count, *shape) = jax.tree.leaves(weights)[0].shape[0], xs.shape
    later = ticks_of(count, stages, delay) - count
    first = (jnp.arange(stages) == 0).reshape(stages, *(1,) * len(shape))
    none = [(0, 0)] * len(shape)
    entering = jnp.pad(xs[:, None], [(0, later), (0, stages - 1), *none])

    def tick(carry: Any, x: jax.Array) -> Any:
        before, done = carry
        moved = place(jnp.roll(done, 1, axis=0), 0)
        given = jnp.where(first, x, before if delay else moved)
        done = place(jax.vmap(work)(weights, given), 0)
        return (moved if delay else None, done), done

    begin = jnp.zeros((stages, *shape), xs.dtype)
    carry = begin if delay else None, begin
    return lax.scan(tick, carry, place(entering, 1))[1][later:, -1]


def by_hand(
    work: Work, weights: Any, xs: jax.Array, delay: bool, axis: str
) -> jax.Array:
    """One device's part: its stage, and `ppermute` to the next."""
    stages, rank = lax.axis_size(axis), lax.axis_index(axis)
    own = jax.tree.map(lambda w: w[0], weights)
    later = ticks_of(len(xs), stages, delay) - len(xs)
    ring = [(stage, (stage + 1) % stages) for stage in range(stages)]

    def tick(carry: Any, x: jax.Array) -> Any:
        before, done = carry
        moved = lax.ppermute(done, axis, ring)
        done = work(own, jnp.where(rank == 0, x, before if delay else moved))
        return (moved if delay else None, done), done

    entering = jnp.pad(xs, [(0, later), *[(0, 0)] * (xs.ndim - 1)])
    begin = lax.pcast(jnp.zeros(xs.shape[1:], xs.dtype), axis, to="varying")
    done = lax.scan(tick, (begin if delay else None, begin), entering)[1][later:]
    left = jnp.where(rank == stages - 1, done, jnp.zeros_like(done))
    return lax.psum_scatter(left, axis, tiled=True)


def alone(work: Work, weights: Any, xs: jax.Array, delay: bool, axis: str) -> jax.Array:
    """What a device computes in all ticks, and nothing that is sent."""
    stages = lax.axis_size(axis)
    own = jax.tree.map(lambda w: w[0], weights)
    later = ticks_of(len(xs), stages, delay) - len(xs)
    entering = jnp.pad(xs, [(0, later), *[(0, 0)] * (xs.ndim - 1)])
    done = lax.map(lambda x: work(own, x), entering)
    return lax.optimization_barrier(done)[: len(xs) // stages]
