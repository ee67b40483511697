"""A scan of layers has as much beside its transfers as its layers written out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.lowering.layouts import carry_partial_sums
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from tests import sums
from tests.lowering.hand_built import integers
from tests.lowering.on_mesh import on, program_of
from tests.lowering.outside import exposed, layer

LAYERS = 4
STACKED = integers(LAYERS, 4, 8, seed=1), integers(LAYERS, 8, 4, seed=2)
LISTED = [tuple(stack[n] for stack in STACKED) for n in range(LAYERS)]
X = integers(128, 4)  # far larger than a weight


def scanned_and_written(
    run: Callable[[jax.Array, Any], jax.Array], specs: tuple[P, P]
) -> list[tuple[Callable[..., jax.Array], Any, Any]]:
    """A loss over layers in both forms, with the weights of each and their specs."""

    def scanned(x: jax.Array, weights: Any) -> jax.Array:
        y = lax.scan(lambda x, w: (run(x, w), None), x, weights)[0]
        return jnp.sum(y * y)

    def written(x: jax.Array, weights: Any) -> jax.Array:
        for w in weights:
            x = run(x, w)
        return jnp.sum(x * x)

    stacks = tuple(P(None, *spec) for spec in specs)
    return [(scanned, STACKED, stacks), (written, LISTED, [specs] * LAYERS)]


@pytest.mark.parametrize("again", [False, True], ids=["saved", "computed again"])
@pytest.mark.parametrize(
    ("specs", "first"),
    [
        ((P("d"), P(None, "d")), {("AllGather", (4, 8)): 1}),
        ((P(), P()), {}),
    ],
    ids=["fsdp", "dp"],
)
def test_layers_in_a_scan_and_written_out(specs: Any, first: Any, again: bool) -> None:
    """Nothing stands beside nothing, but for the first weight."""

    def both(x: jax.Array, w: Any) -> jax.Array:
        return layer(layer(x, w[0]), w[1])

    run = jax.checkpoint(both) if again else both

    found: list[Any] = []
    no_latency = mock.patch.object(carry_partial_sums, "_LATENCY_BYTES", 0)
    for f, weights, laid in scanned_and_written(run, specs):
        where = P("d"), laid
        with sums.moving("collective"), no_latency:
            how = on({"d": 2}, where, where)
            program = program_of(jax.grad(f, (0, 1)), X, weights, **how)
        found.append(exposed(program))
    assert found == [first, first]


def block(x: jax.Array, w: Any) -> jax.Array:
    """As over tp: rows are gathered for the first product, scattered by the second."""
    normed = jnp.clip(x - jnp.sum(x, 1, keepdims=True), -2, 2)
    return jnp.clip(x + jnp.clip(normed @ w[0], -1, 1) @ w[1], -1, 1)


def test_layers_over_tp_in_a_scan_and_written_out() -> None:
    """What moves depends on the layer before, or behind; gradients hide the latter."""
    no_latency = mock.patch.object(carry_partial_sums, "_LATENCY_BYTES", 0)
    # The clock would lay out the gradient of the written layers in another way.
    by_bytes = mock.patch.object(PropagateLayouts, "close", return_value=())
    found: dict[bool, list[Any]] = {False: [], True: []}
    for f, weights, laid in scanned_and_written(block, (P(None, "d"), P("d"))):
        where = P("d"), laid
        for backward, ofs in found.items():
            taken = jax.grad(f, (0, 1)) if backward else f
            how = on({"d": 2}, where, where if backward else P())
            with sums.moving("collective", work=True), no_latency, by_bytes:
                # Four rows are far smaller than a weight, so they move.
                ofs.append(exposed(program_of(taken, integers(4, 4), weights, **how)))
    forward, both = found[False], found[True]
    assert forward[0] == forward[1]
    # Behind the forward, only the gradient of the last layer's result has no work yet.
    more = Counter({("AllGather", (4, 4)): 1, ("AllReduce", ()): -1})
    more.update(forward[0])
    assert both == [+more, +more]
