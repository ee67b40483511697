"""In which order loops issue their iterations: staggered where that hides something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.index import Index
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.stages import stages_of
from jhost.lowering.ir.statements import (
    Allocate,
    Compute,
    For,
    GetCurrentStream,
    SetCurrentStream,
    Stmt,
    Synchronize,
    Wait,
)
from jhost.lowering.schedule.stages import in_stages
from tests.lowering.hand_built import (
    MAIN,
    I,
    buffer,
    check,
    communicate,
    compute,
    integers,
    loop,
    mesh_of,
    program,
    select,
    stream,
)
from tests.lowering.on_mesh import exact, on_streams, tp
from tests.lowering.traced import array, loops, work

X, Y = buffer("x: f32[8, 2]"), buffer("y: f32[8, 2]")
XI, YI = buffer("x_i: f32[2, 2]"), buffer("y_i: f32[2, 2]")
A, B, C, D = (buffer(f"{name}: f32[2, 2]") for name in "abcd")
TOTAL = buffer("total: f32[2, 2]")


def negated(out: Any = A) -> Compute:
    return compute(jnp.negative, (XI,), (out,))


def moved(source: Any = A) -> tuple[Stmt, ...]:
    return communicate("CollectivePermute", B, source, shift=1), Wait(communication="c")


def doubled(*ins: Any, out: Any = YI) -> Compute:
    return compute(lambda *xs: xs[0] * 2, ins or (B,), (out,))


def cut_rows(index: Index = I * 2) -> tuple[Stmt, ...]:
    return select(XI, X, 0, index, 2), select(YI, Y, 0, index, 2)


def turning(*body: Stmt, streams: int = 4) -> For:
    """Four iterations, of which each is on a stream."""
    on, off = (
        SetCurrentStream(stream=stream(I % streams)),
        SetCurrentStream(stream=MAIN),
    )
    return loop(4, on, *body, off, Synchronize(stream=stream(I % streams)))


def order(host_loop: For) -> list[str]:
    """Iterations and stages, in order: `0a 1a 0b`."""
    staged = in_stages(host_loop, {name: name for name in ("x", "y", "total")})
    stages = len(stages_of(staged))
    assert stages == 1 or staged.order
    found = staged.order or [
        (i, n) for i in range(staged.extent) for n in range(stages)
    ]
    return [f"{iteration}{'abc'[stage]}" for iteration, stage in found]


WHOLE = ["0a", "1a", "2a", "3a"]
STAGGERED = "0a 1a 0b 2a 1b 3a 2b 3b".split()


def test_an_iteration_is_a_stage_ahead_of_the_next() -> None:
    assert order(turning(*cut_rows(), negated(), *moved(), doubled())) == STAGGERED


@pytest.mark.parametrize(
    ("streams", "wanted"),
    [(1, " ".join(WHOLE)), (2, " ".join(STAGGERED))],
)
def test_what_is_on_one_stream_stays_in_order(streams: int, wanted: str) -> None:
    body = (*cut_rows(), negated(), *moved(), doubled())
    assert order(turning(*body, streams=streams)) == wanted.split()


def test_a_loop_is_not_cut_where_nothing_is_hidden() -> None:
    """Nothing computed before the communication, or after it, or something beside."""
    before, after = cut_rows(), doubled()
    assert order(turning(*before, *moved(XI), after)) == WHOLE
    assert order(turning(*before, negated(), *moved())) == WHOLE
    sent, wait = moved()
    beside = compute(lambda x: x.T @ x, (XI,), (TOTAL,))
    assert order(turning(*before, negated(), sent, beside, wait, after)) == WHOLE


def test_what_is_no_work_hides_nothing() -> None:
    sent, wait = moved()
    cheap = doubled(XI, out=C)
    assert order(turning(*cut_rows(), negated(), sent, cheap, wait, doubled())) == (
        STAGGERED
    )


def test_two_communications_make_three_stages() -> None:
    again = communicate("CollectivePermute", D, C, name="d", shift=1)
    body = negated(), *moved(), doubled(out=C), again, Wait(communication="d")
    found = order(turning(*cut_rows(), *body, doubled(D)))
    assert found == "0a 1a 0b 2a 1b 0c 3a 2b 1c 3b 2c 3c".split()


OTHER_STREAM = (Synchronize(stream=stream(0)),)


@pytest.mark.parametrize(
    "body",
    [
        # The whole of y, which all iterations write and read.
        (
            *cut_rows(),
            compute(jnp.negative, (XI,), (TOTAL,)),
            *moved(TOTAL),
            doubled(TOTAL),
        ),
        # A part of y that the next iteration changes.
        (*cut_rows(I // 2), negated(YI), *moved(YI), doubled(YI, out=TOTAL)),
        # Something that another stream has to have done.
        (*cut_rows(), negated(), *moved(), *OTHER_STREAM, doubled()),
    ],
    ids=["whole", "overlapping", "synchronized"],
)
def test_iterations_that_need_one_another_are_not_staggered(
    body: tuple[Stmt, ...],
) -> None:
    assert order(turning(*body)) == WHOLE


def test_parts_of_its_own_do_not_hold_an_iteration_back() -> None:
    body = *cut_rows(), negated(YI), *moved(YI), doubled(YI, out=TOTAL)
    assert order(turning(*body)) == STAGGERED


def hand_built() -> Program:
    """Each iteration has buffers and a communication of its own, of the same names."""
    work = turning(*cut_rows(), negated(), *moved(), doubled())
    first = SetCurrentStream(stream=stream(I)), SetCurrentStream(stream=MAIN)
    body = Allocate(buffer=Y), GetCurrentStream(stream=MAIN), loop(4, *first), work
    return program(mesh_of(tp=1), (X,), (Y,), *body)


def test_iterations_under_way_keep_their_names_apart() -> None:
    x = integers(8, 2)
    check(hand_built(), mesh_of(tp=1), (x,), x * -2)


def norm(x: Any) -> Any:
    return x * jnp.sum(x, axis=1, keepdims=True)


def residual(x: Any, up: Any, down: Any) -> Any:
    y = jhost.stream(jnp.maximum(norm(x) @ up, 0) @ down, 0, chunks=4)
    return x + y


def in_two_layers(x: Any, up: Any, down: Any) -> Any:
    return residual(residual(x, up, down), up, down)


@pytest.mark.parametrize("streams", [1, 2, 3, 8])
@pytest.mark.parametrize("f", [residual, in_two_layers])
def test_work_on_own_rows_around_collectives(
    f: Callable[..., Any], streams: int
) -> None:
    specs = (P("tp"), P(None, "tp"), P("tp")), P("tp")
    args = array(20, 8) % 2, array(8, 16, seed=1) % 2, array(16, 8, seed=2) % 2
    with on_streams(streams):
        host_ir = exact(f, *args, **tp(4, *specs))
    (found, *_) = loops(host_ir)
    assert work(found.body)[0] != "AllGather"
    assert work(found.body)[-1] == "add"
