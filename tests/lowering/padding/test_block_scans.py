"""Cumulative sums along sharded dims, of which only totals move."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import exact, on, tp

ROWS = P("tp")


def _received(program: Program) -> list[tuple[int, ...]]:
    found = [s for s in statements(program) if isinstance(s, Communicate)]
    return [stmt.out.shape for stmt in found]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("scan", [lax.cumsum, lax.cummax, lax.cummin, lax.cumprod])
def test_totals_are_all_that_moves(
    scan: Callable[..., jax.Array], reverse: bool
) -> None:
    x = integers(16, 3) % 3
    program = exact(
        lambda x: scan(x, axis=0, reverse=reverse), x, **tp(4, (ROWS,), ROWS)
    )
    assert _received(program) == [(4, 3)]


def test_a_nan_is_in_all_that_follow_it() -> None:
    x = np.array(integers(16))
    x[6] = np.nan
    exact(lambda x: lax.cummax(x, axis=0), x, **tp(4, (ROWS,), ROWS))


def test_zeros_keep_their_signs() -> None:
    x = np.full(8, -0.0, np.float32)
    program = exact(lambda x: 1 / jnp.cumsum(x), x, **tp(4, (ROWS,), ROWS))
    assert _received(program) == [(4,)]


def test_a_gradient_sums_from_the_other_end() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return (jnp.cumsum(x, 0) * x).sum()

    x = jnp.array(integers(16, 3), jnp.float32)
    program = exact(jax.grad(loss), x, **tp(4, (ROWS,), ROWS))
    assert _received(program) == [(4, 3), (4, 3)]


def test_a_scan_sums_in_each_iteration() -> None:
    def steps(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (jnp.cumsum(x, 1) % 5, None), x, None, length=2)[0]

    settings = on({"a": 2, "b": 2}, (P("b", "a"),), P("b", "a"))
    program = exact(steps, integers(4, 16), **settings)
    assert _received(program) == [(2, 2)]


def test_a_dim_that_does_not_divide_is_summed_as_it_is() -> None:
    program = exact(lambda x: jnp.cumsum(x[1:], 0), integers(16), **tp(4, (ROWS,), P()))
    assert (4,) not in _received(program)
