"""Host IR as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jhost.lowering.ir.index import Rank, as_index, minimum
from jhost.lowering.ir.marks import BarrierMark, SerialMark, ShardMark, StreamRequest
from jhost.lowering.ir.printer import statement_text
from jhost.lowering.ir.statements import (
    Allocate,
    Chunk,
    Compute,
    Deallocate,
    GetCurrentStream,
    Set,
    SetCurrentStream,
    Synchronize,
    Wait,
)
from jhost.lowering.units.make import unit_of
from tests.lowering.hand_built import (
    MAIN,
    I,
    buffer,
    communicate,
    compute,
    loop,
    mesh_of,
    program,
    select,
    stream,
)

Golden = Callable[..., None]


def test_pipelined_mlp(golden: Golden) -> None:
    x = buffer("x: f32[8@tp, 16]")
    w_up, w_down = buffer("w_up: f32[16, 8@tp]"), buffer("w_down: f32[8@tp, 16]")
    y = buffer("y: f32[8@tp~s0, 16]")
    x_i, y_i = buffer("x_i: f32[2@tp~s0, 16]"), buffer("y_i: f32[2@tp~s0, 16]")
    g, h = buffer("g: f32[8~s0, 16]"), buffer("h: f32[8~s0, 8@tp]")
    z = buffer("z: f32[8~s0, 16]", partial={"tp": "sum"})
    body = (
        SetCurrentStream(stream=stream(I % 2)),
        select(x_i, x, 0, I * 2, 2),
        communicate("AllGather", g, x_i, dim=0, name="c0"),
        Wait(communication="c0"),
        compute(lambda g, w: jnp.tanh(g @ w), (g, w_up), (h,), name="u0"),
        Deallocate(buffer=g),
        compute(jnp.matmul, (h, w_down), (z,), name="u1"),
        Deallocate(buffer=h),
        select(y_i, y, 0, I * 2, 2),
        communicate("ReduceScatter", y_i, z, dim=0, reducer="sum", name="c1"),
        Wait(communication="c1"),
        Deallocate(buffer=z),
        SetCurrentStream(stream=MAIN),
        Synchronize(stream=stream(I % 2)),
    )
    wait = (
        SetCurrentStream(stream=stream(I)),
        Synchronize(stream=MAIN),
        SetCurrentStream(stream=MAIN),
    )
    golden(
        str(
            program(
                mesh_of(tp=4),
                (x, w_up, w_down),
                (y,),
                Allocate(buffer=y),
                GetCurrentStream(stream=MAIN),
                loop(2, *wait),
                loop(4, *body),
                name="mlp",
            )
        )
    )


def test_every_statement(golden: Golden) -> None:
    x, y = buffer("x: f32[4, 2@(dp, tp)]"), buffer("y: f32[4, 2]")
    a, b, r = buffer("a: f32[2]"), buffer("b: f32[3, 2]"), buffer("r: f32[2]")
    acc, c = buffer("acc: f32[2]"), buffer("c: f32[2]")
    tp = Rank("tp")
    golden(
        str(
            program(
                mesh_of(dp=2, tp=4),
                (x,),
                (y, acc),
                Allocate(buffer=y),
                Allocate(buffer=acc),
                select(a, y, 0, (tp + 1) % 4, drop=True),
                select(b, y, 0, I * 3, minimum(3, 4 - I * 3)),
                Set(out=a, source=c),
                compute(jnp.maximum, (a, c), (acc,), reducer="max"),
                compute(
                    lambda a: 2 * a,
                    (a,),
                    (a,),
                    chunk=Chunk(start=I, size=as_index(1), extent=4, groups=2),
                ),
                communicate("CollectivePermute", r, a, shift=1, name="ring"),
                Wait(communication="ring"),
                Set(out=c, source=r),
            )
        )
    )


def test_marks_stand_before_the_statements(golden: Golden) -> None:
    x = buffer("x: f32[4, 8]")
    marked = program(mesh_of(tp=4), (x,), (x,))
    marks = (
        StreamRequest(buffer="x", dim=0, chunks=4, pipeline=None, lines=("here",)),
        SerialMark(buffer="x"),
        ShardMark(buffer="x", spec=(("tp",), None), where="here"),
        BarrierMark(buffer="x", operands=("y", "z")),
    )
    golden(str(dataclasses.replace(marked, marks=marks)))


def test_equations_show_what_types_do_not(golden: Golden) -> None:
    x, y = buffer("x: f32[4, 8]"), buffer("y: f32[8]")

    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.transpose(x) ** 3 * 2.5, axis=1)

    golden(str(program(mesh_of(), (x,), (y,), compute(summed, (x,), (y,)))))


def test_names_do_not_depend_on_the_trace() -> None:
    def text() -> str:
        x, y = buffer("x: f32[4]"), buffer("y: f32[4]")
        stmt = compute(lambda x: jnp.sin(x) + jnp.cos(x), (x,), (y,))
        return str(program(mesh_of(), (x,), (y,), stmt))

    assert text() == text()


def test_a_program_without_statements() -> None:
    assert str(program(mesh_of(), (), ())) == "program f\n\n  return"


def test_units_of_many_variables_have_letters_for_all() -> None:
    unit = unit_of(
        "long",
        lambda x: [x + k for k in range(30)][-1] * 2,
        jax.ShapeDtypeStruct((), np.float32),
    )
    x, y = buffer("x: f32[]"), buffer("y: f32[]")
    text = str(program(mesh_of(), (x,), (y,), Compute(unit=unit, ins=(x,), outs=(y,))))
    assert "  return af" in text


def test_a_new_buffer_has_its_type_and_a_known_one_an_arrow() -> None:
    stmt = Set(out=buffer("y: bf16[4]"), source=buffer("x: bf16[4]"))
    assert statement_text(stmt, {"x"}) == "y: bf16[4] = Set(x)"
    assert statement_text(stmt, {"x", "y"}) == "y <- Set(x)"
