"""Units that a Python function makes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jhost.lowering.units.make import barrier_of, unit_of

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)

_traces: list[float] = []


def _scaled(x: jax.Array, *, by: float) -> jax.Array:
    _traces.append(by)
    return lax.mul(x, lax.full_like(x, by))


def test_a_function_is_traced_once_and_no_two_units_share_variables() -> None:
    units = [unit_of(name, _scaled, X, by=2.0) for name in ("one", "other")]
    one, other = units
    assert _traces == [2.0]
    assert [unit.name for unit in units] == ["one", "other"]
    names = [[eqn.eqn.primitive.name for eqn in unit.eqns] for unit in units]
    assert names[0] == names[1]
    variables = [
        {*unit.invars, *(var for eqn in unit.eqns for var in eqn.eqn.outvars)}
        for unit in (one, other)
    ]
    assert variables[0].isdisjoint(variables[1])
    unit_of("third", _scaled, X, by=3.0)
    assert _traces == [2.0, 3.0]


def test_a_barrier_is_one_equation_around_all_its_operands() -> None:
    (eqn,) = barrier_of("barrier", X, X).eqns
    assert eqn.eqn.primitive is lax.optimization_barrier_p
    assert len(eqn.eqn.outvars) == 2
