"""Which programs run as in `jax.jit`, because jhost's order is predicted to lose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_schedule import ChooseSchedule
from jhost.lowering.cost.choose_transfers import ChooseTransfers
from jhost.lowering.cost.leave_to_xla import left_to_xla
from jhost.lowering.cost.rates import Rates, rates_of
from jhost.lowering.ir.bodies import is_pipelined
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import LeftToXla
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.pipeline import passes, run_passes
from tests.lowering.traced import array, built


def gradients(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    def loss(w: jax.Array, v: jax.Array) -> jax.Array:
        h = jnp.sin(jhost.shard(x, P("dp")) @ w) @ v
        return jnp.sum(jnp.square(h).astype(jnp.float32))

    return jax.grad(loss, (0, 1))(w, v)


def lowered(rates: Rates | None, **how: Any) -> Program:
    shape = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    sequence = passes(settings=StreamDefaults(**how), streams=4, rates=rates).all
    return run_passes(built(gradients, shape, square, square, dp=2), sequence)


H200 = rates_of("NVIDIA H200")


def slow() -> Rates:
    """The rates of H200s whose permutes are slow."""
    assert H200 is not None
    return dataclasses.replace(H200, permute=H200.permute.times(0.01))


def test_what_gains_in_order_is_not_left() -> None:
    program = lowered(H200)
    assert is_pipelined(program)
    assert left_to_xla(program) is None


def test_an_order_that_loses_in_the_whole_program_is_left() -> None:
    """As where each of several decisions gains, and all together lose."""
    with mock.patch.object(ChooseTransfers, "gains", return_value=True):
        program = lowered(slow(), finds=False)
    report = left_to_xla(program)
    assert report is not None
    assert report.predicted is not None
    written, ordered = report.predicted
    assert written < ordered
    assert not is_pipelined(program)
    assert "as in jax.jit: predicted to take" in str(report)
    assert str(program) == str(lowered(slow(), pipeline="off"))


def test_an_order_that_was_asked_for_is_kept() -> None:
    program = lowered(slow(), pipeline="p2p")
    assert is_pipelined(program)
    assert left_to_xla(program) is None


@pytest.mark.parametrize("derive", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_a_program_that_is_left_computes_the_same(
    derive: Callable[..., Any], make_mesh: Callable[..., Any]
) -> None:
    def left(self: ChooseSchedule, program: Program) -> Program:
        report = LeftToXla(axes=(), early=False, predicted=(1.0, 2.0))
        return dataclasses.replace(program, remarks=(*program.remarks, report))

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jhost.shard(jnp.clip(x @ w, -2, 2), P("dp")) @ w)

    x, w = array(8, 8), array(8, 8, seed=1)
    with mock.patch.object(ChooseSchedule, "apply", left):
        g = jhost.jit(f, mesh=make_mesh((2,), ("dp",)), in_shardings=(P("dp"), P()))
        assert "manual_computation" not in g.lower(x, w).as_text()
        chex.assert_trees_all_equal(derive(g)(x, w), derive(f)(x, w))
    assert np.isfinite(f(x, w))
