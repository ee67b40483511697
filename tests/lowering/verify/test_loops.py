"""Loops in stages: each stage once and in order, and none ahead of what it needs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from jhost.errors import VerifyError
from jhost.lowering.ir.statements import Allocate, Buffer, For, NextStage, Stmt, Wait
from jhost.lowering.verify.program import verify
from tests.lowering.hand_built import (
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
)

X, Y = buffer("x: f32[4, 2]"), buffer("y: f32[4, 2]")
XI, YI, A, B = (buffer(f"{name}: f32[2, 2]") for name in ("x_i", "y_i", "a", "b"))
C = buffer("c: f32[4, 2]")
ROWS = select(XI, X, 0, I * 2, 2), select(YI, Y, 0, I * 2, 2)
SENT = communicate("CollectivePermute", B, A, shift=1)
STAGGERED = (0, 0), (1, 0), (0, 1), (1, 1)


def negated(source: Buffer = XI, out: Buffer = A) -> Stmt:
    return compute(jnp.negative, (source,), (out,))


def staged(order: tuple[tuple[int, int], ...], *body: Stmt) -> For:
    return dataclasses.replace(loop(2, *body), order=order)


def refused(rule: str, order: tuple[tuple[int, int], ...], *body: Stmt) -> None:
    host_ir = program(
        mesh_of(tp=1), (X,), (Y,), Allocate(buffer=Y), staged(order, *body)
    )
    with pytest.raises(VerifyError, match=rule):
        verify(host_ir)


WORK = (*ROWS, negated(), SENT, NextStage(), Wait(communication="c"), negated(B, YI))


def test_stages_of_other_iterations_may_come_between() -> None:
    body = Allocate(buffer=Y), staged(STAGGERED, *WORK)
    x = integers(4, 2)
    check(program(mesh_of(tp=1), (X,), (Y,), *body), mesh_of(tp=1), (x,), x)


@pytest.mark.parametrize(
    "order",
    [((0, 0), (1, 0), (0, 1)), (*STAGGERED, (1, 1)), ((0, 1), (0, 0), (1, 0), (1, 1))],
    ids=["one-less", "twice", "the-second-first"],
)
def test_an_iteration_has_each_stage_once_and_in_order(
    order: tuple[tuple[int, int], ...],
) -> None:
    refused("goes through all stages", order, *WORK)


def test_no_other_iteration_has_an_order() -> None:
    refused("goes through all stages", (*STAGGERED, (2, 0)), *WORK)


def test_what_later_iterations_change_is_not_read_behind_them() -> None:
    body = negated(X, Y), NextStage(), negated(Y, C)
    refused("share no memory", STAGGERED, *body)


def test_what_is_in_flight_in_another_iteration_is_not_read() -> None:
    into = communicate("CollectivePermute", Y, X, shift=1)
    body = into, NextStage(), Wait(communication="c"), negated(Y, C)
    refused("while c of i = 0 is in flight", STAGGERED, *body)


def test_a_stage_leaves_nothing_in_flight_behind_its_loop() -> None:
    refused("waited for exactly once", STAGGERED, *WORK[:-2], negated(A, YI))
