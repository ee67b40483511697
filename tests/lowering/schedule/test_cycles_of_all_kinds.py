"""Whatever JAX derives of a scan, and whatever its body has, no transfer stands alone.

`tests/test_random_scans.py` compares the numbers of such scans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import all_remarks
from jhost.lowering.ir.effects import reads_writes
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute, Deallocate, Scan
from jhost.lowering.layouts import carry_partial_sums
from tests import random_scans, sums
from tests.jhost import derived
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import on, program_of
from tests.lowering.outside import exposed
from tests.lowering.traced import check


@pytest.fixture(autouse=True)
def cycles() -> Iterator[None]:
    """Transfers of any size are hidden wherever they can be."""
    no_latency = mock.patch.object(carry_partial_sums, "_LATENCY_BYTES", 0)
    with sums.by_permutes(), no_latency:
        yield


WEIGHTS = integers(4, 4, 8, seed=1), integers(4, 8, 4, seed=2)
X = integers(16, 4)
HOW = on({"d": 2}, ((P(None, "d"), P(None, None, "d")), P("d")), None)

FIRST = {("AllGather", (4, 8)): 1}
"""The gather of the first weight, which no work can stand beside."""


def layer(x: jax.Array, weights: Any) -> Any:
    up, down = weights
    hidden = checkpoint_name(jnp.clip(x @ up, -1, 1), "h")
    return x + jnp.clip(hidden @ down, -1, 1), None


def layers(weights: Any, x: jax.Array, body: Any = layer) -> jax.Array:
    return lax.scan(body, x, weights)[0]


def loss(weights: Any, x: jax.Array, body: Any = layer) -> jax.Array:
    return jnp.sum(layers(weights, x, body) ** 2)


def squares(weights: Any, x: jax.Array) -> jax.Array:
    return sum((jnp.sum(each**2) for each in jax.grad(loss)(weights, x)), jnp.zeros(()))


def batched(weights: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(layers, (None, 0))(weights, jnp.stack([x, -x]))


def tangent(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weights, x: jax.jvp(f, (weights, x), (weights, x))


def settled(f: Callable[..., Any]) -> Program:
    """Its program, in which some scan is a cycle."""
    program = program_of(f, WEIGHTS, X, **HOW)
    assert any("an iteration hands on" in str(r) for r in all_remarks(program))
    return program


@pytest.mark.parametrize(
    "taken",
    [
        layers,
        tangent(layers),
        batched,
        jax.grad(loss),
        tangent(jax.grad(loss)),
        jax.grad(squares),
    ],
    ids=["forward", "jvp", "vmap", "grad", "jvp of grad", "grad of grad"],
)
def test_what_jax_derives(taken: Callable[..., Any]) -> None:
    assert exposed(settled(taken)) == FIRST


@pytest.mark.parametrize("policy", random_scans.POLICIES)
def test_layers_by_every_policy_of_checkpoint(policy: str) -> None:
    body = jax.checkpoint(layer, policy=random_scans.POLICIES[policy])
    program = settled(jax.grad(lambda weights, x: loss(weights, x, body)))
    assert exposed(program) == FIRST


@pytest.mark.parametrize("policy", ["nothing", "everything", "offload"])
def test_two_programs(policy: str) -> None:
    """As of `jax.grad` around a jhost function: each of the two begins with a gather.

    What computes nothing again begins with products of what was saved.
    """
    body = jax.checkpoint(layer, policy=random_scans.POLICIES[policy])
    hosted = jhost.jit(lambda weights, x: layers(weights, x, body), **HOW)
    both = derived.backward(hosted, WEIGHTS, X)
    for each in both:
        assert any("an iteration hands on" in str(r) for r in all_remarks(each))
    of_backward = {} if policy == "everything" else FIRST
    assert [exposed(each) for each in both] == [FIRST, of_backward]


@pytest.mark.parametrize("step", ["cond", "switch", "fori", "while", "scan"])
def test_control_flow_in_the_body(step: str) -> None:
    def body(x: jax.Array, weights: Any) -> Any:
        x, _ = layer(x, weights)
        own = weights[0] @ weights[1]
        more = {"up": own, "down": own, "shared": own, "gain": own[0]}
        return random_scans.STEPS[step](x, more), None

    alone = exposed(settled(lambda weights, x: layers(weights, x, body)))
    # A branch's own gathers, and the bound of the `while`, wait for the layer before.
    assert alone["AllGather", (4, 8)] + alone["AllGather", (8, 4)] == 1


def test_carried_values_of_every_dtype() -> None:
    def carrying(weights: Any, x: jax.Array) -> Any:
        def body(carry: Any, weights: Any) -> Any:
            x, others = carry
            x, _ = layer(x, weights)
            return (x, [random_scans.moved_on(each, x) for each in others]), None

        others = [jnp.ones((), dtype) for dtype in random_scans.CARRIED]
        return lax.scan(body, (x, others), weights)[0]

    program = check(carrying, WEIGHTS, X, **HOW)
    assert "an iteration hands on" in "".join(map(str, program.remarks))
    assert exposed(program)["AllGather", (4, 8)] == 1


def test_random_keys_are_carried_and_stacked() -> None:
    """As of layers with dropout: a stack of keys begins as zeros, as others do."""

    def dropping(weights: Any, x: jax.Array) -> Any:
        def body(carry: Any, weights: Any) -> Any:
            x, key = carry
            key, own = jax.random.split(key)
            x, _ = layer(x, weights)
            return (jnp.where(jax.random.bits(own, x.shape) % 2, x, 0), key), own

        (x, key), keys = lax.scan(body, (x, jax.random.key(3)), weights, reverse=True)
        return x, jax.random.key_data(key), jax.random.key_data(keys)

    check(dropping, WEIGHTS, X, **HOW)
    assert exposed(settled(dropping)) == FIRST


def test_late_sums_are_written_into_their_stacks_in_place() -> None:
    """XLA can: each state of the stack is read once, by what writes the next one."""

    def f(weights: Any, x: jax.Array) -> Any:
        def body(x: jax.Array, w: jax.Array) -> Any:
            return jnp.clip(x @ w, -1, 1), x.T @ x

        return lax.scan(body, x, weights)

    program = program_of(f, integers(5, 4, 4), X, **on({"d": 2}, (P(), P("d")), None))
    assert "summed an iteration late" in "".join(map(str, program.remarks))
    (scan,) = (stmt for stmt in program.body if isinstance(stmt, Scan))
    assert not scan.ys
    for each in (program, scan.body):
        units = [stmt for stmt in each.body if isinstance(stmt, Compute)]
        names = {eqn.eqn.primitive.name for stmt in units for eqn in stmt.unit.eqns}
        assert "dynamic_update_slice" in names
        assert "concatenate" not in names
        reads = Counter(
            buffer.name
            for stmt in each.body
            if not isinstance(stmt, Deallocate)
            for buffer in reads_writes(stmt)[0]
            if buffer.shape == (5, 4, 4)
        )
        weights = {param.name for param in each.params[:1]}
        assert {n for name, n in reads.items() if name not in weights} == {1}
