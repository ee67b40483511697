"""What the verifier refuses, and a few things that it must not."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import pytest

from jhost.errors import IndexRangeError, VerifyError
from jhost.lowering.ir.index import Index, LoopIndex, Rank, as_index, minimum
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.queues import TRANSFERS, on_stream
from jhost.lowering.ir.statements import (
    Allocate,
    Buffer,
    Chunk,
    Compute,
    Deallocate,
    GetCurrentStream,
    Reshard,
    Set,
    SetCurrentStream,
    Stmt,
    Stream,
    Synchronize,
    Wait,
)
from jhost.lowering.verify.program import verify
from tests.lowering.hand_built import (
    MAIN,
    I,
    J,
    buffer,
    communicate,
    compute,
    loop,
    mesh_of,
    program,
    select,
    stream,
)

X = buffer("x: f32[8, 4]")
Y = buffer("y: f32[8, 4]")
T = buffer("t: f32[8, 4]")
TP = Rank("tp")


def given(
    *body: Stmt, params: Sequence[Buffer] = (X,), results: Sequence[Buffer] = (Y,)
) -> Program:
    return program(mesh_of(dp=2, tp=4), params, results, *body)


def copy(out: Buffer, source: Buffer) -> Set:
    return Set(out=out, source=source)


def refuses(fragment: str, *body: Stmt, results: Sequence[Buffer] = (Y,)) -> None:
    with pytest.raises(VerifyError, match=fragment):
        verify(given(*body, results=results))


# --- The message -------------------------------------------------------------------- #


def test_an_error_says_the_pass_the_statement_and_the_iteration() -> None:
    wrong = given(loop(2, copy(Y, T)))
    with pytest.raises(VerifyError) as caught:
        verify(wrong, after="segment")
    message = str(caught.value)
    assert message.startswith(
        "after segment: y: f32[8, 4] = Set(t): at i = 0: expected"
    )
    assert caught.value.__notes__ == [str(wrong)]


# --- Names and contents ------------------------------------------------------------- #


def test_a_buffer_is_defined_before_use() -> None:
    refuses("a buffer is defined before it is used", copy(Y, T))


def test_a_buffer_of_a_loop_ends_with_the_iteration() -> None:
    refuses("defined before it is used", loop(2, copy(T, X)), copy(Y, T))


def test_no_name_is_defined_twice() -> None:
    refuses("no buffer is defined twice", Allocate(buffer=Y), Allocate(buffer=Y))


def test_no_alias_takes_a_name_in_use() -> None:
    refuses("no buffer is defined twice", select(X, X, 0, 0, 8))


def test_a_name_is_one_buffer() -> None:
    other = buffer("x: f32[8, 2]")
    refuses("one name is one buffer", copy(buffer("y: f32[8, 2]"), other))


def test_a_buffer_is_written_before_it_is_read() -> None:
    refuses("written before it is read", Allocate(buffer=T), copy(Y, T))


def test_a_part_is_written_before_it_is_read() -> None:
    low, high = buffer("low: f32[4, 4]"), buffer("high: f32[4, 4]")
    refuses(
        "nothing has been written",
        Allocate(buffer=Y),
        select(low, Y, 0, 0, 4),
        select(high, Y, 0, 4, 4),
        compute(jnp.sin, (high,), (low,)),
    )


def test_a_result_is_written() -> None:
    refuses("written before it is read", Allocate(buffer=Y))


def test_a_result_exists() -> None:
    refuses("defined before it is used")


def test_a_result_is_not_partial() -> None:
    partial = buffer("y: f32[8, 4]", partial={"tp": "sum"})
    part = compute(jnp.sin, (X,), (partial,))
    refuses("partial values live only inside", part, results=(partial,))


def test_a_param_is_not_partial() -> None:
    partial = buffer("y: f32[8, 4]", partial={"tp": "sum"})
    with pytest.raises(VerifyError, match="partial values live only inside"):
        verify(given(params=(partial,), results=()))


# --- Allocate and Deallocate -------------------------------------------------------- #


def test_nothing_uses_a_freed_buffer() -> None:
    refuses(
        "nothing uses a buffer after its Deallocate",
        copy(T, X),
        Deallocate(buffer=T),
        copy(Y, T),
    )


def test_nothing_uses_an_alias_of_a_freed_buffer() -> None:
    part = buffer("part: f32[4, 4]")
    refuses(
        "part, which is deallocated",
        copy(T, X),
        select(part, T, 0, 0, 4),
        Deallocate(buffer=T),
        copy(buffer("y: f32[4, 4]"), part),
    )


def test_no_buffer_is_freed_twice() -> None:
    free = Deallocate(buffer=T)
    refuses("no buffer is freed twice", copy(T, X), free, free)


def test_what_a_loop_frees_it_frees_once() -> None:
    free = Deallocate(buffer=T)
    refuses("no buffer is freed twice", copy(T, X), loop(2, free), copy(Y, X))


def test_a_program_that_frees_does_not_leak() -> None:
    other = buffer("other: f32[8, 4]")
    steps = (copy(T, X), copy(other, X), copy(Y, T), Deallocate(buffer=T))
    refuses(r"expected a Deallocate\(other\)", *steps)


def test_a_loop_that_frees_does_not_leak() -> None:
    other = buffer("other: f32[8, 4]")
    body = (copy(T, X), copy(other, X), Deallocate(buffer=T))
    refuses(r"expected a Deallocate\(other\)", copy(Y, X), loop(2, *body))


def test_a_program_without_deallocations_may_keep_everything() -> None:
    verify(given(copy(T, X), copy(Y, T)))


def test_a_result_is_never_freed() -> None:
    refuses("a result is never deallocated", copy(Y, X), Deallocate(buffer=Y))


def test_the_memory_of_a_result_that_is_an_alias_is_never_freed() -> None:
    part = buffer("y: f32[4, 4]")
    free = Deallocate(buffer=T)
    steps = (copy(T, X), select(part, T, 0, 0, 4), free)
    refuses("a result is never deallocated", *steps, results=(part,))


def test_params_and_aliases_are_not_freed() -> None:
    refuses("aliases and parameters are not deallocated", Deallocate(buffer=X))
    part = buffer("part: f32[4, 4]")
    steps = (copy(T, X), select(part, T, 0, 0, 4), Deallocate(buffer=part))
    refuses("part, a part of t", *steps)


# --- Aliases ------------------------------------------------------------------------ #


@pytest.mark.parametrize(
    ("index", "size"), [(8, 1), (-1, 1), (6, 3), (0, 0), (I * 4, 5), (TP * 2 + 1, 2)]
)
def test_an_alias_lies_inside_its_source(index: Index | int, size: int) -> None:
    part = buffer(f"part: f32[{size}, 4]")
    with pytest.raises(IndexRangeError, match="an alias lies inside its source") as e:
        verify(given(loop(2, select(part, X, 0, index, size))))
    assert "program f on dp=2, tp=4" in e.value.__notes__[0]


def test_groups_are_equal_parts() -> None:
    refuses("groups are equal", select(buffer("p: f32[3, 4]"), X, 0, 0, 1, groups=3))


def test_an_alias_is_along_a_dim() -> None:
    refuses("an alias is along a dim", select(buffer("p: f32[8, 4]"), X, 2, 0, 1))


def test_only_a_dim_of_one_element_is_dropped() -> None:
    part = select(buffer("p: f32[4]"), X, 0, 0, 2, drop=True)
    refuses("only a dim of one element can be dropped", part)


def test_an_alias_has_the_shape_of_its_part() -> None:
    refuses("expected p of shape", select(buffer("p: f32[3, 4]"), X, 0, 0, 2))


def test_a_ragged_last_chunk_may_be_smaller() -> None:
    part = select(buffer("p: f32[3, 4]"), X, 0, I * 3, minimum(3, 8 - I * 3))
    verify(given(copy(Y, X), loop(3, part)))


def test_an_alias_keeps_the_other_dims_and_the_dtype() -> None:
    for text in ("p: f32[2, 4@tp]", "p: i32[2, 4]"):
        refuses("only in the selected dim", select(buffer(text), X, 0, 0, 2))


def test_sizes_are_static() -> None:
    refuses("a size is static", select(buffer("p: f32[2, 4]"), X, 0, 0, TP + 1))


def test_an_index_is_of_enclosing_loops() -> None:
    refuses("an index depends on", select(buffer("p: f32[1, 4]"), X, 0, LoopIndex("k")))


def test_an_index_is_of_axes_of_the_mesh() -> None:
    refuses(r"got rank\(pp\)", select(buffer("p: f32[1, 4]"), X, 0, Rank("pp")))


def test_params_and_their_aliases_are_only_read() -> None:
    refuses("parameters and their aliases are only read", copy(X, X))
    part = buffer("part: f32[8, 4]")
    refuses("a part of parameter x", select(part, X, 0, 0, 8), copy(part, X))


def test_no_element_is_written_through_two_aliases() -> None:
    a, b = buffer("a: f32[5, 4]"), buffer("b: f32[5, 4]")
    five = buffer("five: f32[5, 4]")
    refuses(
        "a and b of y",
        select(five, X, 0, 0, 5),
        Allocate(buffer=Y),
        select(a, Y, 0, 0, 5),
        select(b, Y, 0, 3, 5),
        copy(a, five),
        copy(b, five),
    )


def test_the_ranks_of_two_writes_are_compared() -> None:
    a, b = buffer("a: f32[2, 4]"), buffer("b: f32[2, 4]")
    two = buffer("two: f32[2, 4]")

    def writes(first: Index, second: Index) -> Program:
        return given(
            select(two, X, 0, 0, 2),
            Allocate(buffer=Y),
            loop(
                4,
                select(a, Y, 0, first * 2, 2),
                select(b, Y, 0, second * 2, 2),
                copy(a, two),
                copy(b, two),
            ),
        )

    verify(writes((TP + I) % 4, (TP + I + 1) % 4))
    with pytest.raises(VerifyError, match="written through two aliases"):
        verify(writes((TP + I) % 4, as_index(0)))


def test_an_alias_may_be_written_with_its_own_alias() -> None:
    a, b = buffer("a: f32[4, 4]"), buffer("b: f32[2, 4]")
    four, two = buffer("four: f32[4, 4]"), buffer("two: f32[2, 4]")
    verify(
        given(
            select(four, X, 0, 0, 4),
            select(two, X, 0, 0, 2),
            Allocate(buffer=Y),
            select(a, Y, 0, 4, 4),
            select(b, a, 0, 2, 2),
            copy(a, four),
            copy(b, two),
        )
    )


# --- Set and Compute ---------------------------------------------------------------- #


def test_a_set_copies() -> None:
    refuses("a Set converts nothing", copy(buffer("y: i32[8, 4]"), X))
    refuses("only a Reshard changes the layout", copy(buffer("y: f32[8@tp, 4]"), X))
    refuses("the shape of the value written", copy(buffer("y: f32[2, 4]"), X))


def test_a_reshard_keeps_the_global_shape() -> None:
    def reshard(text: str) -> Reshard:
        return Reshard(out=buffer(text), source=X)

    verify(given(reshard("y: f32[2@tp, 4]"), results=()))
    refuses("a Reshard moves elements", reshard("y: f32[4@tp, 4]"))
    refuses("a Reshard converts nothing", reshard("y: i32[2@tp, 4]"))


def test_a_computation_has_a_buffer_for_each_variable() -> None:
    stmt = compute(jnp.add, (X, X), (Y,))
    refuses("a buffer for each variable", Compute(unit=stmt.unit, ins=(X,), outs=(Y,)))


def test_operands_have_the_type_of_their_variables() -> None:
    stmt = compute(jnp.sin, (X,), (Y,))
    part = buffer("part: f32[4, 4]")
    wrong = Compute(unit=stmt.unit, ins=(part,), outs=(Y,))
    refuses("the type of its variable", select(part, X, 0, 0, 4), wrong)


def test_results_have_the_type_of_their_variables() -> None:
    wrong_dtype = compute(jnp.sin, (X,), (buffer("y: bf16[8, 4]"),))
    refuses("the type of its variable", wrong_dtype)
    wrong_shape = compute(jnp.sin, (X,), (buffer("y: f32[8, 2]"),))
    refuses("the shape of the value written", wrong_shape)
    refuses(
        "the shape of the value written",
        Allocate(buffer=wrong_shape.outs[0]),
        wrong_shape,
    )


def test_a_chunk_lies_inside_its_extent() -> None:
    chunk = Chunk(start=I * 3, size=as_index(3), extent=8)
    with pytest.raises(IndexRangeError, match="a chunk lies inside"):
        verify(given(loop(3, compute(jnp.sin, (X,), (Y,), chunk=chunk))))


def test_a_chunk_starts_and_ends_at_multiples_of_its_grain() -> None:
    chunk = Chunk(start=I * 2, size=as_index(2), extent=8, grain=4)
    with pytest.raises(IndexRangeError, match="at multiples of its grain"):
        verify(given(loop(3, compute(jnp.sin, (X,), (Y,), chunk=chunk))))


def test_an_accumulator_exists() -> None:
    refuses("defined before", compute(jnp.sin, (X,), (Y,), reducer="sum"))


# --- Communication ------------------------------------------------------------------ #

PART = buffer("part: f32[2@tp, 4]")
GATHER = communicate("AllGather", Y, PART, dim=0)


def communicates(fragment: str, *body: Stmt) -> None:
    with pytest.raises(VerifyError, match=fragment):
        verify(given(*body, params=(X, PART)))


def test_a_permute_sends_each_device_something() -> None:
    twice_their_rank = communicate("CollectivePermute", Y, X, shift=TP)
    refuses(r"a permutation of devices, got rank\(tp\)", twice_their_rank)


def test_a_permute_is_one_in_each_row_of_the_mesh() -> None:
    """Its shift may differ from row to row, and then each row is looked at."""
    wait = Wait(communication="c")
    differs = communicate("CollectivePermute", Y, X, shift=Rank("dp"))
    verify(given(differs, wait))
    in_one_row = communicate("CollectivePermute", Y, X, shift=TP * Rank("dp"))
    refuses(r"a permutation of devices, got .* send to \[0, 2, 0, 2\]", in_one_row)


def test_a_communication_is_waited_for() -> None:
    communicates("the end of the program: every communication is waited for", GATHER)


def test_a_communication_is_waited_for_in_its_buffers_life() -> None:
    local = communicate("AllGather", T, PART, dim=0)
    communicates("the end of t's life", copy(Y, X), loop(2, local))


def test_a_communication_is_waited_for_once() -> None:
    wait = Wait(communication="c")
    communicates("waited for exactly once", GATHER, wait, wait)


def test_a_communication_is_waited_for_before_it_is_issued_again() -> None:
    other = communicate("AllGather", T, PART, dim=0)
    communicates("another communication c", GATHER, other)


def test_what_is_received_is_read_after_the_wait() -> None:
    communicates("is read after its Wait", GATHER, copy(T, Y))


def test_what_is_sent_is_written_after_the_wait() -> None:
    source = buffer("source: f32[2@tp, 4]")
    gather = communicate("AllGather", Y, source, dim=0)
    communicates(
        "are written after its Wait", copy(source, PART), gather, copy(source, PART)
    )


def test_collectives_over_the_same_devices_end_in_the_order_of_their_issue() -> None:
    first = communicate("AllGather", T, PART, dim=0)
    second = communicate("AllGather", Y, PART, dim=0, name="later")
    waits = Wait(communication="later"), Wait(communication="c")
    in_order = on_stream(TRANSFERS, [first, second, *reversed(waits)])
    start = GetCurrentStream(stream=MAIN)
    verify(given(start, *in_order, params=(PART,)))
    communicates(
        r"expected a Wait\(c\) before, got a Wait\(later\), which was issued later",
        start,
        *on_stream(TRANSFERS, [first, second, *waits]),
    )


def test_what_is_in_flight_is_not_freed() -> None:
    free = Deallocate(buffer=T)
    gather = communicate("AllGather", T, PART, dim=0)
    communicates("a buffer in flight is not deallocated", gather, free)


def test_a_kind_has_its_fields() -> None:
    communicates("AllGather has these fields", communicate("AllGather", Y, PART))
    both = communicate("AllGather", Y, PART, dim=0, reducer="sum")
    communicates("got reducer = sum", both)


def test_axes_that_trade_places_are_two_of_one_size() -> None:
    wrong = communicate("SwapAxes", Y, PART, ("tp",))
    communicates("two axes that are swapped have the same", wrong)


def test_axes_are_distinct_axes_of_the_mesh() -> None:
    for axes in ((), ("pp",), ("tp", "tp")):
        wrong = communicate("AllGather", Y, PART, axes, dim=0)
        communicates("distinct axes of the mesh", wrong)


def test_a_communication_is_along_a_dim() -> None:
    communicates("a dim below 2", communicate("AllGather", Y, PART, dim=2))


def test_a_communication_converts_nothing() -> None:
    wrong = communicate("AllGather", buffer("y: i32[8, 4]"), PART, dim=0)
    communicates("a communication converts nothing", wrong)


def test_a_result_has_the_shape_that_the_kind_gives() -> None:
    wrong = communicate("AllGather", buffer("y: f32[4, 4]"), PART, dim=0)
    communicates("the shape of the value written", wrong)


def test_what_is_scattered_divides() -> None:
    odd = buffer("odd: f32[6, 4]")
    six = select(odd, X, 0, 0, 6)
    scatter = communicate(
        "AllToAll", buffer("y: f32[1@tp, 16]"), odd, dim=0, source_dim=1
    )
    communicates("the number of devices divides", six, scatter)


def test_what_is_gathered_was_spread() -> None:
    whole = communicate("AllGather", buffer("y: f32[32, 4]"), X, dim=0)
    communicates("a gathered dim is spread", whole)


def test_dims_follow_from_the_source() -> None:
    wrong = communicate("AllGather", buffer("y: f32[8@tp, 4]"), PART, dim=0)
    communicates("follow from its source", wrong)


def test_a_reduction_is_of_what_is_partial() -> None:
    communicates("a reduction reduces", communicate("AllReduce", Y, X, reducer="sum"))
    partial = buffer("t: f32[8, 4]", partial={"tp": "sum"})
    made = compute(jnp.sin, (X,), (partial,))
    wrong = communicate("AllReduce", Y, partial, reducer="max")
    communicates("a reduction reduces", made, wrong)


# --- Streams ------------------------------------------------------------------------ #


def test_a_program_ends_on_its_stream() -> None:
    leave = SetCurrentStream(stream=stream(1))
    refuses("to be current at the end of the program", copy(Y, X), leave)


def test_a_loop_ends_on_its_stream() -> None:
    leave = SetCurrentStream(stream=stream(I))
    refuses("to be current at the end of the loop", loop(2, leave), copy(Y, X))


def test_a_stream_is_set_before_it_is_waited_for() -> None:
    refuses("set before it is waited for", Synchronize(stream=stream(0)))
    refuses("set before it is waited for", Synchronize(stream=MAIN))


def test_the_number_of_a_stream_is_static() -> None:
    refuses("a stream index is static", SetCurrentStream(stream=Stream(index=TP)))


def test_a_captured_stream_can_be_waited_for() -> None:
    verify(given(GetCurrentStream(stream=MAIN), Synchronize(stream=MAIN), copy(Y, X)))


# --- Control ------------------------------------------------------------------------ #


def test_nested_loops_have_their_own_indices() -> None:
    refuses("indices of their own", loop(2, loop(2, copy(T, X))))
    verify(given(loop(2, loop(2, copy(T, X), index=J)), copy(Y, X)))
