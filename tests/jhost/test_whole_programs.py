"""Loops and branches inside a jhost function: laid out, pipelined, and never whole."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost import errors
from jhost._annotate import Pipeline
from jhost._call.once_a_line import warned_lines
from jhost.lowering.explain import count_loops, explain_program
from jhost.lowering.ir.bodies import programs, statements
from jhost.lowering.ir.fingerprint import fingerprint
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Cond, Scan, While
from jhost.testing import assert_close
from tests import budget
from tests.jhost.blocks import assert_same
from tests.lowering.hand_built import mesh_of
from tests.lowering.traced import array, check, loops

MESH = mesh_of(dp=2, tp=4)
X, UPS, DOWNS = array(16, 8), array(3, 8, 16, seed=1), array(3, 16, 8, seed=2)
SPECS = P(("dp", "tp")), P(None, None, "tp"), P(None, "tp", None)
"""Rows over all devices, and each layer's weights over tp."""


def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> Any:
    up, down = weights
    hidden = jnp.clip(x @ up, -2, 2)
    return jhost.stream(x + jnp.clip(hidden @ down, -2, 2), axis=0), jnp.sum(hidden)


def model(x: jax.Array, ups: jax.Array, downs: jax.Array) -> Any:
    return lax.scan(layer, x, (ups, downs))


def moved(program: Program) -> dict[str, int]:
    """How often each value is communicated, bodies included, by its name."""
    reports = explain_program(program).communications
    return {report.value: report.times for report in reports}


def communications(program: Program) -> list[str]:
    return [s.source.name for s in statements(program) if isinstance(s, Communicate)]


# --- Layers in a scan --------------------------------------------------------------- #


def test_weights_stay_where_they_are() -> None:
    program = check(model, X, UPS, DOWNS, mesh=MESH, in_shardings=SPECS)
    assert not [
        name for name in communications(program) if "ws" in name or "up" in name
    ]
    (scan,) = [stmt for stmt in program.body if isinstance(stmt, Scan)]
    assert [x.shape for x in scan.xs] == [(3, 8, 4), (3, 4, 8)]
    assert scan.carry[0].shape == (2, 8)


@pytest.mark.parametrize(
    "pipeline", [pytest.param("collective", marks=pytest.mark.slow), "p2p"]
)
def test_marks_make_loops_in_the_body(pipeline: Pipeline) -> None:
    settings: dict[str, Any] = {"mesh": MESH, "in_shardings": SPECS}
    settings["pipeline"] = pipeline
    program = check(model, X, UPS, DOWNS, **settings)
    assert not loops(program)
    assert count_loops(program) > 0
    assert 3 in moved(program).values()

    def gradients(f: Any) -> Any:
        return jax.grad(lambda *args: jnp.sum(f(*args)[0]), (0, 1, 2))

    wanted = jax.jit(gradients(model))(X, UPS, DOWNS)
    f: Any = jhost.jit
    inside = pipeline == "collective"
    own = f(gradients(model), **settings) if inside else gradients(f(model, **settings))
    assert_same(own(X, UPS, DOWNS), wanted)


def test_shards_of_a_weight_are_gathered_a_layer_at_a_time() -> None:
    """Where a device wants all of a layer, it never has all of all layers."""

    def sharded(x: jax.Array, ws: jax.Array) -> jax.Array:
        def one(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            w = lax.with_sharding_constraint(w, NamedSharding(MESH, P()))
            return x @ w, None

        return lax.scan(one, x, ws)[0]

    ws = array(3, 8, 8)
    specs = P("dp"), P(None, ("dp", "tp"))
    program = check(sharded, X, ws, mesh=MESH, in_shardings=specs)
    assert 3 in moved(program).values()
    (scan,) = [stmt for stmt in program.body if isinstance(stmt, Scan)]
    assert scan.xs[0].shape == (3, 1, 8)


def test_constraints_in_a_body() -> None:
    def constrained(x: jax.Array, ups: jax.Array, downs: jax.Array) -> Any:
        def one(x: jax.Array, ws: Any) -> Any:
            x = lax.with_sharding_constraint(x, NamedSharding(MESH, P("dp", "tp")))
            return jhost.shard(layer(x, ws)[0], P("tp", "dp")), None

        return lax.scan(one, x, (ups, downs))[0]

    check(constrained, X, UPS, DOWNS, mesh=MESH, in_shardings=SPECS)
    uneven = array(5, 8)  # padded in the body, and cut where the body ends
    check(constrained, uneven, UPS, DOWNS, mesh=MESH)


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_any_length(length: int, reverse: bool) -> None:
    def scanned(x: jax.Array, ws: jax.Array) -> Any:
        return lax.scan(lambda x, w: (x @ w, x[0]), x, ws, reverse=reverse, unroll=2)

    specs = P("dp", "tp"), P(None, None, "tp")
    check(scanned, X, array(length, 8, 8), mesh=MESH, in_shardings=specs)


# --- Other loops and branches ------------------------------------------------------- #


def _until(x: jax.Array, w: jax.Array) -> Any:
    return lax.while_loop(
        lambda state: (state[0] < 3) & (jnp.sum(w) > -1e6),
        lambda state: (state[0] + 1, jnp.clip(state[1] @ w, -3, 3)),
        (0, x),
    )


def _repeated(x: jax.Array, w: jax.Array) -> Any:
    return lax.fori_loop(0, 3, lambda i, x: jnp.clip(x @ w, -3, 3) + i, x)


def _chosen(x: jax.Array, w: jax.Array) -> Any:
    branches = [lambda x: x @ w, lambda x: x, lambda x: x + 1]
    return lax.switch(jnp.sum(w).astype(int) % 3, branches, x)


def _mapped(x: jax.Array, w: jax.Array) -> Any:
    return lax.map(lambda row: row @ w, x)


def _associative(x: jax.Array, w: jax.Array) -> Any:
    return lax.associative_scan(jnp.add, x @ w)


@pytest.mark.parametrize("f", [_until, _repeated, _chosen, _mapped, _associative])
@pytest.mark.parametrize("specs", [(P("dp"), P(None, "tp")), (P(None, "tp"), P("tp"))])
def test_other_control_flow(f: Callable[..., Any], specs: Any) -> None:
    w = array(8, 8, seed=3)
    program = check(f, X, w, mesh=MESH, in_shardings=specs)
    held = [s for s in statements(program) if isinstance(s, Scan | While | Cond)]
    assert bool(held) == (f is not _associative)


def test_weights_of_a_branch_stay_where_they_are() -> None:
    """A branch that reads the weights has them as they lie."""

    def chosen(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.cond(w[0, 0] > 0, lambda x: x @ w, lambda x: x * 2, x)

    specs = P("dp"), P(None, "tp")
    program = check(chosen, X, array(8, 8), mesh=MESH, in_shardings=specs)
    (cond,) = [stmt for stmt in program.body if isinstance(stmt, Cond)]
    assert (8, 2) in [operand.shape for operand in cond.operands]


# --- Sums that are carried ---------------------------------------------------------- #


def accumulated(begin: Any, weights: Any, batches: jax.Array) -> Any:
    """Gradients of microbatches, added up."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.clip(model(x, *weights)[0], -2, 2))

    def add(total: Any, x: jax.Array) -> tuple[Any, None]:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda t, g: t + g / 2, total, (value, grads)), None

    return lax.scan(add, begin, batches)[0]


@pytest.mark.usefixtures("combined_as_on_gpus")
@budget.first_is_quick("zero", [True, False])
def test_gradients_of_microbatches_are_reduced_once(zero: bool) -> None:
    def step(weights: Any, batches: jax.Array) -> Any:
        begin = jax.tree.map(jnp.zeros_like if zero else jnp.ones_like, weights)
        return accumulated((jnp.zeros(()), begin), weights, batches)

    weights, batches = (UPS, DOWNS), array(4, 16, 8, seed=5)
    specs = (SPECS[1:], P(None, "dp"))
    program = check(step, weights, batches, mesh=MESH, in_shardings=specs)
    over_dp = [
        (stmt, each is program)
        for each in programs(program)
        for stmt in each.body
        if isinstance(stmt, Communicate) and stmt.axes == ("dp",)
    ]
    ((_, outside),) = over_dp  # the loss and two gradients in one
    assert outside


@pytest.mark.parametrize("width", [8, 2**17])
def test_small_sums_that_a_scan_stacks_are_reduced_once(width: int) -> None:
    """As the gradients of gains; of larger ones each iteration reduces its own."""

    def sums(xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def add(count: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return count + 1, jnp.sum(x, axis=0)

        return lax.scan(add, jnp.zeros((), jnp.int32), xs)

    xs = array(3, 4, width)
    program = check(sums, xs, mesh=MESH, in_shardings=P(None, "dp"))
    assert list(moved(program).values()) == [1 if width == 8 else 3]


def test_what_else_reads_a_sum_has_it_reduced() -> None:
    def running(xs: jax.Array) -> Any:
        def add(total: jax.Array, x: jax.Array) -> Any:
            total = total + jnp.sum(x, axis=0)
            return total, total * total

        return lax.scan(add, jnp.zeros(8), xs)

    check(running, array(4, 16, 8), mesh=MESH, in_shardings=P(None, "dp"))


@pytest.mark.parametrize(("begin", "times"), [(0, [1]), (1, [3])])
def test_a_moving_average(begin: int, times: list[int]) -> None:
    """What it begins with is multiplied as well, and cannot be added behind."""

    def average(xs: jax.Array) -> jax.Array:
        def mix(held: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return held / 2 + jnp.sum(x, axis=0), None

        return lax.scan(mix, jnp.full(8, float(begin)), xs)[0]

    program = check(average, array(3, 16, 8), mesh=MESH, in_shardings=P(None, "dp"))
    assert list(moved(program).values()) == times


@pytest.mark.parametrize("begin", [0, 1])
def test_what_is_carried_for_one_iteration_alone(begin: int) -> None:
    def last(xs: jax.Array) -> jax.Array:
        def keep(_: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sum(x, axis=0), None

        return lax.scan(keep, jnp.full(8, float(begin)), xs)[0]

    check(last, array(3, 16, 8), mesh=MESH, in_shardings=P(None, "dp"))


# --- Functions in functions --------------------------------------------------------- #


def test_a_function_inside_keeps_its_own_settings() -> None:
    def outer(pipeline: Pipeline, given: Pipeline) -> Program:
        inner: Any = jhost.jit(layer, mesh=MESH, pipeline=given)

        def scanned(x: jax.Array, ups: jax.Array, downs: jax.Array) -> Any:
            return lax.scan(inner, x, (ups, downs))

        f = jhost.jit(scanned, mesh=MESH, in_shardings=SPECS, pipeline=pipeline)
        assert_same(f(X, UPS, DOWNS), model(X, UPS, DOWNS))
        return f.lower(X, UPS, DOWNS).host_ir

    assert count_loops(outer("auto", "p2p")) > 0
    assert count_loops(outer("p2p", "off")) == 0


def test_a_plain_function_takes_the_settings_around() -> None:
    inner = jhost.jit(lambda x, w: layer(x, w)[0], mesh=MESH)

    def f(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        return inner(layer(x, (ups[0], downs[0]))[0], (ups[1], downs[1]))

    program = check(
        f, X, UPS, DOWNS, mesh=MESH, in_shardings=SPECS, pipeline="collective", chunks=2
    )
    assert count_loops(program) == 1  # of the two layers only the outer one


# --- No silence --------------------------------------------------------------------- #


def test_what_all_devices_repeat_is_warned_of_once_a_line() -> None:
    def f(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2, lambda _, x: lax.sort(x) + x, x)

    settings: dict[str, Any] = {"mesh": MESH, "in_shardings": P("tp")}
    x = jnp.ones(128)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", errors.ReplicationWarning)
        jhost.jit(f, replication_limit=0, **settings)(x)
        jhost.jit(f, replication_limit=1, **settings)(x)
    (warning,) = found
    assert warning.category is errors.ReplicationWarning
    text = str(warning.message)
    assert "sort is repeated on every device, which receives 768 bytes" in text
    assert "test_whole_programs.py" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warned_lines().clear()
        jhost.jit(f, replication_limit=769, **settings)(x)


def test_a_mark_that_nobody_takes_up_is_refused() -> None:
    def f(x: jax.Array) -> jax.Array:
        def product(v: jax.Array) -> jax.Array:
            return jhost.stream(v * 2, axis=0, chunks=2)

        return lax.composite(product, "jhost.test")(x)

    with pytest.raises(errors.StreamDimError, match="body of a composite"):
        jhost.jit(f)(X)


# --- All of lowering goes into bodies ----------------------------------------------- #


def test_programs_that_differ_in_a_body_differ() -> None:
    def scanned(x: jax.Array, number: float) -> jax.Array:
        return lax.fori_loop(0, 2, lambda _, x: x * number, x)

    digests = [
        fingerprint(jhost.jit(functools.partial(scanned, number=n)).lower(X).host_ir)
        for n in (2.0, 2.0, 3.0)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_transforms_of_programs_with_bodies() -> None:
    def f(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
        return jnp.sum(lax.scan(body, x, (ups, downs))[0] ** 2)

    g = jhost.jit(f, mesh=MESH, in_shardings=SPECS)
    args = X, UPS, DOWNS

    def twice(f: Any) -> Any:
        return jax.jvp(jax.grad(f, (0, 1, 2)), args, args)

    def batched(f: Any) -> Any:
        pairs = [jnp.stack([arg, -arg]) for arg in args]
        return jax.vmap(jax.value_and_grad(f))(*pairs)

    for transform in (twice, batched):
        wanted = jax.jit(transform, static_argnums=0)(f)
        assert_close(transform(g), wanted, tolerance=1e-5)


@pytest.mark.slow
def test_a_tuning_goes_into_bodies() -> None:
    f = jhost.jit(model, mesh=MESH, in_shardings=SPECS)
    tuning = jhost.tune(f, X, UPS, DOWNS, rounds=1, progress=False)
    assert tuning.programs[0].streams
    tuned = jhost.jit(model, mesh=MESH, in_shardings=SPECS, tuning=tuning)
    assert_same(tuned(X, UPS, DOWNS), model(X, UPS, DOWNS))


def test_explain_says_how_often_a_body_communicates() -> None:
    f = jhost.jit(model, mesh=MESH, in_shardings=SPECS)
    assert ", 3 times" in jhost.explain(f, X, UPS, DOWNS).text


def test_meshes_of_one_axis_and_none() -> None:
    check(model, X, UPS, DOWNS)
    mesh: Mesh = mesh_of(tp=2)
    check(model, X, UPS, DOWNS, mesh=mesh, in_shardings=(P("tp"), P(), P()))
