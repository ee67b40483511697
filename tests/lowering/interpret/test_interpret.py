"""The interpreter by itself: what it records, and what it does with bad programs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.errors import VerifyError
from jhost.lowering.interpret.collectives import reduced
from jhost.lowering.interpret.program import Record, interpret
from jhost.lowering.ir.index import Rank
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
from jhost.lowering.rules.reducers import COMBINE
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
    with pytest.raises(VerifyError, match="it is made communication before"):
        interpret(host_ir, mesh_of(tp=4), (integers(8, 4),))


# --- As JAX has it ---------------------------------------------------------------- #


def texts(f: Callable[..., jax.Array], *args: jax.Array) -> list[str]:
    """What ran where `f` is interpreted, which gives what it gives."""
    lowered = jhost.jit(f, mesh=mesh_of(tp=4), in_shardings=P("tp")).lower(*args)
    result, trace = lowered.interpret(*args)
    np.testing.assert_array_equal(result, jax.jit(f)(*args))
    return [record.text for record in trace]


def test_a_body_is_recorded_once_however_often_it_runs() -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, row: (c + row, c * row), x[0], x, reverse=True)[1]

    x = jnp.array(integers(4, 4, 2))
    assert sum("(c, row)" in text for text in texts(f, x)) == 1


def test_only_the_branch_that_is_taken_runs() -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.cond(jnp.sum(x) > 9, jnp.sin, jnp.negative, x)

    for x, ran in (jnp.ones((4, 4)), "sin"), (jnp.zeros((4, 4)), "neg"):
        taken = " ".join(texts(f, x))
        assert [name for name in ("sin", "neg") if f"= {name}(" in taken] == [ran]


@pytest.mark.parametrize("length", [0, 3])
def test_scans_of_any_length(length: int) -> None:
    def f(x: jax.Array) -> jax.Array:
        steps = jnp.arange(length, dtype=x.dtype)
        carried, rows = lax.scan(lambda c, n: (c + n, c * n), x, steps)
        return jnp.concatenate([carried[None], rows])

    texts(f, jnp.array(integers(4, 2)))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "bool", "int8", "uint32"])
def test_reductions_stay_as_narrow_as_they_are(dtype: str) -> None:
    values = [np.asarray([0, 1, 0, 1]).astype(dtype), np.ones(4).astype(dtype)]
    for reducer in ("max", "min", "and", "or"):
        wanted = COMBINE[reducer](*map(jnp.asarray, values))
        found = reduced(reducer, values)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_what_is_permuted_comes_from_one_device_each() -> None:
    x, y = buffer("x: f32[2@tp]"), buffer("y: f32[2@tp]")
    permute = communicate("CollectivePermute", y, x, shift=Rank("tp"))
    host_ir = program(mesh_of(tp=4), (x,), (y,), permute, Wait(communication="c"))
    with pytest.raises(AssertionError):
        interpret(host_ir, mesh_of(tp=4), (integers(8),))


def test_a_device_starts_its_own_sum() -> None:
    """Of what others wrote, an accumulator that a device did not write holds none."""
    x, y = buffer("x: f32[2@tp]"), buffer("y: f32[8]")
    part = buffer("part: f32[2]")
    host_ir = program(
        mesh_of(tp=4),
        (x,),
        (y,),
        Allocate(buffer=y),
        select(part, y, 0, Rank("tp") * 2, 2),
        *[compute(jnp.square, (x,), (part,), reducer="sum")] * 2,
    )
    (result,), _ = interpret(host_ir, mesh_of(tp=4), (integers(8),))
    shards = [shard.data for shard in result.addressable_shards]
    for rank, (shard, mine) in enumerate(
        zip(shards, np.split(integers(8), 4), strict=True)
    ):
        wanted = np.full(8, np.nan)
        wanted[2 * rank : 2 * rank + 2] = 2 * mine**2
        np.testing.assert_array_equal(shard, wanted)
