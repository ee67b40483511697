"""Chains of slices, pads and concatenations that are one equation."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.statements import Compute
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import tp
from tests.lowering.traced import built, interpreted

Fun = Callable[[jax.Array], jax.Array]


def _pulled(fun: Fun, x: jax.Array) -> jax.Array:
    """The gradient by the operand, where that by the result is `x`."""
    return jax.vjp(fun, x)[1](x)[0]


def _rolled_by_slices(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x[-3:], x[:-3]])


def _moves(fun: Fun) -> list[str]:
    """The equations that move rows, and how."""
    found: list[str] = []
    for stmt in built(fun, integers(16, 3)).body:
        for each in stmt.unit.eqns if isinstance(stmt, Compute) else ():
            name, params = each.eqn.primitive.name, each.eqn.params
            match name:
                case "slice":
                    found.append(f"{params['start_indices'][0]}")
                    found[-1] += f":{params['limit_indices'][0]}"
                case "pad":
                    found.append(f"pad {tuple(map(int, params['padding_config'][0]))}")
                case "rotate":
                    found.append(f"rotate {params['start']}")
                case "tile":
                    found.append(f"tile {tuple(params['reps'])}")
                case "concatenate" | "dynamic_slice" | "split":
                    found.append(name)
                case _:
                    pass
    return found


@pytest.mark.parametrize(
    ("fun", "moves"),
    [
        (lambda x: jnp.roll(x, 1, 0), ["rotate 15"]),
        (lambda x: jnp.roll(x, -3, 0), ["rotate 3"]),
        (lambda x: jnp.pad(x, ((2, 0), (0, 0)))[:-2], ["pad (2, -2, 0)"]),
        (lambda x: jnp.pad(x[2:], ((0, 2), (0, 0))), ["pad (-2, 2, 0)"]),
        (lambda x: x[2:][:4], ["2:6"]),
        (lambda x: jnp.concatenate([jnp.zeros((1, 3)), x])[:-1], ["pad (1, -1, 0)"]),
        (lambda x: jnp.concatenate([x[1:], jnp.zeros((1, 3))]), ["pad (-1, 1, 0)"]),
        (lambda x: jnp.concatenate([jnp.zeros((2, 3)), x, jnp.zeros((1, 3))]),
         ["pad (2, 1, 0)"]),
        (lambda x: jnp.concatenate([jnp.zeros((2, 3)), x, jnp.ones((1, 3))]),
         ["concatenate"]),
        (
            lambda x: lax.dynamic_slice_in_dim(jnp.pad(x, ((3, 0), (0, 0))), 1, 16),
            ["pad (2, -2, 0)"],
        ),
        (lambda x: lax.dynamic_slice_in_dim(x, 14, 4), ["12:16"]),
        (lambda x: jnp.pad(x[3:-2], ((1, 1), (0, 0))), ["3:14", "pad (1, 1, 0)"]),
        (
            lambda x: jnp.pad(jnp.pad(x, ((1, 0), (0, 0))), ((1, 0), (0, 0)))[:-2],
            ["pad (2, -2, 0)"],
        ),
        (
            lambda x: lax.pad(lax.pad(x, 1.0, ((1, 0, 0), (0, 0, 0))), 2.0,
                              ((1, 0, 0), (0, 0, 0))),
            ["pad (1, 0, 0)", "pad (1, 0, 0)"],
        ),
        (lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]), ["rotate 8"]),
        (lambda x: _pulled(lambda x: jnp.roll(x, 1, 0), x), ["rotate 1"]),
        (lambda x: _pulled(_rolled_by_slices, x), ["rotate 3"]),
        (lambda x: lax.pad(x, 0.0, ((-2, -1, 0), (0, 0, 0))), ["2:15"]),
        (lambda x: x + jnp.pad(x[2:], ((0, 2), (0, 0))), ["pad (-2, 2, 0)"]),
        (lambda x: jnp.concatenate([x[3:], x[:2]]), ["3:16", "0:2", "concatenate"]),
        (lambda x: x[2:, 1:][:4], ["2:16", "0:4"]),
        (lambda x: jnp.tile(x, (2, 1)), ["tile (2, 1)"]),
        (lambda x: jnp.tile(x, (2, 1))[4:-12], ["tile (2, 1)", "4:20"]),
        (lambda x: jnp.tile(x, (3, 2)), ["tile (3, 1)", "tile (1, 2)"]),
    ],
)  # fmt: skip
def test_a_chain_along_one_dim_is_one_equation(fun: Fun, moves: list[str]) -> None:
    assert _moves(fun) == moves
    x = integers(16, 3)
    settings = tp(4, (P("tp"),), P())
    given = interpreted(fun, **settings)(x)
    chex.assert_trees_all_equal(np.asarray(given), np.asarray(fun(jnp.array(x))))


def test_what_else_reads_a_slice_keeps_it() -> None:
    def f(x: jax.Array) -> jax.Array:
        y = x[1:]
        return jnp.pad(y, ((0, 1), (0, 0))) + y.sum(0)

    assert _moves(f) == ["1:16", "pad (-1, 1, 0)"]


def test_an_empty_array_is_not_turned() -> None:
    """Twice all of it stands as well for a part of it behind the other."""
    x = np.zeros((0, 3), np.float32)
    given = jhost.jit(lambda x: jnp.concatenate([x, x]), **tp(4, (P("tp"),), P()))(x)
    assert given.shape == (0, 3)
