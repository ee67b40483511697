"""Check the invariants of a Host IR program: one function for each node kind.

Loops are run through with the numbers that their indices have at every rank, which is
exact and, with the small extents of chunk loops, quick.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jhost import errors
from jhost.lowering.ir import statements as ir
from jhost.lowering.ir.accumulate import accumulators
from jhost.lowering.ir.machine import DEFAULT_STREAM
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.unit_printer import type_text
from jhost.lowering.units.evaluate import (
    ChunkAt,
    LocalType,
    Site,
    UnitTypes,
    unit_types,
)
from jhost.lowering.verify.communication import (
    check_communicate,
    check_wait,
)
from jhost.lowering.verify.control_flow import check_control_flow
from jhost.lowering.verify.known import Root
from jhost.lowering.verify.loops import check_loop
from jhost.lowering.verify.memory import (
    check_allocate,
    check_deallocate,
    check_neighbours,
    check_reshard,
    check_select,
    check_set,
)
from jhost.lowering.verify.state import State, TypesOfUnits


def verify(
    program: Program,
    after: str = "",
    types: TypesOfUnits | None = None,
) -> None:
    """Check `program`, the result of the pass named `after`.

    Operands and results of a body may be partial, because outside they are, too.
    The `types` of units are those found before, and have those found here afterwards.

    Raises:
        VerifyError: an invariant does not hold; the printed program is a note.
        IndexRangeError: an alias lies outside its source.
    """
    state = State(program, after, {} if types is None else types)
    try:
        if not program.is_body:
            _check_ends(state)
        for param in program.params:
            state.define(param, param.shape, Root(name=param.name, is_param=True))
        _body(state, program.body)
        _end(state)
    except (errors.VerifyError, errors.IndexRangeError) as error:
        error.add_note(str(program))
        raise


def _body(state: State, body: Sequence[ir.Stmt]) -> None:
    for stmt in body:
        state.stmt = stmt
        _statement(state, stmt)


def _statement(state: State, stmt: ir.Stmt) -> None:
    match stmt:
        case ir.Allocate():
            check_allocate(state, stmt)
        case ir.Deallocate():
            check_deallocate(state, stmt)
        case ir.Select():
            check_select(state, stmt)
        case ir.Set():
            check_set(state, stmt)
        case ir.Reshard():
            check_reshard(state, stmt)
        case ir.Neighbours():
            check_neighbours(state, stmt)
        case ir.Compute():
            _compute(state, stmt)
        case ir.Communicate():
            check_communicate(state, stmt)
        case ir.Wait():
            check_wait(state, stmt)
        case ir.GetCurrentStream() | ir.SetCurrentStream():
            state.switch(stmt)
            state.used_streams.add(state.current)
        case ir.Synchronize():
            state.check_used(stmt.stream)
        case ir.For():
            check_loop(state, stmt, _body)
        case ir.NextStage():
            _outside_of_loops(state)
        case ir.Scan() | ir.While() | ir.Cond():
            check_control_flow(state, stmt)
            for body in stmt.bodies:
                _verify_body(body, state)


def _verify_body(body: Program, state: State) -> None:
    """Check a body once: what it is given is checked where it stands."""
    # Most passes leave most bodies as they are, and these are verified once in all.
    if _verify_body not in body.derived:
        verify(body, state.after, state.types)
        body.derived[_verify_body] = True


# --- The program's ends ------------------------------------------------------- #


def _check_ends(state: State) -> None:
    for param in state.program.params:
        _check_not_partial(state, param, "parameter")
    for result in state.program.results:
        _check_not_partial(state, result, "result")


def _end(state: State) -> None:
    state.stmt = None
    state.check_restored(DEFAULT_STREAM, "the program")
    for name in state.in_flight:
        state.fail(
            f"a Wait({name})",
            "the end of the program",
            "every communication is waited for exactly once",
        )
    for result in state.program.results:
        known = state.read(result)
        if known.shape != result.shape:
            state.fail(
                type_text(result), f"{known.shape}", "a result has its declared shape"
            )
    state.check_ended()


def _check_not_partial(state: State, buffer: ir.Buffer, what: str) -> None:
    if buffer.partial:
        state.fail(
            f"a {what} with nothing left to reduce",
            f"{buffer.name}: {type_text(buffer)}",
            "partial values live only inside a program",
        )


def _outside_of_loops(state: State) -> None:
    """Refuse a border between stages: a loop's body comes without them, one by one."""
    state.fail("a loop around", "none", "the body of a loop has stages")


# --- Computation -------------------------------------------------------------- #


def _compute(state: State, stmt: ir.Compute) -> None:
    ins, outs = _types(state, stmt)
    _check_arity(state, stmt.ins, ins)
    _check_arity(state, stmt.outs, outs)
    for buffer, type_ in zip(stmt.ins, ins, strict=True):
        known = state.read(buffer)
        # The shape that it has in this iteration: a ragged last chunk is declared
        # larger.
        if type_ is not None and (known.shape, buffer.dtype) != _pair(type_):
            _fail_type(state, buffer, known.shape, type_)
    sums = accumulators(stmt)
    for number, (buffer, type_) in enumerate(zip(stmt.outs, outs, strict=True)):
        if type_ is not None and buffer.dtype != type_.dtype:
            _fail_type(state, buffer, buffer.shape, type_)
        # No equation of the unit makes it: nothing is known but what is declared.
        shape = buffer.shape if type_ is None else type_.shape
        if number in sums:  # the first result may find a fresh buffer
            state.look_up(buffer)
        state.write(buffer, shape)


def _types(state: State, stmt: ir.Compute) -> UnitTypes:
    """What its unit takes and gives: in all iterations of a loop the same."""
    chunk = stmt.chunk and _check_chunk(state, stmt.chunk)
    place = id(stmt.unit), chunk
    known = state.types.get(place)
    if known is None:
        # Shapes do not depend on the rank, nor on where a chunk starts.
        site = Site(mesh=state.ranks.sizes, rank=lambda axis: 0, chunk=chunk)
        # The unit is kept, so that no other gets its identity.
        known = state.types[place] = stmt.unit, unit_types(stmt.unit, site)
    return known[1]


def _check_chunk(state: State, chunk: ir.Chunk) -> ChunkAt:
    size = state.static(chunk.size, "size")
    start = np.asarray(state.value(chunk.start))
    if size < 1 or (start < 0).any() or (start + size > chunk.extent).any():
        raise errors.IndexRangeError(
            f"{state.where()}expected a part of [0 : {chunk.extent}], got "
            f"[{chunk.start} : +{size}]: a chunk lies inside its loop's extent"
        )
    if (start % chunk.grain).any() or size % chunk.grain:
        raise errors.IndexRangeError(
            f"{state.where()}expected multiples of {chunk.grain}, got [{chunk.start} : "
            f"+{size}]: a chunk starts and ends at multiples of its grain"
        )
    # Where it starts changes no shape: all iterations have one entry in `types`.
    return ChunkAt(start=0, size=size, extent=chunk.extent, groups=chunk.groups)


def _check_arity(
    state: State, buffers: Sequence[ir.Buffer], types: Sequence[LocalType]
) -> None:
    if len(buffers) != len(types):
        state.fail(
            f"{len(types)} buffers",
            f"{len(buffers)}",
            "a computation has a buffer for each variable of its unit",
        )


def _pair(type_: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], np.dtype]:
    return type_.shape, type_.dtype


def _fail_type(
    state: State, buffer: ir.Buffer, shape: tuple[int, ...], type_: jax.ShapeDtypeStruct
) -> None:
    state.fail(
        f"{buffer.name} of {type_.dtype}{list(type_.shape)}",
        f"{buffer.dtype}{list(shape)}",
        "a buffer has the type of its variable in the unit",
    )
