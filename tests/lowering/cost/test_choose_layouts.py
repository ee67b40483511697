"""Layouts that move about as many bytes are chosen by the time of the whole program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_layouts import ChooseLayouts, where_stay
from jhost.lowering.cost.find_streams import FindStreams
from jhost.lowering.cost.rates import Rates, rates_of
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.remarks import Note
from jhost.lowering.ir.requests import StreamDefaults
from jhost.lowering.layouts.activations import ACTIVATIONS, WEIGHTS
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from jhost.lowering.pipeline import Passes, passes, run_passes
from jhost.testing import mesh_of
from tests import budget
from tests.lowering.traced import built

LAYERS, WIDTH, HIDDEN = 4, 4096, 14336
BY_FEATURES = P(None, "fsdp")


def h200() -> Rates:
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    return rates


def every(rates: Rates | None, **settings: Any) -> Passes:
    return passes(settings=StreamDefaults(**settings), streams=4, rates=rates)


def same(x: jax.Array) -> jax.Array:
    return x


def constrained(x: jax.Array) -> jax.Array:
    return jhost.shard(x, P("fsdp"))


def loss_of(x: jax.Array, weights: Any, kept: Callable[..., jax.Array]) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        up, down = w
        return kept(x + jnp.maximum(kept(x) @ up, 0) @ down), None

    y, _ = lax.scan(jax.checkpoint(layer), x, weights)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def gradients(kept: Callable[..., jax.Array] = same) -> Callable[..., Any]:
    """Those of layers in a scan, where rows and weights are sharded over fsdp."""

    def step(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        x = jhost.shard(x, P("fsdp"))
        weights = jhost.shard(up, BY_FEATURES), jhost.shard(down, BY_FEATURES)
        found = jax.grad(loss_of, argnums=1)(x, weights, kept)
        return tuple(jhost.shard(each, BY_FEATURES) for each in found)

    return step


def types(rows: int, hidden: int) -> list[Any]:
    shapes = (rows, WIDTH), (LAYERS, WIDTH, hidden), (LAYERS, hidden, WIDTH)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def seconds(program: Program, **settings: Any) -> float:
    return predict(run_passes(program, every(h200(), **settings).all), h200()).total


def notes(program: Program) -> list[str]:
    chosen = every(h200()).by_time.apply(program)
    return [r.text for r in chosen.remarks if isinstance(r, Note)]


QUICKER = [(2, 8192, HIDDEN), (4, 8192, 8192)]
"""Devices, rows and features with which activations are quicker left where they are."""


@budget.first_is_quick(("devices", "rows", "hidden"), QUICKER)
def test_unconstrained_layers_are_no_slower_than_constrained_ones(
    devices: int, rows: int, hidden: int
) -> None:
    args = types(rows, hidden)
    free, held = (
        built(gradients(kept), *args, fsdp=devices) for kept in (same, constrained)
    )
    with mock.patch.object(ChooseLayouts, "apply", lambda _, program: program):
        by_bytes = seconds(free)
    chosen = seconds(free)
    assert chosen < 0.95 * by_bytes
    assert chosen <= 1.001 * seconds(held)


def test_the_choice_is_said() -> None:
    program = built(gradients(), *types(8192, HIDDEN), fsdp=2)
    (note,) = notes(program)
    assert note.startswith("layouts: activations stay over fsdp, predicted to take ")
    assert "; the layouts that move the fewest bytes take " in note


SIDES = 2 * [P(None, None, "tp"), P(None, "tp")]


def of_two_widths(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
    """Gradients of layers of a narrow pair of products and a wide one."""
    given = [jhost.shard(w, side) for w, side in zip(weights, SIDES, strict=True)]

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        for up, down in (w[:2], w[2:]):
            x = x + jnp.maximum(x @ up, 0) @ down
        return x, None

    def loss(weights: Any) -> jax.Array:
        y, _ = lax.scan(layer, jhost.shard(x, P("tp")), weights)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    found = jax.grad(loss)(given)
    return [jhost.shard(g, side) for g, side in zip(found, SIDES, strict=True)]


def test_weights_may_stay_where_both_move() -> None:
    """The fewest bytes move if each device gets the narrow weights whole."""
    x, *wide = types(8192, HIDDEN)
    narrow = [jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16)] * 2
    program = built(of_two_widths, x, *narrow, *wide, tp=4)
    assert (WEIGHTS, "tp") in every(h200()).by_time.layouts.close(program)


def test_activations_move_where_that_is_quicker() -> None:
    program = built(gradients(), *types(3584, HIDDEN), fsdp=2)
    by_time = every(h200()).by_time
    assert by_time.layouts.close(program) == ((ACTIVATIONS, "fsdp"),)
    assert not notes(program)
    stays = seconds(where_stay(program, (ACTIVATIONS, "fsdp")))
    assert seconds(program) < stays


@pytest.mark.parametrize(
    ("kept", "rows", "settings"),
    [(same, 16384, {}), (constrained, 8192, {}), (same, 8192, {"pipeline": "off"})],
    ids=["one solution", "constrained", "off"],
)
def test_one_solution_is_not_weighed(
    kept: Callable[..., jax.Array], rows: int, settings: Any
) -> None:
    program = built(gradients(kept), *types(rows, HIDDEN), fsdp=2)
    with mock.patch.object(FindStreams, "apply") as found:
        assert every(h200(), **settings).by_time.apply(program) is program
    assert not found.called


@pytest.mark.parametrize("kind", ["unknown", "cpu"])
def test_bytes_decide_on_unknown_devices_and_where_nothing_overlaps(kind: str) -> None:
    program = built(gradients(), *types(8192, HIDDEN), fsdp=2)
    with mock.patch.object(PropagateLayouts, "close") as close:
        assert every(rates_of(kind)).by_time.apply(program) is program
    assert not close.called


def test_streams_are_searched_once_for_the_layouts_that_are_taken() -> None:
    program = built(gradients(), *types(8192, HIDDEN), fsdp=2)
    made = every(h200())
    chosen = made.by_time.apply(program)
    with mock.patch.object(FindStreams, "laid_out") as laid_out:
        assert made.finding.apply(chosen) is chosen
    assert not laid_out.called


# --- The same numbers --------------------------------------------------------------- #


def integers(*shape: int) -> np.ndarray:
    generator = np.random.default_rng(sum(shape))
    return generator.integers(-2, 3, shape).astype(np.float32)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=budget.examples(5), deadline=None)
def test_activations_that_stay_give_the_same_numbers(data: Any) -> None:
    draw = data.draw
    devices = draw(st.sampled_from([2, 4]))
    rows, width, hidden = (devices * draw(st.integers(1, 6)) for _ in range(3))
    layers = draw(st.integers(1, 2))
    sides = st.sampled_from([P(None, "fsdp"), P(None, None, "fsdp"), P()])
    specs = draw(sides), draw(sides)
    ins = draw(st.sampled_from([P("fsdp"), P(None, "fsdp"), P()])), specs
    args = (
        integers(rows, width),
        (integers(layers, width, hidden), integers(layers, hidden, width)),
    )

    def step(x: Any, weights: Any) -> Any:
        return jax.value_and_grad(loss_of, argnums=1)(x, weights, same)

    plain = jax.jit(step)(*args)
    for staying in ((), (ACTIVATIONS, "fsdp"), (WEIGHTS, "fsdp")):
        mesh = mesh_of({"fsdp": devices})
        f = jhost.jit(step, mesh=mesh, in_shardings=ins, out_shardings=(P(), specs))
        with mock.patch.object(
            ChooseLayouts, "apply", lambda _, program, w=staying: where_stay(program, w)
        ):
            given = f(*args)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), given, plain
        )
