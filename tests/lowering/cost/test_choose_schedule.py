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
from jhost._call.execute import loops_of
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.cost.choose_schedule import ChooseSchedule
from jhost.lowering.cost.leave_to_xla import left_to_xla
from jhost.lowering.cost.rates import Rates, rates_of
from jhost.lowering.cost.simulate import predict
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


def lowered(rates: Rates | None, dp: int = 2, **how: Any) -> Program:
    shape = jax.ShapeDtypeStruct((4096 * dp, 4096), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    sequence = passes(settings=StreamDefaults(**how), streams=4, rates=rates).all
    return run_passes(built(gradients, shape, square, square, dp=dp), sequence)


H200 = rates_of("NVIDIA H200")


def slow(taken: float = 0.8) -> Rates:
    """The rates of H200s whose permutes are slow; collectives take so much."""
    assert H200 is not None
    return dataclasses.replace(
        H200,
        permute=H200.permute.times(0.01),
        collective=dataclasses.replace(H200.collective, taken=taken),
    )


def test_what_gains_in_order_is_not_left() -> None:
    program = lowered(H200)
    assert is_pipelined(program)
    assert left_to_xla(program) is None


@pytest.mark.parametrize(("taken", "early"), [(0.8, True), (2.0, False)])
def test_an_order_that_loses_in_the_whole_program_is_left(
    taken: float, early: bool
) -> None:
    """As where each of several decisions gains, and all together lose.

    XLA has options to begin collectives early, unless these would take too much.
    """
    with mock.patch.object(ChooseForms, "gains", return_value=True):
        program = lowered(slow(taken), finds=False)
    report = left_to_xla(program)
    assert report is not None
    assert report.predicted is not None
    written, ordered = report.predicted
    assert written < ordered
    assert not is_pipelined(program)
    assert report.early == early
    with_options = " with options that begin collectives early" * early
    assert f"as in jax.jit{with_options}: predicted to take" in str(report)
    assert str(program) == str(lowered(slow(), pipeline="off"))


def test_what_xla_hides_with_its_options_is_left_to_it_with_these() -> None:
    """Over three devices sums are no permutes, and jhost puts them beside nothing."""
    program = lowered(H200, dp=3)
    report = left_to_xla(program)
    assert report is not None
    assert report.early
    assert report.predicted is not None
    early, ordered = report.predicted
    assert H200 is not None
    assert early == predict(program, H200).total < ordered
    assert "with options that begin collectives early: predicted" in str(report)
    assert loops_of(program) == {"left_to_xla": True}


def delayed_stages(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    """What a stage gives goes on to the next while both work on something else."""

    def tick(carry: Any, _: Any) -> Any:
        x, given = carry
        return (jnp.roll(given, 1, axis=0), x + (jax.nn.silu(x @ w) * (x @ w)) @ v), ()

    return jax.lax.scan(tick, (jhost.shard(x, P("dp")), x), length=8)[0]


def both_passes(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    made, pull = jax.vjp(lambda *args: delayed_stages(*args)[1], x, w, v)
    return made, pull(made)


@pytest.mark.parametrize(
    ("function", "dp"), [(delayed_stages, 2), (both_passes, 2), (both_passes, 4)]
)
@pytest.mark.parametrize("rows", [512, 2048])
def test_a_permute_beside_all_works_never_loses_to_no_order(
    rows: int, function: Callable[..., Any], dp: int
) -> None:
    """XLA partitions no roll, so the program is jhost's, in order or as written."""
    x = jax.ShapeDtypeStruct((dp, rows, 4096), jnp.bfloat16)
    w, v = (jax.ShapeDtypeStruct((dp, 4096, 4096), jnp.bfloat16) for _ in range(2))

    def made(pipeline: Any) -> Program:
        settings = StreamDefaults(pipeline=pipeline)
        sequence = passes(settings=settings, streams=4, rates=H200).all
        return run_passes(built(function, x, w, v, dp=dp), sequence)

    assert H200 is not None
    found, off = (predict(made(how), H200).total for how in ("auto", "off"))
    assert found <= off


def between(
    rows: int, bandwidth: float | None = None, of: Callable[..., Any] = gradients
) -> Program:
    """A program along axes over several processes, of a measured bandwidth or none."""
    axes = {"dp": 2} if of is gradients else {"dp": 2, "tp": 2}
    rates = rates_of("NVIDIA H200", dict.fromkeys(axes, "host"))
    assert rates is not None
    if bandwidth is not None:
        link = dataclasses.replace(rates.network, bandwidth=bandwidth)
        rates = dataclasses.replace(rates, between=link)
    x = jax.ShapeDtypeStruct((2 * rows, 4096), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    sequence = passes(settings=StreamDefaults(), streams=4, rates=rates, between=axes)
    return run_passes(built(of, x, square, square, **axes), sequence.all)


@pytest.mark.parametrize("bandwidth", [None, 22e9, 200e9])
def test_an_order_that_loses_between_processes_is_left(bandwidth: float | None) -> None:
    """What is gathered for a gradient is sent before what the next product waits for.

    Few rows hide nothing, so this is all that an order does.
    """
    program = between(128, bandwidth)
    report = left_to_xla(program)
    assert report is not None
    assert report.predicted is not None
    written, ordered = report.predicted
    assert written < ordered
    assert report.early == (bandwidth is not None)
    assert not is_pipelined(program)


def test_an_order_that_gains_between_processes_is_kept() -> None:
    for bandwidth in (None, 22e9):
        assert left_to_xla(between(1024, bandwidth)) is None


def test_an_order_is_kept_if_no_way_without_gains_on_a_slow_link_too() -> None:
    """Of a link that nobody measured it is not known whether it is NVLink.

    At NVLink's speed XLA's own order gains here, and on a slow link the options do.
    """
    assert left_to_xla(between(256)) is None
    early = [left_to_xla(between(256, bandwidth)) for bandwidth in (22e9, 200e9)]
    assert None not in early


def over_two_axes(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    made = gradients(x, w, v)
    return made, jhost.shard(jhost.shard(w, P("tp")) * 2, P())


@pytest.mark.parametrize("rows", [128, 1024])
@pytest.mark.parametrize("bandwidth", [None, 22e9, 200e9])
def test_over_several_axes_between_processes_no_options_are_weighed(
    bandwidth: float | None, rows: int
) -> None:
    """With them, collectives over different devices may wait for each other forever."""
    report = left_to_xla(between(rows, bandwidth, over_two_axes))
    assert report is None or not report.early


def test_on_cpus_no_options_are_weighed() -> None:
    assert left_to_xla(lowered(rates_of("cpu"), dp=3)) is None


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
