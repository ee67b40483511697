"""The interpreter by itself: what it records, and what it does with bad programs."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jhost.errors import VerifyError
from jhost.lowering.interpret.program import Record, interpret
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import (
    Allocate,
    Deallocate,
    GetCurrentStream,
    Reshard,
    Set,
    SetCurrentStream,
    Synchronize,
    Wait,
)
from tests.lowering.hand_built import (
    MAIN,
    I,
    buffer,
    communicate,
    compute,
    integers,
    loop,
    mesh_of,
    program,
    select,
    stream,
)


def gathered_rows() -> Program:
    x, y = buffer("x: f32[4@tp, 2]"), buffer("y: f32[16, 2]")
    x_i, g = buffer("x_i: f32[2@tp, 2]"), buffer("g: f32[8, 2]")
    y_i = buffer("y_i: f32[8, 2]")
    body = (
        SetCurrentStream(stream=stream(I % 2)),
        select(x_i, x, 0, I * 2, 2),
        communicate("AllGather", g, x_i, dim=0),
        Wait(communication="c"),
        select(y_i, y, 0, I * 2, 2, groups=4),
        compute(jnp.square, (g,), (y_i,)),
        Deallocate(buffer=g),
        SetCurrentStream(stream=MAIN),
        Synchronize(stream=stream(I % 2)),
    )
    make = (Allocate(buffer=y), GetCurrentStream(stream=MAIN))
    return program(mesh_of(tp=4), (x,), (y,), *make, loop(2, *body))


def shown(record: Record) -> str:
    at = " ".join(f"{name}={value}" for name, value in record.indices)
    return f"{record.stream:16} {at:4} {record.live_bytes:4}  {record.text}"


def test_the_trace_says_what_ran_where(golden: Callable[..., None]) -> None:
    _, trace = interpret(gathered_rows(), mesh_of(tp=4), (integers(16, 2),))
    golden("\n".join(map(shown, trace)))


def test_results_are_spread_as_they_say() -> None:
    x, y = buffer("x: f32[8, 2]"), buffer("y: f32[8, 2@tp]")
    host_ir = program(mesh_of(tp=4), (x,), (y,), compute(jnp.square, (x,), (y,)))
    (result,), _ = interpret(host_ir, mesh_of(tp=4), (integers(8, 2),))
    assert result.shape == (8, 8)
    assert {shard.data.shape for shard in result.addressable_shards} == {(8, 2)}


@pytest.mark.parametrize(("dtype", "poison"), [("f32", np.nan), ("i32", 2**31 - 1)])
def test_memory_without_contents_shows(dtype: str, poison: float) -> None:
    x, y = buffer(f"x: {dtype}[2]"), buffer(f"y: {dtype}[4]")
    part = buffer(f"part: {dtype}[2]")
    host_ir = program(
        mesh_of(),
        (x,),
        (y,),
        Allocate(buffer=y),
        select(part, y, 0, 2, 2),
        Set(out=part, source=x),
    )
    ones = np.ones(2, x.dtype)
    (result,), _ = interpret(host_ir, mesh_of(), (ones,))
    np.testing.assert_array_equal(result, [poison, poison, 1, 1])


def test_a_reshard_must_have_become_communication() -> None:
    x, y = buffer("x: f32[8, 4]"), buffer("y: f32[2@tp, 4]")
    host_ir = program(mesh_of(tp=4), (x,), (y,), Reshard(out=y, source=x))
    with pytest.raises(VerifyError, match="resharding is made communication be"):
        interpret(host_ir, mesh_of(tp=4), (integers(8, 4),))
