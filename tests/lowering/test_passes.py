"""Each pass on one small program, and what holds of the passes on any program."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost import errors
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.marks import ShardMark, StreamChoice
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.ir.statements import (
    Allocate,
    Communicate,
    Compute,
    Deallocate,
    For,
    Reshard,
    Select,
    Set,
    Stmt,
    Wait,
    walk,
)
from jhost.lowering.layouts.convert_to_communications import (
    ConvertToCommunications,
    linear_rank,
)
from jhost.lowering.layouts.delay_reductions import DelayReductions
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from jhost.lowering.loops.lower_streams import LowerStreams
from jhost.lowering.loops.split_all_reduces import SplitAllReduces
from jhost.lowering.pipeline import VERIFIES_EACH, Pass, passes, run_passes
from jhost.lowering.schedule.compute_late import ComputeLate
from jhost.lowering.units.insert_deallocations import InsertDeallocations
from jhost.lowering.units.segment import Segment
from jhost.lowering.verify.program import verify
from tests.lowering.traced import asked, built, loops

Golden = Callable[..., None]
SEQUENCE = passes(settings=StreamDefaults(), streams=4).all


def mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Gather rows, matmul, activation, matmul, scatter rows; the rows in two chunks."""
    x = jhost.shard(x, P("tp", None))
    w, v = jhost.shard(w, P(None, "tp")), jhost.shard(v, P("tp", None))
    y = jhost.stream(jnp.tanh(x @ w) @ v, axis=0, chunks=2)
    return jhost.shard(y, P("tp", None))


def mlp_before(name: str) -> Program:
    """The program of `mlp` as the pass of that name meets it."""
    program = built(mlp, (4, 6), (6, 12), (12, 6), tp=2)
    for step in SEQUENCE:
        if step.name == name:
            return program
        program = step.apply(program)
    return program


# --- One program through every pass ------------------------------------------------- #


def test_the_passes_stand_in_order() -> None:
    assert [step.name for step in SEQUENCE] == [
        "in_blocks",
        "pad_uneven",
        "split_axes",
        "choose_pipelines",
        "choose_layouts",
        "find_streams",
        "propagate_layouts",
        "carry_partial_sums",
        "delay_reductions",
        "convert_to_communications",
        "split_all_reduces",
        "leave_idle_marks",
        "combine_small",
        "compute_late",
        "lower_streams",
        "order_by_steps",
        "choose_schedule",
        "segment",
        "schedule_loops",
        "insert_deallocations",
        "choose_permutes",
    ]


def test_the_program_as_it_is_built(golden: Golden) -> None:
    golden(str(built(mlp, (4, 6), (6, 12), (12, 6), tp=2)))


# The passes that leave `mlp` alone have programs of their own.
LEAVING = (
    "delay_reductions",
    "split_all_reduces",
    "leave_idle_marks",
    "combine_small",
    "compute_late",
    "order_by_steps",
    "choose_schedule",
    "choose_permutes",
)
STEPS = [step for step in SEQUENCE if step.name not in LEAVING]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_the_program_after(step: Pass, golden: Golden) -> None:
    """Before is the golden text of the pass above it."""
    program = step.apply(mlp_before(step.name))
    verify(program, after=step.name)
    golden(str(program))


def test_a_hook_sees_the_program_after_every_pass() -> None:
    seen: list[tuple[str, Program]] = []
    program = built(mlp, (4, 6), (6, 12), (12, 6), tp=2)
    last = run_passes(program, SEQUENCE, lambda *args: seen.append(args))
    assert [name for name, _ in seen] == [step.name for step in SEQUENCE]
    assert seen[-1][1] is last


class Cutting:
    """A pass that breaks a program: its results are never made."""

    name: ClassVar[str] = "cutting"

    def apply(self, program: Program) -> Program:
        return dataclasses.replace(program, body=program.body[:2])


class Last:
    """A pass behind it, which no error is to name."""

    name: ClassVar[str] = "last"

    def apply(self, program: Program) -> Program:
        return dataclasses.replace(program, body=program.body[:1])


def test_an_error_at_the_end_names_the_pass_that_made_it() -> None:
    program = built(mlp, (4, 6), (6, 12), (12, 6), tp=2)
    token = VERIFIES_EACH.set(False)
    try:
        with pytest.raises(errors.VerifyError, match="after cutting"):
            run_passes(program, (Cutting(), Last()))
        # Before any pass, it is not verified by itself.
        with pytest.raises(errors.VerifyError, match="after build"):
            run_passes(Cutting().apply(program), (Last(),))
    finally:
        VERIFIES_EACH.reset(token)


def summed(x: jax.Array, w: jax.Array) -> jax.Array:
    x, w = jhost.shard(x, P(None, "tp")), jhost.shard(w, P("tp", None))
    return jhost.shard(jhost.stream(x @ w, axis=0, pipeline="p2p"), P())


def test_an_all_reduce_is_split_for_a_p2p_pipeline(golden: Golden) -> None:
    sequence = (PropagateLayouts(), DelayReductions(), ConvertToCommunications())
    program = run_passes(asked(summed, (4, 6), (6, 2), tp=2), sequence)
    golden(str(program), "before")
    program = SplitAllReduces().apply(program)
    verify(program)
    golden(str(program), "after")


def test_an_all_reduce_stays_whole_for_any_other_pipeline() -> None:
    program = mlp_before("split_all_reduces")
    assert SplitAllReduces().apply(program) == program


def operations(program: Program) -> list[str]:
    stmts = [stmt for stmt in program.body if isinstance(stmt, Compute)]
    return [stmt.unit.eqns[0].eqn.primitive.name for stmt in stmts]


def test_what_is_cheap_is_computed_where_it_is_read() -> None:
    """And what that reads before it; contractions stay where they are."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        slope = jnp.cos(jnp.sin(x))
        y = jnp.tanh(x @ w)
        return jhost.stream(y * slope, axis=0)

    late = ComputeLate().apply(asked(f, (4, 6), (6, 6)))
    verify(late)
    assert operations(late) == ["dot_general", "sin", "cos", "tanh", "mul"]


def test_what_makes_less_of_what_it_reads_is_computed_at_once() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        half = (x @ w)[:, :3]
        return jhost.stream(jnp.concatenate([half, jnp.tanh(x @ x.T)[:, :3]], 1), 0)

    program = built(f, (4, 4), (4, 6))
    assert operations(ComputeLate().apply(program)) == operations(program)


def test_without_streams_nothing_is_put_off() -> None:
    program = built(lambda x, w: (x @ w) * jnp.sin(x), (4, 4), (4, 4))
    assert ComputeLate().apply(program) is program


# --- Options and borders of each pass ----------------------------------------------- #


def test_the_shardings_are_taken_when_reductions_have_been_delayed() -> None:
    before = mlp_before("propagate_layouts")
    between = PropagateLayouts().apply(before)
    assert len(before.marks) == len(between.marks) == 5
    after = DelayReductions().apply(between)
    assert [type(mark) for mark in after.marks] == [StreamChoice]


def test_propagation_writes_reshards_and_no_communication() -> None:
    """nvFuser's resharding expressions; what they become is the next pass's."""
    program = PropagateLayouts().apply(mlp_before("propagate_layouts"))
    kinds = {type(stmt) for stmt in program.body}
    assert kinds == {Compute, Reshard}


def test_a_set_between_equal_layouts_stays_a_copy() -> None:
    program = built(lambda x: jnp.copy(x), (4,), tp=2)
    program = run_passes(program, (PropagateLayouts(), ConvertToCommunications()))
    assert [type(stmt) for stmt in program.body] == [Set]


def test_a_result_that_is_a_part_by_rank_is_copied_out() -> None:
    """An alias has no memory of its own, and a result must have."""
    program = built(lambda x: jhost.shard(jnp.copy(x), P("tp")), (4,), tp=2)
    x = ShardMark(buffer="x", spec=((),), where="")
    program = dataclasses.replace(program, marks=(*program.marks, x))
    program = run_passes(program, (PropagateLayouts(), ConvertToCommunications()))
    assert [type(stmt) for stmt in program.body] == [Select, Set]
    assert program.results[0].shape == (2,)


def test_the_linear_rank_counts_the_last_axis_fastest() -> None:
    index = linear_rank(("dp", "tp"), {"dp": 2, "tp": 4})
    assert str(index) == "rank(dp) * 4 + rank(tp)"


@pytest.mark.parametrize("streams", [1, 2, 3, 8])
def test_iterations_take_turns_on_as_many_streams_as_given(streams: int) -> None:
    program = asked(lambda x: jhost.stream(jnp.tanh(x), axis=0, chunks=4), (8,))
    body = LowerStreams(streams=streams).apply(program).body
    wait, work = (stmt for stmt in body if isinstance(stmt, For))
    assert (wait.extent, work.extent) == (min(streams, 4), 4)


def test_marks_that_do_not_say_take_the_functions_chunks() -> None:
    program = built(lambda x: jhost.stream(jnp.tanh(x), axis=0), (8,))
    (loop,) = loops(LowerStreams().apply(StreamDefaults(chunks=8).applied_to(program)))
    assert loop.extent == 8


def test_no_chunk_count_means_no_loop() -> None:
    program = asked(lambda x: jhost.stream(jnp.tanh(x), axis=0), (8,))
    assert loops(LowerStreams().apply(program)) == []


def test_a_program_without_marks_has_no_loops() -> None:
    program = built(lambda x: jnp.tanh(x), (8,))
    assert LowerStreams().apply(program) == program


# --- Deallocation ------------------------------------------------------------------- #


def diamond(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two results, one of which is read again."""
    y = jnp.sort(x)
    return y, jnp.cumsum(jnp.sort(y * 2) + y)


def attention(q: jax.Array, k: jax.Array) -> jax.Array:
    scores = jax.nn.softmax(q @ k.T, axis=-1)
    return jhost.stream(scores @ k, axis=0, chunks=3)


def weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    x, g = jhost.shard(x, P("tp", None)), jhost.shard(g, P("tp", None))
    return jhost.stream(x, axis=0, chunks=2).T @ g


PROGRAMS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "mlp": (mlp, [(4, 6), (6, 12), (12, 6)]),
    "diamond": (diamond, [(8,)]),
    "attention": (attention, [(6, 4), (6, 4)]),
    "weight_gradient": (weight_gradient, [(8, 4), (8, 4)]),
    "identity": (lambda x: x, [(8,)]),
    "two of one": (lambda x: (jnp.tanh(x),) * 2, [(8,)]),
}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    fun, shapes = PROGRAMS[request.param]
    return run_passes(built(fun, *shapes, tp=2), SEQUENCE)


def bodies(body: Sequence[Stmt]) -> Iterator[Sequence[Stmt]]:
    yield body
    for stmt in body:
        if isinstance(stmt, For):
            yield from bodies(stmt.body)


def owners(program: Program) -> dict[str, str]:
    """For each buffer or alias, whose memory it is."""
    owner = {buffer.name: buffer.name for buffer in program.params}
    for stmt in walk(program.body):
        if isinstance(stmt, Select):
            owner[stmt.out.name] = owner.get(stmt.source.name, stmt.source.name)
        elif not isinstance(stmt, For):
            for buffer in reads_writes(stmt)[1]:
                owner.setdefault(buffer.name, buffer.name)
    return owner


def test_each_buffer_is_freed_once(program: Program) -> None:
    """All but parameters, results and aliases, which own no memory."""
    frees = [s for s in walk(program.body) if isinstance(s, Deallocate)]
    caller = {buffer.name for buffer in (*program.params, *program.results)}
    made = {owner for owner in owners(program).values() if owner not in caller}
    assert Counter(free.buffer.name for free in frees) == Counter(made)


def test_each_buffer_is_freed_right_after_its_last_use(program: Program) -> None:
    """And only after the wait, where a communication reads it."""
    owner = owners(program)
    for body in bodies(program.body):
        last: dict[str, int] = {}
        for number, stmt in enumerate(body):
            if isinstance(stmt, Deallocate):
                between = body[last[stmt.buffer.name] + 1 : number]
                assert all(isinstance(s, Deallocate | Wait) for s in between)
                used = body[last[stmt.buffer.name]]
                assert not isinstance(used, Communicate) or isinstance(between[0], Wait)
                continue
            for buffer in itertools.chain(*reads_writes(stmt)):
                last[owner.get(buffer.name, buffer.name)] = number


def test_results_and_parameters_are_never_freed(program: Program) -> None:
    freed = {s.buffer.name for s in walk(program.body) if isinstance(s, Deallocate)}
    assert not freed & {b.name for b in (*program.params, *program.results)}


def test_what_an_iteration_makes_it_frees() -> None:
    """Allocations before a loop are freed after it, never inside."""
    fun, shapes = PROGRAMS["attention"]
    program = run_passes(built(fun, *shapes), SEQUENCE)
    before = {s.buffer.name for s in program.body if isinstance(s, Allocate)}
    for loop in loops(program):
        inside = {s.buffer.name for s in walk(loop.body) if isinstance(s, Deallocate)}
        assert not inside & before


def test_deallocation_alone_changes_nothing_else() -> None:
    before = mlp_before("insert_deallocations")
    after = InsertDeallocations().apply(before)

    def without(body: Sequence[Stmt]) -> list[Stmt]:
        kept = [stmt for stmt in body if not isinstance(stmt, Deallocate)]
        return [
            dataclasses.replace(s, body=tuple(without(s.body)))
            if isinstance(s, For)
            else s
            for s in kept
        ]

    assert tuple(without(after.body)) == before.body


def test_segmenting_twice_changes_nothing() -> None:
    once = Segment().apply(mlp_before("segment"))
    assert str(Segment().apply(once)) == str(once)
