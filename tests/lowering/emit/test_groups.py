"""Collectives over parts of an axis: the user's mesh has the whole axis alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.emit.program import emit
from jhost.lowering.interpret.program import interpret
from jhost.lowering.ir.axis_parts import given_axes, part_names
from tests import budget
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import communications
from tests.lowering.traced import lowered

MAJOR, MINOR = "t:(1)2", "t:(2)2"
BOTH = (MAJOR, MINOR)

Function = Callable[[Any], Any]


def moved(*specs: P) -> Function:
    """A value that lies by one spec after the other."""

    def fun(x: jax.Array) -> jax.Array:
        for spec in specs:
            x = jhost.shard(x, spec)
        return x

    return fun


def then(spec: P, after: Function) -> Function:
    return lambda x: after(jhost.shard(x, spec))


CASES: dict[str, tuple[Function, str]] = {
    "minor gathered": (moved(P(MAJOR)), "AllGather t:(2)2"),
    "major gathered": (moved(P(MAJOR, MINOR), P(None, MINOR)), "AllGather t:(1)2"),
    "other order": (moved(P((MINOR, MAJOR))), "SwapAxes t:(1)2,t:(2)2"),
    "exchanged": (moved(P(MAJOR, MINOR)), "AllToAll t:(2)2"),
    "swapped": (moved(P(MAJOR, MINOR), P(MINOR, MAJOR)), "SwapAxes t:(1)2,t:(2)2"),
    "summed": (
        then(P(MAJOR, MINOR), lambda x: jhost.shard(x.sum(1), P(MAJOR))),
        "AllReduce t:(2)2 sum",
    ),
    "scattered": (
        then(P(MAJOR, MINOR), lambda x: jhost.shard(x.sum(0), P(BOTH[::-1]))),
        "ReduceScatter t:(1)2 0 sum",
    ),
    "greatest": (
        then(P(MINOR, MAJOR), lambda x: jhost.shard(x.max(1), P(MINOR))),
        "AllReduce t:(1)2 max",
    ),
    "multiplied": (
        then(P(MINOR, MAJOR), lambda x: jhost.shard(x.prod(1), P(MINOR))),
        "AllReduce t:(1)2 prod",
    ),
    "rolled": (
        then(P(None, MINOR), lambda x: jhost.shard(jnp.roll(x, 1, 1), P(None, MINOR))),
        "CollectivePermute t:(2)2",
    ),
    "counted": (
        then(P(MINOR), lambda x: x + jnp.arange(8, dtype=x.dtype)[:, None]),
        "AllGather t:(2)2",
    ),
}
NUMBERS = {
    "f32": [-0.0, 0.0, 1.0, np.nan, -np.inf, 3.0],
    "i32": [-1, 0, 1, 2, -3, 5],
}


@budget.first_is_quick("dtype", NUMBERS)
@pytest.mark.parametrize("case", CASES)
def test_devices_of_a_group_communicate(case: str, dtype: str) -> None:
    fun, wanted = CASES[case]
    drawn = np.random.default_rng(3).choice(NUMBERS[dtype], (8, 8))
    x = drawn.astype({"f32": np.float32, "i32": np.int32}[dtype])

    def whole(x: jax.Array) -> jax.Array:
        return jhost.shard(fun(jhost.shard(x, P(BOTH))), P())

    program = lowered(whole, x, **dict.fromkeys(BOTH, 2))
    assert any(each.startswith(wanted) for each in communications(program))
    mesh = mesh_of(t=4)
    for (given,) in (jax.jit(emit(program, mesh))(x), interpret(program, mesh, [x])[0]):
        expected = np.asarray(fun(x))
        np.testing.assert_array_equal(np.asarray(given), expected)
        finite = ~np.isnan(expected)
        signs = np.signbit(np.asarray(given)), np.signbit(expected)
        np.testing.assert_array_equal(signs[0][finite], signs[1][finite])


def test_parts_have_the_names_of_shardy() -> None:
    assert part_names("tp", (2, 2, 3)) == ("tp:(1)2", "tp:(2)2", "tp:(4)3")


def test_all_parts_in_a_row_are_the_axis() -> None:
    mesh = ("dp", *part_names("tp", (2, 4)))
    assert given_axes(("tp:(1)2", "tp:(2)4", "dp"), mesh) == ("tp", "dp")
    assert given_axes(("tp:(2)4", "tp:(1)2"), mesh) is None
    assert given_axes(("tp:(1)2",), mesh) is None
