"""Products that move beside an exposed transfer of their program or iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jhost.lowering.ir.bodies import all_remarks
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Buffer, Communicate, Compute, Stmt, Wait
from jhost.lowering.layouts import carry_partial_sums
from jhost.lowering.schedule.moved_work import with_work_moved
from tests import budget, sums
from tests.lowering.hand_built import buffer, communicate, compute, mesh_of, program
from tests.lowering.traced import array, check

MESH = mesh_of(d=2)


# --- Layers ------------------------------------------------------------------------- #


@pytest.fixture
def moving() -> Iterator[None]:
    """Work moves wherever that puts it beside a transfer, as small as these are."""
    no_latency = mock.patch.object(carry_partial_sums, "_LATENCY_BYTES", 0)
    with sums.moving("permutes"), no_latency:
        yield


def layer(x: jax.Array, weights: Any) -> jax.Array:
    """As over tp: rows are gathered for the first product, scattered by the second."""
    up, down = weights
    return jnp.clip(x + jnp.clip(x @ up, -1, 1) @ down, -1, 1)


def in_a_scan(weights: Any, x: jax.Array) -> jax.Array:
    y, _ = lax.scan(lambda x, w: (layer(x, w), None), x, weights)
    return jnp.sum(y * y)


def written_out(weights: Any, x: jax.Array) -> jax.Array:
    for n in range(len(weights[0])):
        x = layer(x, [w[n] for w in weights])
    return jnp.sum(x * x)


def said(program: Program) -> list[str]:
    every = map(str, all_remarks(program))
    return [each for each in every if "which nothing else hides" in each]


@pytest.mark.usefixtures("moving")
@budget.first_is_quick("loss", [in_a_scan, written_out])
def test_a_weights_gradient_is_beside_what_the_layer_sends_on(loss: Any) -> None:
    weights = array(3, 8, 16, seed=1), array(3, 16, 8, seed=2)
    specs = (P(None, None, "d"), P(None, "d")), P("d")
    how: dict[str, Any] = {"in_shardings": specs, "out_shardings": specs}
    gradients = jax.grad(loss, (0, 1))
    made = check(gradients, weights, array(4, 8), mesh=mesh_of(d=4), **how)
    assert any("the gradient of" in each for each in said(made))


@pytest.mark.usefixtures("moving")
def test_no_sum_is_beside_a_scan_alone_because_its_product_moved() -> None:
    """Its terms, and what comes, would be there in all iterations."""

    def loss(head: jax.Array, x: jax.Array, layers: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, w: (jnp.clip(x @ w, -1, 1), None), x, layers)
        return jnp.sum(jnp.clip(y @ head, -1, 1) ** 2)

    args = array(8, 16), array(64, 8, seed=1), array(3, 8, 8, seed=2)
    specs = P(None, "t"), P("d"), P()
    gradients = jax.grad(loss, (0, 1))
    made = check(
        gradients,
        *args,
        mesh=mesh_of(d=2, t=2),
        in_shardings=specs,
        out_shardings=specs[:2],
    )
    assert not said(made)


# --- Statements --------------------------------------------------------------------- #


def rows(name: str) -> Buffer:
    return buffer(f"{name}: i32[2@d, 4]")


def whole(name: str) -> Buffer:
    return buffer(f"{name}: i32[4, 4]")


def terms(name: str) -> Buffer:
    return buffer(f"{name}: i32[4, 4]", {"d": "sum"})


def product(left: Buffer, right: Buffer, out: Buffer) -> Stmt:
    return compute(jnp.dot, [left, right], [out])


def outer(left: Buffer, right: Buffer, out: Buffer) -> Stmt:
    return compute(lambda x, y: jnp.dot(x.T, y), [left, right], [out])


def double(source: Buffer, out: Buffer) -> Stmt:
    return compute(lambda x: x + x, [source], [out])


def gathered(source: Buffer, out: Buffer) -> list[Stmt]:
    name = f"to_{out.name}"
    return [
        communicate("AllGather", out, source, ("d",), dim=0, name=name),
        Wait(communication=name),
    ]


def scattered(source: Buffer, out: Buffer) -> list[Stmt]:
    name = f"to_{out.name}"
    how: dict[str, Any] = {"dim": 0, "reducer": "sum", "name": name}
    return [
        communicate("ReduceScatter", out, source, ("d",), **how),
        Wait(communication=name),
    ]


def order(params: Sequence[Buffer], results: Sequence[Buffer], *stmts: Stmt) -> str:
    """The values that are made, in order, once work has moved."""
    host_ir = program(MESH, params, results, *stmts)
    moved, _ = with_work_moved(host_ir, lambda _: True)
    names: list[str] = []
    for stmt in moved.body:
        if isinstance(stmt, Compute):
            names += [out.name for out in stmt.outs]
        if isinstance(stmt, Communicate):
            names.append(stmt.out.name)
    return " ".join(names)


X, W, U, V = rows("x"), whole("w"), whole("u"), whole("v")
A, B, C, E = rows("a"), rows("b"), rows("c"), rows("e")
T, S, G, H = terms("t"), rows("s"), whole("g"), whole("h")


def test_a_product_moves_down_with_its_own_sum() -> None:
    """Work for the sum follows: `e`."""
    stmts = (
        *(outer(X, X, T), *scattered(T, S)),
        *(product(X, W, A), *gathered(A, G)),
        *(product(X, G, B), product(B, W, E)),
    )
    assert order([X, W], [S, E], *stmts) == "a g t s b e"


def test_a_product_moves_up_with_what_it_needs() -> None:
    more = whole("more")
    stmts = (
        *(product(X, W, A), *gathered(A, G), product(X, G, B)),
        *(double(W, more), product(X, more, C)),
    )
    assert order([X, W], [B, C], *stmts) == "a g more c b"


def test_the_only_work_beside_a_transfer_stays_there() -> None:
    """`a` is beside `g`, so that `h` gets nothing."""
    stmts = (
        *(*gathered(X, G), product(X, W, A), product(X, G, B)),
        *(*gathered(B, H), product(X, H, C)),
    )
    assert order([X, W], [A, C], *stmts) == "g a b h c"


def test_a_product_that_the_source_is_made_of_stays() -> None:
    stmts = (product(X, W, A), *gathered(A, G), product(X, G, B))
    assert order([X, W], [B], *stmts) == "a g b"


def test_a_product_that_work_before_the_reader_reads_stays() -> None:
    stmts = (
        *(product(X, W, A), product(A, W, B), *gathered(B, G)),
        *(product(X, G, C),),
    )
    assert order([X, W], [A, C], *stmts) == "a b g c"


def test_a_product_does_not_move_past_many_works() -> None:
    between = [rows(f"r{n}") for n in range(10)]
    chain = zip([X, *between], between, strict=False)
    stmts = (
        *(outer(X, X, T), *(product(one, W, other) for one, other in chain)),
        *(*gathered(between[-1], G), product(X, G, B)),
    )
    assert order([X, W], [T, B], *stmts).startswith("t r0")


def test_each_of_two_transfers_in_a_row_gets_a_product() -> None:
    """As a norm has it: the second one is made of the first, by more than elements."""
    normed = rows("n")
    stmts = (
        *(product(X, W, A), product(X, U, C), outer(X, X, T), *scattered(T, S)),
        *(compute(lambda x: x - jnp.sum(x, 1, keepdims=True), [S], [normed]),),
        *(*gathered(normed, G), product(X, G, B)),
    )
    assert order([X, W, U], [A, C, B], *stmts) in ("t s n c g a b", "t s n a g c b")


def test_without_an_exposed_transfer_the_program_is_itself() -> None:
    stmts = (*gathered(W_ROWS := rows("wr"), G), product(X, W, A), product(A, G, B))
    host_ir = program(MESH, [X, W, W_ROWS], [B], *stmts)
    assert with_work_moved(host_ir, lambda _: True)[0] is host_ir
