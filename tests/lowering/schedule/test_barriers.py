"""Barriers that are taken apart and put together again."""

from __future__ import annotations

import jax
from jax import lax

from jhost.lowering.ir.statements import Compute
from jhost.lowering.schedule.barriers import Barriers
from tests.lowering.traced import lowered


def two(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = lax.optimization_barrier((x, w))
    return -x, -w


def test_what_stays_together_is_the_same_barrier() -> None:
    body = lowered(two, (2,), (3,), tp=2).body
    barriers = Barriers()
    pieces = [*barriers.apart(body)]
    assert [*barriers.together(pieces)] == [*body]


def test_a_piece_that_moves_is_a_barrier_of_its_own() -> None:
    def three(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(lax.optimization_barrier(args))

    (barrier,) = (
        stmt
        for stmt in lowered(three, (2,), (3,), (4,), tp=2).body
        if isinstance(stmt, Compute)
    )
    barriers = Barriers()
    first, second, third = barriers.apart([barrier])
    ((alone,), (rest,)) = (barriers.together(p) for p in ([second], [first, third]))
    assert isinstance(alone, Compute)
    assert isinstance(rest, Compute)
    assert alone.ins == barrier.ins[1:2]
    assert rest.ins == (barrier.ins[0], barrier.ins[2])
    assert rest.outs == (barrier.outs[0], barrier.outs[2])
