"""Decisions changed in any order add up to what they would have from the start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias
from unittest import mock

import jax
import jax.numpy as jnp
from hypothesis import event, given, strategies as st
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import Assignment
from jhost.lowering.ir.program import Program
from jhost.lowering.layouts.backward import Backward
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.flat_bodies import flattened
from jhost.lowering.layouts.improve import (
    Failed,
    OtherAssignment,
    improved,
    others,
    tried,
)
from jhost.lowering.layouts.propagate_layouts import shardings_of
from jhost.lowering.layouts.solver import Solver
from tests.lowering.traced import built


def layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Values with several readers, sums, a copy, and layouts that do not agree."""
    x = jhost.shard(x, P("a"))
    y = jnp.maximum(x @ w, 0)
    z = jhost.shard(y @ v, P(None, "b"))
    return jhost.shard(z @ w + x @ v @ w + y, P("b", "a"))


def solver() -> Solver:
    return solver_of(built(layers, (8, 8), (8, 8), (8, 8), a=2, b=4))


def solver_of(program: Program) -> Solver:
    marks = {m.buffer: m for m in program.marks if isinstance(m, ShardMark)}
    return Solver(flattened(program), marks, {})


@given(st.data())
def test_bytes_are_those_of_the_same_decisions_made_in_order(
    data: st.DataObject,
) -> None:
    solving = solver()
    made = solving.fixed_point()
    for _ in range(data.draw(st.integers(1, 8))):
        number = data.draw(st.integers(0, len(solving.operations) - 1))
        op = solving.operations[number]
        candidates = list(solving.assigner.candidates(op, made.layouts))
        made.decide(number, data.draw(st.sampled_from(candidates)))
    given = {param.name: made.layouts[param.name] for param in solving.params}
    fresh = Decisions(solving.operations, solving.effects, solving.costs, given)
    for number, assignment in enumerate(made.in_order()):
        fresh.decide(number, assignment)
    assert fresh.same_as(made)
    assert fresh.total == made.total
    assert fresh.moved() == made.moved()
    for number in range(len(solving.operations)):
        assert fresh.known(number) == made.known(number)


def test_what_is_tried_in_vain_is_taken_back() -> None:
    solving = solver()
    made = improved(solving, solving.fixed_point())
    for number in range(len(solving.operations)):
        for candidate in others(solving, number, made):
            before, total = made.in_order(), made.total
            change = OtherAssignment((number,), candidate, alone=False)
            if tried(solving, change, made, Failed()):
                assert made.total < total
            else:
                assert (made.in_order(), made.total) == (before, total)


@given(st.data())
def test_what_failed_and_reads_nothing_new_fails_again(data: st.DataObject) -> None:
    solving, failed, again = solver(), Failed(), 0
    made = solving.fixed_point()
    numbers = st.integers(0, len(solving.operations) - 1)
    for number in data.draw(st.sets(numbers, min_size=1, max_size=8)):
        op = solving.operations[number]
        candidates = list(solving.assigner.candidates(op, made.layouts))
        made.decide(number, data.draw(st.sampled_from(candidates)))
    for number, alone in data.draw(
        st.lists(st.tuples(numbers, st.booleans()), min_size=20, max_size=60)
    ):
        for candidate in others(solving, number, made):
            change = OtherAssignment((number,), candidate, alone)
            if failed.fails_again(change):
                again += 1
                assert not tried(solving, change, made, Failed())
            else:
                tried(solving, change, made, failed)
    event("some fail again" if again else "none fails again")


class FromTheStart(Solver):
    """A solver whose every round is held to what all decisions made anew would be."""

    rounds = 0

    def forward_again(self, made: Decisions, preferred: Iterable[str]) -> set[int]:
        before = dict(made.assignments)
        changed = super().forward_again(made, preferred)
        fresh = self.forward()
        assert fresh.same_as(made)
        assert fresh.price == made.price
        assert fresh.moved() == made.moved()
        after = fresh.assignments
        assert changed == {n for n in before if before[n] != after[n]}
        self.rounds += 1
        return changed


Again: TypeAlias = Callable[
    [Backward, Sequence[Assignment], Collection[int]], list[str]
]


def from_the_start(again: Again) -> Again:
    """`again`, held to what a walk through all operations would prefer."""

    def checked(
        walk: Backward, assignments: Sequence[Assignment], numbers: Collection[int]
    ) -> list[str]:
        before = walk.preferences.snapshot()
        changed = again(walk, assignments, numbers)
        after, asked = walk.preferences.snapshot(), dict(walk.asked)
        walk.preferences.restore(before)
        assert sorted(walk.all(assignments)) == sorted(changed)
        assert walk.preferences.snapshot() == after
        assert walk.asked == asked
        return changed

    return checked


SPECS = [P(), P("a"), P("b"), P(None, "a"), P("b", "a"), P(("a", "b"))]


@given(st.lists(st.sampled_from(SPECS), min_size=4, max_size=4))
def test_a_round_decides_as_a_new_start_would(specs: list[P]) -> None:
    def fun(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = jhost.shard(x, specs[0])
        w = jhost.shard(w, specs[1])

        def layer(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            y = jnp.tanh(x @ w) @ v
            return jhost.shard(y + x, specs[2]), y.sum(0)

        y, sums = jax.lax.scan(layer, x, None, length=2)
        return jhost.shard(y.T @ x + sums.sum(0), specs[3])

    program = built(fun, (8, 8), (8, 8), (8, 8), a=2, b=4)
    whole = flattened(program)
    solving = FromTheStart(whole, shardings_of(whole[1]), {})
    with mock.patch.object(Backward, "again", from_the_start(Backward.again)):
        improved(solving, solving.fixed_point())
    assert solving.rounds >= 2
