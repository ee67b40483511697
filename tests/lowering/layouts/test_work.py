"""That work counts where layouts are decided: none is repeated to move less."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.layout import axes_size
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute
from jhost.lowering.layouts.transfer_bytes import LayoutCost, TransferBytes
from tests import budget
from tests.lowering.on_mesh import on, program_of

_SIZES = st.sampled_from([2048, 4096, 8192, 14336])


def loss(x: jax.Array, weights: Any) -> jax.Array:
    """Blocks in a scan, of which no activation has a constraint."""

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        up, down = weights
        return x + jax.nn.gelu(x @ up) @ down, None

    y, _ = lax.scan(block, x, weights)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def step(devices: int, rows: int, width: int, hidden: int, backward: bool) -> Program:
    """Rows over one axis, and weights over the same."""
    shapes = (rows, width), (3, width, hidden), (3, hidden, width)
    x, up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    weights = P(None, "fsdp"), P(None, None, "fsdp")
    outs = (P(), (P("fsdp"), weights)) if backward else P()
    function = jax.value_and_grad(loss, (0, 1)) if backward else loss
    how = on({"fsdp": devices}, (P("fsdp"), weights), outs)
    return program_of(function, x, (up, down), **how)


def repeated(program: Program) -> list[Compute]:
    """The contractions of which devices do the same."""
    mesh = dict(program.mesh.shape)
    return [
        stmt
        for stmt in statements(program)
        if isinstance(stmt, Compute)
        for eqn in stmt.unit.eqns
        if eqn.rule.contracts
        and axes_size([a for axes in eqn.axes for a in axes], mesh) < program.mesh.size
    ]


@given(st.sampled_from([2, 4]), _SIZES, _SIZES, _SIZES, st.booleans())
@settings(max_examples=budget.examples(12), deadline=None)
def test_no_matmul_of_a_scan_is_repeated(
    devices: int, rows: int, width: int, hidden: int, backward: bool
) -> None:
    program = step(devices, rows, width, hidden, backward)
    assert repeated(program) == []


@pytest.mark.parametrize("devices", [2, 4])
def test_shards_of_weights_are_gathered_and_gradients_scattered(devices: int) -> None:
    """Each in its own iteration; of the rows nothing moves."""
    program = step(devices, 8192, 4096, 14336, backward=True)
    kinds = [
        stmt.kind
        for stmt in statements(program)
        if isinstance(stmt, Communicate) and stmt.out.shape
    ]
    assert sorted(kinds) == ["AllGather"] * 4 + ["ReduceScatter"] * 2


def test_work_pays_for_what_it_is_worth_and_what_loops_hide_for_none() -> None:
    a_byte = 2048
    one = LayoutCost(TransferBytes(exposed=0, hidden=500), flops=0)
    assert not one.beats(
        LayoutCost(TransferBytes(exposed=0, hidden=400), flops=99 * a_byte)
    )
    assert one.beats(
        LayoutCost(TransferBytes(exposed=0, hidden=400), flops=101 * a_byte)
    )
    assert not LayoutCost(TransferBytes(hidden=400), 2 * a_byte).beats(
        LayoutCost(TransferBytes(hidden=900), 0)
    )
    assert not one.beats(one)


def test_constraints_are_kept_whatever_that_repeats() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.shard(x, P()) @ jhost.shard(w, P())

    shapes = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2
    program = program_of(f, *shapes, **on({"tp": 2}, (P(), P()), P()))
    assert len(repeated(program)) == 1
