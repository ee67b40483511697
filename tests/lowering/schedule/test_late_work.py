"""Products of a scan that are computed in the next iteration, beside a transfer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.cost.choose_cycles import ChooseCycles, moving_all
from jhost.lowering.cost.choose_forms import ChooseForms
from jhost.lowering.interpret.program import interpret
from jhost.lowering.ir.bodies import programs
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Scan, Wait
from jhost.lowering.layouts import carry_partial_sums
from tests import budget, sums
from tests.lowering.hand_built import buffer, communicate, compute, mesh_of, program
from tests.lowering.traced import array, check


@pytest.fixture(autouse=True)
def moving() -> Iterator[None]:
    """Work is late wherever that puts it beside a transfer, as small as these are.

    No work of the same iteration moves beside it instead.
    """
    no_latency = mock.patch.object(carry_partial_sums, "_LATENCY_BYTES", 0)
    with sums.moving("permutes", work=True, within=False), no_latency:
        yield


def layer(x: jax.Array, weights: Any) -> Any:
    """As over tp: rows are gathered for the first product, scattered by the second."""
    up, down = weights
    hidden = jnp.clip(x @ up, -1, 1)
    return jnp.clip(x + hidden @ down, -1, 1), None


def loss(weights: Any, x: jax.Array, **how: Any) -> jax.Array:
    y, _ = lax.scan(jax.checkpoint(layer), x, weights, **how)
    return jnp.sum(y * y)


def operands(length: int) -> Any:
    """Few rows, so that these move and not the weights."""
    return (array(length, 8, 16, seed=1), array(length, 16, 8, seed=2)), array(4, 8)


TP = (P(None, None, "d"), P(None, "d")), P("d")


def settings(**other: Any) -> dict[str, Any]:
    outs = (TP[0], TP[1])
    return {"mesh": mesh_of(d=4), "in_shardings": TP, "out_shardings": outs} | other


def notes(program: Program) -> list[str]:
    every = (str(remark) for each in programs(program) for remark in each.remarks)
    return [remark for remark in every if "computed an iteration late" in remark]


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_gradients_of_weights_are_late_and_exact(length: int) -> None:
    made = check(jax.grad(loss, (0, 1)), *operands(length), **settings())
    assert bool(notes(made)) == (length > 1)


@budget.first_is_quick("how", [{"reverse": True}, {"unroll": 2}], ids=str)
def test_in_any_order(how: Any) -> None:
    def gradients(weights: Any, x: jax.Array) -> Any:
        return jax.grad(loss, (0, 1))(weights, x, **how)

    assert notes(check(gradients, *operands(4), **settings()))


def test_explain_names_what_is_late_and_what_it_stands_beside() -> None:
    made = check(jax.grad(loss, (0, 1)), *operands(3), **settings())
    (note,) = notes(made)
    assert "in the scan of 3: " in note
    assert "the gradient of" in note
    assert "computed an iteration late, beside what moves" in note


def test_a_nan_of_one_layer_stays_in_its_gradients() -> None:
    """Nothing is multiplied by a placeholder: the first iteration stands before."""
    (up, down), x = operands(3)
    down = jnp.asarray(down).at[0].set(jnp.nan)
    made = jhost.jit(jax.grad(loss, (0, 1)), **settings())((up, down), x)
    plain = jax.grad(loss, (0, 1))((up, down), x)
    for one, other in zip(*map(jax.tree.leaves, (made, plain)), strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))


def test_the_second_derivative_of_late_work() -> None:
    def squares(weights: Any, x: jax.Array) -> jax.Array:
        up, down = jax.grad(loss)(weights, x)
        return jnp.sum(up) + jnp.sum(down)

    check(jax.grad(squares), *operands(3), **settings(out_shardings=TP[0]))


def test_two_programs() -> None:
    args = operands(3)
    how = settings(out_shardings=P())
    f = jhost.jit(loss, **how)
    made, plain = (jax.jit(jax.grad(each))(*args) for each in (f, loss))
    for one, other in zip(*map(jax.tree.leaves, (made, plain)), strict=True):
        np.testing.assert_array_equal(one, other)


SHARED = (P(None, "d"), P("d"))


def of_shared_weights(weights: Any, x: jax.Array) -> jax.Array:
    y, _ = lax.scan(lambda x, _: layer(x, weights), x, None, length=3)
    return jnp.sum(y * y)


def test_gradients_of_shared_weights_are_added_up_late() -> None:
    args = (array(8, 16, seed=1), array(16, 8, seed=2)), array(4, 8)
    how = settings(in_shardings=(SHARED, P("d")), out_shardings=(SHARED, P("d")))
    assert notes(check(jax.grad(of_shared_weights, (0, 1)), *args, **how))


def test_gradients_of_a_weight_that_is_read_twice_are_added_up_late_together() -> None:
    """In the order of the sum: numbers differ so much that another order would show."""

    def f(weights: Any, x: jax.Array) -> Any:
        def one(state: Any, scale: jax.Array) -> Any:
            x, total = state

            def twice(weights: Any) -> jax.Array:
                y = layer(x, weights)[0]
                return layer(y, jax.tree.map(lambda w: w * scale, weights))[0]

            y, back = jax.vjp(twice, weights)
            return (jnp.clip(y, -1, 1), jax.tree.map(jnp.add, total, back(y)[0])), None

        scales = jnp.array([1, 2**20, 1, -(2**20), 1], jnp.float32)
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return lax.scan(one, (x, zeros), scales)[0]

    weights = array(8, 16, seed=1), array(16, 8, seed=2)
    outs = P("d"), SHARED
    how = settings(in_shardings=(SHARED, P("d")), out_shardings=outs)
    assert notes(check(f, weights, array(4, 8), **how))


def test_gradients_of_microbatches_are_added_up_late_in_their_order() -> None:
    """Small numbers are lost beside large ones, so another order would show."""

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        first, second = weights
        y, _ = layer(layer(x, first)[0], second)
        return jnp.sum(y * y)

    def gradients(weights: Any, xs: jax.Array) -> Any:
        def more(total: Any, each: Any) -> Any:
            x, scale = each
            made = jax.grad(loss)(weights, x)
            return jax.tree.map(lambda t, g: t + g * scale, total, made), None

        scales = jnp.array([1, 2**26, 1, -(2**26), 1], jnp.float32)
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return lax.scan(more, zeros, (xs, scales))[0]

    first, second = ((array(8, 16, seed=n), array(16, 8, seed=n + 1)) for n in (1, 3))
    specs = (SHARED, SHARED)
    how = settings(in_shardings=(specs, P(None, "d")), out_shardings=specs)
    assert notes(check(gradients, (first, second), array(5, 4, 8), **how))


@budget.first_is_quick("read", ["by a stack", "by another sum", "by the next layer"])
def test_a_sum_that_something_else_reads_is_not_late(read: str) -> None:
    def f(weights: Any, x: jax.Array) -> Any:
        zeros = tuple(jnp.zeros(w.shape[1:], w.dtype) for w in weights)

        def one(state: Any, weights: Any) -> Any:
            x, total, other = state
            y, back = jax.vjp(lambda w: layer(x, w)[0], weights)
            (gradients,) = back(y)
            if read == "by the next layer":
                y = y + total[0][:4, :8] + total[1][:4]
            if read == "by another sum":
                other = jax.tree.map(jnp.add, other, total)
            stacked = total if read == "by a stack" else None
            return (y, jax.tree.map(jnp.add, total, gradients), other), stacked

        return lax.scan(one, (x, zeros, zeros), weights)

    assert not notes(check(f, *operands(3), **settings(out_shardings=None)))


def test_a_product_of_what_no_iteration_makes_is_late_without_operands() -> None:
    mesh = mesh_of(d=2)
    const, x, came = (buffer(f"{name}: i32[2@d, 4]") for name in ("c", "x", "y"))
    whole, terms = buffer("v: i32[4, 4]"), buffer("t: i32[4, 4]", {"d": "sum"})
    stacked = buffer("s: i32[2@d, 4]")
    scatter: dict[str, Any] = {"dim": 0, "reducer": "sum", "name": "c1"}
    body = program(
        mesh,
        [const, x],
        [came, stacked],
        communicate("AllGather", whole, x, ("d",), dim=0, name="c0"),
        Wait(communication="c0"),
        compute(jnp.dot, [x, whole], [came]),
        compute(lambda a, b: jnp.dot(a.T, b), [const, const], [terms]),
        communicate("ReduceScatter", stacked, terms, ("d",), **scatter),
        Wait(communication="c1"),
    )
    p, start, end = (buffer(f"{name}: i32[2@d, 4]") for name in ("p", "b", "e"))
    ys = buffer("ys: i32[3, 2@d, 4]")
    scan = Scan(
        body=body,
        consts=(p,),
        carry=(start,),
        xs=(),
        carried=(end,),
        ys=(ys,),
        length=3,
        reverse=False,
    )
    made = program(mesh, [p, start], [end, ys], scan)
    transfers = ChooseForms()
    late = ChooseCycles(transfers, moving_all(transfers)).apply(made)
    assert notes(late)
    args = [np.arange(16, dtype=np.int32).reshape(4, 4) - n for n in (5, 8)]
    for one, other in zip(
        *(interpret(p, mesh, args)[0] for p in (made, late)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
