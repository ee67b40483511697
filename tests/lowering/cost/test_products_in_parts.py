"""Products of which devices send parts are computed in these parts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost._jax import aval_of
from jhost.lowering.cost.products_in_parts import ProductsInParts
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.ir.statements import Communicate, Compute, every
from jhost.lowering.pipeline import passes, run_passes
from tests import sums
from tests.lowering.on_mesh import exact, on
from tests.lowering.outside import gradients_of, layer, operands
from tests.lowering.traced import built

DEVICES = 4


def gradient(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
    """A weight's gradient, and work beside its sum."""
    x, y = (jhost.shard(each, P("fsdp")) for each in (x, y))
    return x.T @ y, y @ w @ w


def on_h200(rows: int, width: int, out: P) -> Program:
    def f(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        total, z = gradient(x, y, w)
        return jhost.shard(total, out), z

    sequence = passes(
        settings=StreamDefaults(), streams=4, rates=rates_of("NVIDIA H200")
    ).all
    shapes = (rows, width), (rows, width), (width, width)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return run_passes(built(f, *args, fsdp=DEVICES), sequence)


def products(program: Program) -> list[tuple[int, ...]]:
    """The shapes of all products."""
    return [
        aval_of(each.eqn.outvars[0]).shape
        for stmt in every(Compute, program.body)
        for each in stmt.unit.eqns
        if each.rule.contracts
    ]


def test_a_large_product_is_made_in_the_parts_that_are_sent() -> None:
    program = on_h200(16384, 8192, P("fsdp"))
    sent = {stmt.source.name for stmt in every(Communicate, program.body)}
    assert products(program).count((8192 // DEVICES, 8192)) == DEVICES
    made = {out.name for stmt in every(Compute, program.body) for out in stmt.outs}
    assert len(sent) == DEVICES - 1
    assert sent <= made  # and copied from nothing


@pytest.mark.parametrize(
    ("width", "out"),
    [
        (1024, P("fsdp")),  # a part takes as long as the whole
        (8192, P()),  # an all-reduce sends the whole
    ],
)
def test_others_stay_whole(width: int, out: P) -> None:
    assert products(on_h200(65536, width, out)).count((width, width)) == 1


@pytest.mark.parametrize("gains", [True, False])
def test_parts_have_the_same_elements(gains: bool) -> None:
    def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for w in weights:
            x = jhost.shard(layer(x, w), P("fsdp"))
        return x

    x, *weights = operands(8, 3, 4)
    specs = P("fsdp"), *[P("fsdp")] * 3
    how = on({"fsdp": DEVICES}, specs, specs)
    with (
        sums.by_permutes(),
        mock.patch.object(ProductsInParts, "gains", return_value=gains),
    ):
        program = exact(gradients_of(layers), x, *weights, **how)
    assert ((4, 1) in products(program)) == gains


def test_a_zero_has_the_sign_of_a_sum_of_all_rows() -> None:
    """Each device has one row, and XLA takes one term, which is -0.0, for its sum."""
    rows = np.full((DEVICES, 4), -1, np.float32), np.zeros((DEVICES, 4), np.float32)
    how = on({"fsdp": DEVICES}, P("fsdp"), P("fsdp"))
    with sums.by_permutes(), mock.patch.object(ProductsInParts, "gains", _always):
        lowered = jhost.jit(gradient, **how).lower(*rows, np.eye(4, dtype=np.float32))
    assert (1, 4) in products(lowered.host_ir)
    total, _ = lowered.compile()(*rows, np.eye(4, dtype=np.float32))
    assert not np.signbit(total).any()


def _always(*_: Any) -> bool:
    return True
