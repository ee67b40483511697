"""Transfers of which one is made of what another brought."""

from __future__ import annotations

from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jhost.lowering.interpret.program import interpret
from jhost.lowering.ir.statements import Wait
from jhost.lowering.schedule.order import beside_work, in_order
from jhost.lowering.schedule.scheduled_transfer import TransferForm
from jhost.lowering.verify.program import verify
from tests.lowering.hand_built import buffer, communicate, compute, mesh_of, program


@pytest.mark.parametrize("way", get_args(TransferForm))
def test_a_gather_of_what_a_sum_brought_is_issued_behind_that(way: Any) -> None:
    """Though nothing but the same product stands before both of their readers."""
    mesh = mesh_of(d=2)
    rows, part = (buffer(f"{name}: i32[2@d, 4]") for name in ("x", "s"))
    terms = buffer("t: i32[4, 4]", {"d": "sum"})
    normed, other = (buffer(f"{name}: i32[2@d, 4]") for name in ("n", "o"))
    whole, out = buffer("w: i32[4, 4]"), buffer("r: i32[2@d, 4]")
    square = buffer("q: i32[4, 4]")
    made = program(
        mesh,
        [rows, square],
        [other, out],
        compute(lambda a, b: jnp.dot(a.T, b), [rows, rows], [terms], name="u0"),
        communicate(
            "ReduceScatter", part, terms, ("d",), dim=0, reducer="sum", name="c0"
        ),
        Wait(communication="c0"),
        # It sees a dim as a whole, so it is not issued with the gather.
        compute(lambda a: lax.cumsum(a, 1), [part], [normed], name="u1"),
        compute(jnp.dot, [rows, square], [other], name="u2"),
        communicate("AllGather", whole, normed, ("d",), dim=0, name="c1"),
        Wait(communication="c1"),
        compute(jnp.dot, [rows, whole], [out], name="u3"),
    )
    moved = beside_work(made, lambda stmt: True)
    assert moved
    ordered = in_order(made, {stmt.name: way for stmt in moved})
    verify(ordered)
    args = [np.arange(16, dtype=np.int32).reshape(4, 4) % 5 - n for n in (2, 1)]
    given, wanted = (interpret(each, mesh, args)[0] for each in (ordered, made))
    for one, two in zip(given, wanted, strict=True):
        np.testing.assert_array_equal(one, two)
