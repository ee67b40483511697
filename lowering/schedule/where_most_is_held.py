"""Products that wait where a program holds most.

JAX computes the gradient of a weight before the gradient of the activations.  The
second frees the weight, which was gathered for it.  So where a program holds most, such
a product comes behind the next one, if less is held in that order.  Its sum over
devices has to have other products beside it there.

Four layers of Llama 8B with weights sharded over four H200s in two processes take 3.2
GB of temporary memory so, and 4.1 GB in JAX's order.  `jax.jit` takes 3.5 GB.
"""

from __future__ import annotations

from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate
from jhost.lowering.schedule.held import held
from jhost.lowering.schedule.intervals import SUMS, IsOpen
from jhost.lowering.schedule.moved_work import WorkOrder

_MOST = 0.9
"""The share of the most held above which a block counts: sizes are estimates."""

_LESS = 0.95
"""The share of what both products hold now.  The other order has to hold less."""


def with_less_held(program: Program, stays_whole: IsOpen) -> Program:
    """`program` with products moved behind the next ones, where their sums stay whole.

    A sum that is sent in parts holds less, because its product is made in these parts.
    """
    moved = (stmt for stmt in program.body if isinstance(stmt, Communicate))
    if not any(stmt.kind in SUMS and stays_whole(stmt) for stmt in moved):
        return program
    there = held(program)
    least = _MOST * max(there)
    full = (number for number, size in enumerate(there) if size > least)
    for number in full:
        other = _with_next_before(program, number, stays_whole)
        if other is not None:
            return with_less_held(other, stays_whole)
    return program


def _with_next_before(
    program: Program, number: int, stays_whole: IsOpen
) -> Program | None:
    """`program` with a product behind the next one; None if it has to stay."""
    order = WorkOrder(program, stays_whole)
    order.has_exposed()  # which finds what stands beside each sum
    following = _next_product(order, number)
    if following is None or number not in order.near([number]):
        return None
    place = following + 1
    behind = order.made_of(number, order.order[number + 1 : place])
    if behind is None or not any(map(order.is_sum, behind)):
        return None
    if not all(order.stays_hidden(each, place) for each in behind):
        return None
    order.move({number, *behind}, place)
    before, after = (
        max(held(p)[number:place]) for p in (program, order.program(program))
    )
    if after >= _LESS * before:
        return None
    return order.program(program, {number, following})


def _next_product(order: WorkOrder, number: int) -> int | None:
    """The next work behind a block, if it is a product."""
    every = order.blocks.all
    behind = range(number + 1, len(every))
    following = next((each for each in behind if every[each].works), None)
    if following is None or order.blocks.product(following) is None:
        return None
    return following
