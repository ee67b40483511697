"""`jax.checkpoint` in a jhost function and around it: policies, and offloading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.explain import explain_program
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Allocate, Compute, walk
from tests.jhost.blocks import (
    ARGS,
    SPECS,
    Function,
    assert_same,
    gradients,
    hosted,
    rows,
)
from tests.lowering.on_mesh import exact, tp
from tests.lowering.traced import array

POLICIES = jax.checkpoint_policies
OFFLOAD = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["a"],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)


def named(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    h = checkpoint_name(x @ up, "h")
    return rows(checkpoint_name(jnp.maximum(h, 0), "a") @ down)


EACH_POLICY = pytest.mark.parametrize(
    "policy",
    [None, POLICIES.dots_saveable, POLICIES.save_only_these_names("h"), OFFLOAD],
    ids=["nothing", "dots", "names", "offload"],
)


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def counted(f: Function) -> Counter[str]:
    jaxpr = jax.make_jaxpr(f)(*ARGS).jaxpr
    return Counter(eqn.primitive.name for eqn in equations(jaxpr))


def gathers(f: Any) -> int:
    return f.lower(*ARGS).as_text().count("stablehlo.all_gather")


def around(policy: Any, pipeline: str, **more: Any) -> Callable[..., Any]:
    return jax.checkpoint(hosted(named, pipeline, **more), policy=policy)


def inside(policy: Any, pipeline: str, **more: Any) -> Callable[..., Any]:
    return hosted(jax.checkpoint(named, policy=policy), pipeline, **more)


@EACH_POLICY
@pytest.mark.parametrize(
    ("place", "pipeline"), [(around, "p2p"), (inside, "collective")]
)
def test_policies(place: Any, policy: Any, pipeline: str) -> None:
    """The same gradients, by as many matmuls as the plain function then has."""
    plain = gradients(jax.checkpoint(named, policy=policy))
    grad = gradients(place(policy, pipeline))
    assert_same(grad(*ARGS), plain(*ARGS))
    assert counted(grad)["dot_general"] == counted(plain)["dot_general"]


@pytest.mark.parametrize("place", [around, inside])
def test_what_is_computed_again(place: Any) -> None:
    saved, again = (
        counted(gradients(place(policy, "p2p")))["dot_general"]
        for policy in (POLICIES.dots_saveable, None)
    )
    assert again > saved


@pytest.mark.parametrize("place", [around, inside])
def test_each_device_offloads_its_own_part(place: Any) -> None:
    """What goes to the host's memory and back is neither gathered nor streamed."""
    saved = POLICIES.save_only_these_names("h", "a")
    grad, kept = (
        jax.jit(gradients(place(policy, "collective", compiler_options=None)))
        for policy in (OFFLOAD, saved)
    )
    assert counted(grad)["device_put"] == 2
    assert gathers(grad) == gathers(kept)


# --- Differentiated in one jhost function ------------------------------------------- #

Wrap: TypeAlias = Callable[[Function], Function]
"""What each layer is wrapped in."""


def two_layers(wrap: Wrap) -> Function:
    """The gradients of two layers, by a function that differentiates them itself."""

    def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return rows(x + jnp.maximum(x @ up, 0) @ down)

    def total(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        each = wrap(layer)
        return jnp.sum(each(each(x, up, down), up, down))

    return jax.grad(total, (0, 1, 2))


def in_one(wrap: Wrap, pipeline: str) -> Any:
    """The same as one jhost function."""
    return hosted(two_layers(wrap), pipeline, out_shardings=SPECS)


def not_wrapped(layer: Function) -> Function:
    return layer


def test_what_is_computed_again_is_not_kept() -> None:
    """Not between the loops: the backward's make it when the cotangent has come."""

    def kept(wrap: Wrap) -> int:
        args = array(16, 8), *ARGS[1:]  # no weight has as many rows
        body = in_one(wrap, "p2p").lower(*args).host_ir.body
        allocated = [s.buffer for s in walk(body) if isinstance(s, Allocate)]
        return [buffer.shape for buffer in allocated].count((16, 4))

    assert kept(jax.checkpoint) == 0 < kept(not_wrapped)


@pytest.mark.parametrize("pipeline", ["p2p", "collective", "off"])
def test_a_step_with_checkpoints_in_one_function(pipeline: str) -> None:
    plain = two_layers(jax.checkpoint)
    assert_same(in_one(jax.checkpoint, pipeline)(*ARGS), plain(*ARGS))


def test_such_a_step_with_sizes_that_do_not_divide() -> None:
    args = array(7, 5), array(5, 6, seed=1), array(6, 5, seed=2)

    def sharded(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        x, up, down = (
            jhost.shard(value, spec)
            for value, spec in zip((x, up, down), SPECS, strict=True)
        )
        return two_layers(jax.checkpoint)(x, up, down)

    f = jhost.jit(sharded, pipeline="p2p", **tp(4, None, None))
    assert_same(f(*args), two_layers(jax.checkpoint)(*args))


def test_outside_of_loops_a_barrier_is_one_for_all_its_operands() -> None:
    """What is computed again waits for the cotangent, as in the plain program."""
    program = in_one(jax.checkpoint, "off").lower(*ARGS).host_ir
    assert barriers_of(program) == [4, 4]


def test_a_barrier_binds_no_layouts() -> None:
    """Without any stream too: weights stay where they are, activations move."""

    def without_streams(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        layer = jax.checkpoint(lambda x: jnp.maximum(x @ up, 0) @ down)
        return jax.grad(lambda x: jnp.sum(layer(x) ** 2))(x)

    program = exact(without_streams, *ARGS, **tp(4, SPECS, SPECS[0]))
    assert barriers_of(program) == [4]
    # Of x twice and of the cotangent, of the result and of the gradient: never weights.
    moved = [row.bytes for row in explain_program(program).communications]
    assert sum(moved) == 5 * 3 * ARGS[0].nbytes // 4


@pytest.mark.parametrize("size", [8, 7])
def test_a_barrier_stays_one_where_its_results_are_sharded(size: int) -> None:
    """It hands each operand on as it comes; what is asked of a result comes after."""

    def apart(x: jax.Array, y: jax.Array) -> Any:
        v, w = lax.optimization_barrier((x, y))
        return jhost.shard(v, P("tp")) + w, jhost.shard(2 * w, P("tp"))

    program = exact(apart, array(size), array(size, seed=1), **tp(4, (P(), P()), P()))
    assert barriers_of(program) == [2]
    # The results are whole, as asked: 7 rows are cut from 8 that are padded.
    inside = [
        row.reason
        for row in explain_program(program).layouts
        if not row.value.startswith("result")
    ]
    assert not any("does not divide" in reason for reason in inside)


def test_what_a_barrier_hands_on_padded_may_be_a_result() -> None:
    def behind(x: jax.Array, y: jax.Array) -> Any:
        return lax.optimization_barrier((jhost.shard(x, P("tp")), y))

    program = exact(behind, array(7), array(7, seed=1), **tp(4, (P(), P()), P()))
    assert barriers_of(program) == [2]


@pytest.mark.parametrize("specs", [(P(), P()), (P("tp"), P("tp"))], ids=str)
def test_a_number_goes_through_a_barrier(specs: Any) -> None:
    def behind(x: jax.Array) -> jax.Array:
        y, two, three = lax.optimization_barrier((x, 2, 3))
        return y * two + three

    @jax.checkpoint
    def with_a_number(x: jax.Array) -> Any:
        return behind(x * x), 2

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(with_a_number(x)[0]))(x)

    x = array(8)
    assert barriers_of(exact(behind, x, **tp(4, specs[:1], specs[1]))) == [1]
    exact(gradient, x, **tp(4, specs[:1], specs[1]))


def barriers_of(program: Program) -> list[int]:
    """The operands of each barrier."""
    return [
        len(unit_eqn.eqn.invars)
        for stmt in walk(program.body)
        if isinstance(stmt, Compute)
        for unit_eqn in stmt.unit.eqns
        if unit_eqn.eqn.primitive.name == "optimization_barrier"
    ]
