"""Transfers of scans that stand in the iteration before, or in the one behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost._jax import aval_of
from jhost.lowering.ir.bodies import all_remarks
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute, Scan, walk
from jhost.lowering.layouts import carry_partial_sums
from tests import sums
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import array, check


@pytest.fixture(autouse=True)
def cycles() -> Iterator[None]:
    """Transfers of any size are hidden wherever they can be."""
    no_latency = mock.patch.object(carry_partial_sums, "_LATENCY_BYTES", 0)
    with sums.by_permutes(), no_latency:
        yield


def layer(x: jax.Array, weights: Any) -> Any:
    up, down = weights
    return x + jnp.clip(jnp.clip(x @ up, -1, 1) @ down, -1, 1), jnp.sum(x, 1)


def loss(weights: Any, x: jax.Array, **how: Any) -> jax.Array:
    y, sums = lax.scan(layer, x, weights, **how)
    return jnp.sum(y * y) + jnp.sum(sums[0]) - jnp.sum(sums[-1] * 2)


def operands(length: int) -> Any:
    return (array(length, 4, 8, seed=1), array(length, 8, 4, seed=2)), array(16, 4)


FSDP = (P(None, "d"), P(None, None, "d")), P("d")
DP = (P(), P()), P("d")


def settings(specs: Any, gradients: bool = True, **other: Any) -> dict[str, Any]:
    outs = (specs[0], specs[1]) if gradients else P()
    how = {"mesh": mesh_of(d=4), "in_shardings": specs, "out_shardings": outs}
    return how | other


def notes(program: Program) -> list[str]:
    return [str(r) for r in program.remarks if "an iteration" in str(r)]


def names(scan: Scan) -> list[str]:
    """The primitives of a body's computations."""
    units = (s.unit for s in walk(scan.body.body) if isinstance(s, Compute))
    return [each.eqn.primitive.name for unit in units for each in unit.eqns]


def scans(program: Program) -> list[Scan]:
    return [stmt for stmt in program.body if isinstance(stmt, Scan)]


@pytest.mark.parametrize(
    ("specs", "length"),
    [
        *(("fsdp", length) for length in (1, 2, 3, 5)),
        *(("dp", length) for length in (2, 3)),
    ],
)
def test_gradients_are_exact_for_any_length(specs: str, length: int) -> None:
    how = settings({"fsdp": FSDP, "dp": DP}[specs])
    program = check(jax.grad(loss, (0, 1)), *operands(length), **how)
    # Of two iterations, one outside on either side would leave no scan.
    assert bool(notes(program)) == (length > {"fsdp": 1, "dp": 2}[specs])


@pytest.mark.parametrize("length", [3, 4])
def test_barriers_are_the_border_of_a_scan_that_xla_writes_out(length: int) -> None:
    """That of one iteration.  Sums would else be added up when all layers have run."""
    how: dict[str, Any] = settings(FSDP)
    program = jhost.jit(jax.grad(loss, (0, 1)), **how).lower(*operands(length)).host_ir
    backward = scans(program)[-1]
    assert backward.length == length - 2
    units = (stmt.unit for stmt in program.body if isinstance(stmt, Compute))
    tied = [
        len(each.eqn.outvars)
        for unit in units
        for each in unit.eqns
        if each.eqn.primitive.name == "optimization_barrier"
    ]
    # Before the scan, the stacks of sums under way have barriers of their own.
    assert (len(backward.carry) in tied) == (backward.length == 1)


@pytest.mark.parametrize(
    "how",
    [{"reverse": True}, pytest.param({"unroll": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_in_any_order(how: Any) -> None:
    def gradients(weights: Any, x: jax.Array) -> Any:
        return jax.grad(loss, (0, 1))(weights, x, **how)

    assert notes(check(gradients, *operands(4), **settings(FSDP)))


def test_layers_that_are_computed_again() -> None:
    def again(weights: Any, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.sum(y * y)

    how: dict[str, Any] = settings(FSDP) | {"out_shardings": FSDP[0]}
    program = check(jax.grad(again), *operands(4), **how)
    assert len(notes(program)) == 2
    for scan in scans(program):
        # The weights that came early are read for the next iteration, and not again.
        stacks = [each for each in scan.consts if each.shape[:1] == (4,)]
        assert names(scan).count("dynamic_slice") == len(stacks)


def test_slices_stand_with_what_reads_them_so_that_xla_reads_them_in_place() -> None:
    """Weights are cast as they are read: no unit returns a slice of its own."""

    def cast(x: jax.Array, weights: Any) -> Any:
        up, down = (w.astype(jnp.bfloat16) for w in weights)
        hidden = jnp.clip(jnp.clip(x @ up, -1, 1) @ up.T, -1, 1)
        return x + jnp.clip((hidden @ down.T) @ down, -1, 1), None

    def f(weights: Any, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(jax.checkpoint(cast), x.astype(jnp.bfloat16), weights)
        return jnp.sum(y.astype(jnp.float32))

    weights = array(4, 4, 8, seed=1), array(4, 8, 4, seed=2)
    how: dict[str, Any] = settings(FSDP) | {"out_shardings": FSDP[0]}
    program = check(jax.grad(f), weights, array(16, 4), **how)
    assert notes(program)
    units = [
        stmt.unit
        for scan in scans(program)
        for stmt in walk(scan.body.body)
        if isinstance(stmt, Compute)
    ]
    for unit in units:
        sliced = {
            str(aval_of(each.eqn.outvars[0]).dtype)
            for each in unit.eqns
            if each.eqn.primitive.name == "squeeze"
            and each.eqn.outvars[0] in unit.outvars
        }
        assert "float32" not in sliced, str(program)


def test_stacks_in_the_hosts_memory() -> None:
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    )

    def again(weights: Any, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(jax.checkpoint(layer, policy=offload), x, weights)
        return jnp.sum(y * y)

    how: dict[str, Any] = settings(FSDP) | {"out_shardings": FSDP[0]}
    program = check(jax.grad(again), *operands(4), **how)
    assert len(notes(program)) == 2


def test_each_transfer_is_made_once() -> None:
    """Four gathers of the first weights in all: one outside, three in the scan."""
    program = check(loss, *operands(4), **settings(FSDP, gradients=False))
    (scan,) = scans(program)
    assert scan.length == 3
    moved = [stmt.out.shape for stmt in program.body if isinstance(stmt, Communicate)]
    inside = [
        stmt.out.shape for stmt in scan.body.body if isinstance(stmt, Communicate)
    ]
    # Three permutes of (1, 8) gather (4, 8) in an iteration for the next one.
    assert (moved.count((4, 8)), inside.count((1, 8))) == (1, 3)
    assert moved.count((8, 1)) == inside.count((8, 1)) == 3


def test_an_iteration_hands_on_one_weight_and_one_gradient_and_says_so() -> None:
    """Of all that a layer gathers or sums, the first and the last: 4 x 8 of 4 bytes."""

    def again(weights: Any, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.sum(y * y)

    how: dict[str, Any] = settings(FSDP) | {"out_shardings": FSDP[0]}
    hosted: Any = jhost.jit(jax.grad(again), **how)
    backward, forward = notes(hosted.lower(*operands(4)).host_ir)
    assert "an iteration hands on 128 bytes more a device" in forward
    assert "an iteration hands on 256 bytes more a device" in backward


# --- Several scans ------------------------------------------------------------------ #


def said(program: Program) -> int:
    """In how many scans, of bodies too, some gather is an iteration early."""
    return sum("gathered an iteration early" in str(r) for r in all_remarks(program))


def test_a_scan_of_scans_is_a_cycle_and_so_are_they() -> None:
    def groups(weights: Any, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, w: lax.scan(layer, x, w), x, weights)
        return y

    weights, x = operands(4)
    weights = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), weights)
    specs = (P(None, None, "d"), P(None, None, None, "d")), P("d")
    how = settings(FSDP, in_shardings=specs, out_shardings=P("d"))
    assert said(check(groups, weights, x, **how)) == 2


def test_what_microbatches_share_is_gathered_in_front_of_them() -> None:
    """Only for the first layer, and the others' comes beside the layer before."""

    def summed(weights: Any, batches: jax.Array) -> jax.Array:
        def one(total: jax.Array, x: jax.Array) -> Any:
            return total + lax.scan(layer, x, weights)[0], None

        return lax.scan(one, jnp.zeros_like(batches[0]), batches)[0]

    weights, x = operands(4)
    specs = (FSDP[0], P(None, "d"))
    how = settings(FSDP, in_shardings=specs, out_shardings=P("d"))
    program = check(summed, weights, jnp.stack([x, -x, x]), **how)
    assert said(program) == 1
    assert any("gathered once for all" in str(r) for r in all_remarks(program))
    (around,) = scans(program)
    assert "AllGather" not in {
        stmt.kind for stmt in around.body.body if isinstance(stmt, Communicate)
    }


def test_several_scans_read_one_stack() -> None:
    """What one has saved, and the weights: each reads them by its own count."""

    def f(weights: Any, x: jax.Array) -> jax.Array:
        y, saved = lax.scan(lambda x, w: (layer(x, w)[0], x), x, weights)

        def forth(y: jax.Array, each: Any) -> Any:
            x, w = each
            return jnp.clip(layer(y, w)[0] + x, -2, 2), None

        z, _ = lax.scan(forth, y, (saved, weights))
        return lax.scan(forth, z, (saved, weights), reverse=True)[0]

    how = settings(FSDP, out_shardings=P("d"))
    assert said(check(f, *operands(4), **how)) == 3


# --- Other loops -------------------------------------------------------------------- #


def test_a_fori_loop_reads_the_next_layer_by_its_count() -> None:
    def forward(weights: Any, x: jax.Array) -> jax.Array:
        up, down = weights
        return lax.fori_loop(0, 3, lambda i, x: layer(x, (up[i], down[i]))[0], x)

    program = check(forward, *operands(3), **settings(FSDP, out_shardings=P("d")))
    (note,) = notes(program)
    assert "gathered an iteration early" in note
    assert [scan.length for scan in scans(program)] == [2]


def test_a_count_that_comes_from_a_slice_is_none() -> None:
    """Which layer is read says the layer before."""

    def forward(weights: Any, x: jax.Array, following: jax.Array) -> jax.Array:
        up, down = weights

        def body(state: Any, following: jax.Array) -> Any:
            x, n = state
            return (layer(x, (up[n], down[n]))[0], following), None

        return lax.scan(body, (x, jnp.zeros((), jnp.int32)), following)[0][0]

    following = jnp.array([2, 1, 0, 1], jnp.int32)
    how = settings(FSDP, in_shardings=(*FSDP, P()), out_shardings=P("d"))
    program = check(forward, *operands(3), following, **how)
    assert not notes(program)
    assert "each iteration waits for the one before" in kept(program)


def test_effects_of_a_cycle_happen_once_and_in_order() -> None:
    """Whatever stands outside of the scan, in both passes."""
    weights, x = operands(4)
    seen: list[float] = []

    def told(weights: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weights: Any) -> Any:
            jax.debug.callback(lambda size: seen.append(float(size)), jnp.sum(x))
            return layer(x, weights)

        y, sums = lax.scan(body, x, weights)
        return jnp.sum(y * y) + jnp.sum(sums[-1])

    def run(f: Any) -> list[float]:
        seen.clear()
        jax.block_until_ready(f(weights, x))
        jax.effects_barrier()
        return [*seen]

    gradients = jax.grad(told, (0, 1))
    hosted: Any = jhost.jit(gradients, **settings(FSDP))
    assert run(hosted) == run(jax.jit(gradients))
    assert notes(hosted.lower(weights, x).host_ir)


def test_what_an_iteration_makes_stays_there() -> None:
    """A weight that each iteration changes."""

    def forward(weights: Any, x: jax.Array) -> Any:
        def body(state: Any, down: jax.Array) -> Any:
            x, up = state
            return (layer(x, (up, down))[0], jnp.clip(up @ down @ up, -2, 2)), None

        return lax.scan(body, (x, weights[0][0]), weights[1])[0]

    how = settings(FSDP, out_shardings=(P("d"), P("d")))
    program = check(forward, *operands(3), **how)
    assert not notes(program)
    assert "each iteration waits for the one before" in kept(program)


def test_a_while_loop_stays_as_it_is_and_says_so() -> None:
    def forward(weights: Any, x: jax.Array) -> jax.Array:
        def body(state: Any) -> Any:
            i, x = state
            return i + 1, layer(x, (weights[0][i], weights[1][i]))[0]

        return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    program = check(forward, *operands(3), **settings(FSDP, out_shardings=P("d")))
    assert "nothing says whether another iteration follows" in kept(program)


def kept(program: Program) -> str:
    """What is said of transfers that stay where they are."""
    (note,) = (str(r) for r in program.remarks if "stay in their iteration" in str(r))
    return note
