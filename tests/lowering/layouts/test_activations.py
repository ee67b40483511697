"""Activations or weights stay where that moves less than what each operation moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.marks import ShardMark
from jhost.lowering.ir.operation import Operation, has_contraction
from jhost.lowering.layouts.activations import ACTIVATIONS, WEIGHTS, operands_of, stays
from jhost.lowering.layouts.decisions import Decisions
from jhost.lowering.layouts.flat_bodies import flattened
from jhost.lowering.layouts.solver import Solver
from jhost.lowering.layouts.ways import axes_left_open, ways
from tests.lowering.traced import built

ROWS, WIDTH, DEVICES = 256, 32, 8


def layers(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """The gradient of two layers, where rows and both weights are sharded over `dp`."""
    x = jhost.shard(x, P("dp"))
    w, v = jhost.shard(w, P("dp")), jhost.shard(v, P("dp"))

    def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        h = x
        for weight in weights:
            h = h + jnp.tanh(h @ weight)
        return jnp.sum(h * h)

    of_w, of_v = jax.grad(loss)((w, v))
    return jhost.shard(of_w, P("dp")) + jhost.shard(of_v, P("dp"))


def solver() -> Solver:
    shapes = (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)
    program = built(layers, *shapes, dp=DEVICES)
    marks = {m.buffer: m for m in program.marks if isinstance(m, ShardMark)}
    return Solver(flattened(program), marks, {})


def moving(solving: Solver, made: Decisions) -> list[Operation]:
    """The contractions whose activation is wanted elsewhere over `dp`."""
    activations = solving.assigner.operands[ACTIVATIONS]
    return [
        op
        for number, op in enumerate(solving.operations)
        if op in activations and has_contraction(op.stmt)
        for operand, assignment in [(activations[op], made.assignments[number])]
        if not stays(op, operand, assignment, made.layouts, "dp")
    ]


def by_features(solving: Solver) -> Decisions:
    """Decisions that spread everything of the size of activations over features."""
    for name, buffer in solving.buffers.items():
        if buffer.shape == (ROWS, WIDTH) and name not in solving.preferences.fixed:
            solving.preferences.targets[name] = (), ("dp",)
    made = Decisions(
        solving.operations, solving.effects, solving.costs, solving.given()
    )
    for number, op in enumerate(solving.operations):
        dims = op.results[0] if op.results else ()
        last = dims[-1] if op.sizes[:1] == (ROWS,) and len(dims) > 1 else None
        feature = None if last is None else last.factor
        if feature is None or solving.assigner.is_bound(op) or op.forwards:
            made.decide(number, solving.assigner.cheapest(number, made))
        else:
            spread = [("dp",) if f == feature else () for f in range(len(op.sizes))]
            made.decide(number, tuple(spread))
    return made


def test_activations_that_move_are_kept_if_that_moves_less() -> None:
    solving = solver()
    bad = by_features(solving)
    assert moving(solving, bad)
    kept = ways(solving, bad)[0].taken(solving)
    assert not moving(solving, kept)
    assert 2 * kept.total.all < bad.total.all
    assert kept.flops <= bad.flops


def test_decisions_without_moving_activations_are_left() -> None:
    solving = solver()
    kept = ways(solving, by_features(solving))[0].taken(solving)
    before = solving.preferences.snapshot()
    (way,) = ways(solving, kept)
    assert way.taken(solving) is kept
    assert solving.preferences.snapshot() == before


def test_products_of_two_activations_have_no_weight() -> None:
    def through(x: jax.Array, w: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ w)  # the products of its gradient are of activations
        return h.T @ (h @ w)

    operations, _ = flattened(built(through, (ROWS, WIDTH), (WIDTH, WIDTH), dp=2))
    weights = operands_of(operations)[WEIGHTS]
    assert [op.ins[operand] for op, operand in weights.items()] == ["w"]


def test_an_axis_is_left_open_where_no_activation_has_a_constraint() -> None:
    solving = solver()
    bad = by_features(solving)
    assert not axes_left_open(solving, bad)  # it constrains the gradients
    solving.preferences.specs.clear()
    assert axes_left_open(solving, bad) == {"dp"}
    product = next(op for op in solving.operations if has_contraction(op.stmt))
    solving.preferences.specs[product.outs[0]] = ("dp",), ()
    assert not axes_left_open(solving, bad)


def test_the_activation_has_more_reductions_behind_it_than_the_weight() -> None:
    def through(x: jax.Array, weights: jax.Array) -> jax.Array:
        return lax.scan(lambda h, w: (jnp.tanh(w @ h), None), x, weights)[0]

    program = built(through, (WIDTH, ROWS), (3, WIDTH, WIDTH), dp=2)
    operations, _ = flattened(program)
    operands = operands_of(operations)
    (product,) = (op for op in operations if has_contraction(op.stmt))
    # The weight is the left operand, and what the scan carries is the right one.
    assert operands[ACTIVATIONS][product] == 1
    assert operands[WEIGHTS] == {product: 0}


def test_operands_without_reductions_are_no_activations() -> None:
    program = built(lambda x, w: jnp.tanh(x) @ w, (ROWS, WIDTH), (WIDTH, 8), dp=2)
    assert not any(operands_of(flattened(program)[0]).values())


def test_an_axis_stays_if_it_shards_the_same_dim() -> None:
    solving = solver()
    product = next(op for op in solving.operations if has_contraction(op.stmt))
    rows, features, nowhere = ((("dp",), ()), ((), ("dp",)), ((), ()))
    (left, _), (name, _) = product.operands, product.ins
    by_rows = tuple(
        ("dp",) if left[0] is not None and factor == left[0].factor else ()
        for factor in range(len(product.sizes))
    )
    assert stays(product, 0, by_rows, {name: rows}, "dp")
    assert not stays(product, 0, by_rows, {name: features}, "dp")
    # What no device has alone moves nowhere, and neither does another axis.
    assert stays(product, 0, by_rows, {name: nowhere}, "dp")
    assert stays(product, 0, by_rows, {name: features}, "tp")
