"""What is found out about one operation holds for each of its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.operation import Operation
from jhost.lowering.layouts import assigner, solver
from jhost.lowering.layouts.flat_bodies import flattened
from jhost.lowering.layouts.kinds import Kinds
from jhost.lowering.layouts.propagate_layouts import solve_program
from tests.lowering.traced import built

shard = jhost.shard
FREE = P.UNCONSTRAINED


class EachApart(Kinds):
    """Every operation is a kind of its own."""

    def of(self, op: Operation) -> int:
        return self.known.setdefault(op, len(self.known))


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w) @ w.T


def trained(x: jax.Array, *weights: jax.Array) -> Any:
    """Layers alike, and one that lies otherwise; gradients, and what an Adam does."""
    weights = tuple(
        shard(w, P("tp", None) if n == 2 else P("dp", "tp"))
        for n, w in enumerate(weights)
    )

    def loss(weights: Any) -> jax.Array:
        y = shard(x, P("dp", None))
        for w in weights:
            y = layer(y, w)
        return jnp.sum(y**2)

    def step(w: jax.Array, g: jax.Array) -> jax.Array:
        return w - 0.1 * g / (jnp.sqrt(g * g) + 1e-6)

    return jax.tree.map(step, weights, jax.grad(loss)(weights))


def scanned(x: jax.Array, weights: jax.Array) -> Any:
    """A body's values move as often as it runs, those outside of it once."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = layer(x, shard(w, P(FREE, "tp")))
        return y, jnp.sum(y, axis=1)

    def loss(weights: jax.Array) -> jax.Array:
        y = layer(shard(x, P("dp", None)), weights[0])
        y, sums = lax.scan(body, y, weights)
        return jnp.sum(y) + jnp.sum(sums)

    return jax.grad(loss)(shard(weights, P(None, "dp", "tp")))


def windowed(x: jax.Array, y: jax.Array) -> Any:
    """Halos, a value that an operation reads twice, and what is joined."""
    x, y = shard(x, P("dp", "tp")), shard(y, P("dp", None))
    rolled = [jnp.roll(each, 2, axis=0) * each for each in (x, y)]
    cut = [each[1:5] + each[2:6] for each in rolled]
    picked = [each[jnp.arange(4) * 2] for each in (x, y)]
    return jnp.concatenate([x, x, y]), *cut, *picked, lax.sort(x), lax.sort(y)


CASES: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = [
    (trained, [(8, 16), *[(16, 16)] * 4]),
    (scanned, [(8, 16), (3, 16, 16)]),
    (windowed, [(8, 16), (8, 16)]),
]


@pytest.mark.parametrize(("fun", "shapes"), CASES)
def test_layouts_are_those_of_operations_taken_apart(
    fun: Callable[..., Any],
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = built(fun, *shapes, dp=2, tp=4)
    by_kind = solve_program(program)
    monkeypatch.setattr(assigner, "Kinds", EachApart)
    apart = solve_program(program)
    assert by_kind.layouts == apart.layouts
    assert by_kind.assignments == apart.assignments
    assert by_kind.price == apart.price


def test_operations_of_alike_layers_are_of_one_kind() -> None:
    program = built(trained, (8, 16), *[(16, 16)] * 4, dp=2, tp=4)
    whole = flattened(program)
    made = solver.Solver(whole, {}, {})
    kinds = {made.assigner.kinds.of(op) for op in whole[0]}
    assert 2 * len(kinds) < len(whole[0])
