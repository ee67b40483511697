"""Sums over all chunks beside transfers, in the place of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.explain import count_loops
from jhost.lowering.ir.bodies import is_pipelined
from jhost.lowering.ir.operation import has_contraction
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute, For, Wait, walk
from jhost.lowering.loops import combine_small
from tests import budget, sums
from tests.jhost.derived import backward
from tests.lowering.on_mesh import communications, every_size, exact, on, program_of, tp
from tests.lowering.traced import array

MODEL, HIDDEN = 4, 8
BLOCK = P(None, "tp"), P("tp")


@pytest.fixture(autouse=True)
def beside() -> Iterator[None]:
    with sums.standing("beside transfers"):
        yield


def blocks(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Residual blocks, with small integers throughout."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        hidden = x @ up
        y = jhost.stream(hidden * lax.stop_gradient(jnp.sign(hidden)) @ down, axis=0)
        x = x + jhost.shard(jnp.where(jnp.abs(y) < 4, y, 1), P("tp"))
        x = jhost.shard(jnp.where(jnp.abs(x) < 4, x, 1), P("tp"))
    return x


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """One whose cotangent does not depend on what it gives."""
    hidden = x @ up
    y = jhost.stream(hidden * lax.stop_gradient(jnp.sign(hidden)) @ down, axis=0)
    return jhost.shard(y, P("tp"))


def gradients(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    return jax.grad(lambda *args: jnp.sum(f(*args)), tuple(range(count)))


def operands(devices: int, count: int = 2) -> list[jax.Array]:
    weights = [
        array(*shape, seed=n)
        for n in range(count)
        for shape in ((MODEL, HIDDEN), (HIDDEN, MODEL))
    ]
    return [array(2 * devices, MODEL), *weights]


def settled(devices: int, count: int = 2, **how: Any) -> dict[str, Any]:
    specs = P("tp"), *BLOCK * count
    return tp(devices, specs, specs, pipeline="p2p", **how)


def moments(program: Program) -> list[tuple[int, int]]:
    """How many permutes outside of loops go at once, and contractions beside them."""
    found: list[tuple[int, int]] = []
    issued = beside = 0
    for stmt in program.body:
        match stmt:
            case Communicate(kind="CollectivePermute"):
                issued += 1
            case Compute() if issued:
                beside += sum(each.rule.contracts for each in stmt.unit.eqns)
            case Wait() if issued:
                found.append((issued, beside))
                issued = beside = 0
            case _:
                pass
    return found


@every_size
def test_a_loops_sums_are_beside_its_last_transfer_and_the_next(devices: int) -> None:
    """Of two blocks the second comes first; nothing is there for the first gather."""
    program = exact(gradients(blocks, 5), *operands(devices), **settled(devices))
    others = devices - 1
    assert moments(program) == [(others, n) for n in (0, 1, 1, 1)]
    assert all(
        stmt.reducer is None for stmt in walk(program.body) if isinstance(stmt, Compute)
    )


def hidden_by(program: Program) -> list[int]:
    """How many contractions stand beside each permute outside of loops."""
    under_way: dict[str, int] = {}
    found: list[int] = []
    for stmt in program.body:
        match stmt:
            case Communicate(kind="CollectivePermute"):
                under_way[stmt.name] = 0
            case Compute() | For():
                works = sum(map(has_contraction, walk((stmt,))))
                under_way = {name: n + works for name, n in under_way.items()}
            case Wait(communication=name) if name in under_way:
                found.append(under_way.pop(name))
            case _:
                pass
    return found


@every_size
def test_products_of_what_came_first_are_beside_what_comes_next(devices: int) -> None:
    """A layer that is computed again gathers its input, and its cotangent."""

    f = gradients(jax.checkpoint(block), 3)
    program = exact(f, *operands(devices, 1), **settled(devices, 1))
    others = devices - 1
    # The input, with nothing beside it, the cotangent, beside x @ up, and that of x.
    assert hidden_by(program) == [0] * others + [1] * others + [1] * others


@every_size
def test_a_cotangent_comes_beside_the_work_in_front_of_its_loop(devices: int) -> None:
    """Two blocks in one `jax.checkpoint`: the first one is computed in chunks again.

    Meanwhile the cotangent comes, whose product stands beside the second one's input.
    """

    @jax.checkpoint
    def f(x: jax.Array, *weights: jax.Array) -> jax.Array:
        return block(blocks(x, *weights[:2]), *weights[2:])

    program = exact(gradients(f, 5), *operands(devices), **settled(devices))
    assert 0 not in hidden_by(program)


@jax.checkpoint
def behind_three_blocks(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """A block, and before it three others, which are computed again with it."""
    return block(blocks(x, *weights[:6]), *weights[6:])


def test_a_cotangent_comes_two_works_before_its_loop_and_its_first_shard_three() -> (
    None
):
    """It takes memory from then on."""
    gradient = gradients(behind_three_blocks, 9)
    program = program_of(gradient, *operands(4, 4), **settled(4, 4))
    assert hidden_by(program)[:3] == [9, 6, 6]


@pytest.mark.parametrize(
    ("devices", "run"),
    [(4, program_of), (2, program_of), pytest.param(4, exact, marks=pytest.mark.slow)],
)
def test_the_first_of_several_shards_comes_a_work_earlier(
    devices: int, run: Callable[..., Program]
) -> None:
    """The loops of blocks that are computed again are such works."""
    gradient = gradients(behind_three_blocks, 9)
    program = run(gradient, *operands(devices, 4), **settled(devices, 4))
    first, *others = hidden_by(program)[: devices - 1]
    assert all(0 < other < first for other in others)


def test_the_forward_is_in_chunks_and_the_backward_is_not() -> None:
    program = exact(gradients(blocks, 5), *operands(4), **settled(4))
    loops = [stmt for stmt in program.body if isinstance(stmt, For)]
    working = [loop for loop in loops if any(isinstance(s, Compute) for s in loop.body)]
    assert len(working) == 2


def test_a_program_without_a_loop_is_pipelined_all_the_same() -> None:
    """A backward by itself: XLA gets the options that it gets for loops."""
    args = operands(4, 1)
    how = tp(4, (P("tp"), *BLOCK), P("tp"), pipeline="p2p")
    forward, program = backward(jhost.jit(blocks, **how), *args)
    assert count_loops(forward) == 1
    assert count_loops(program) == 0
    assert is_pipelined(program)
    assert len(moments(program)) == 2


def test_what_reads_a_sum_comes_behind_it() -> None:
    """An optimizer's step, which is the next layer's business, say."""

    def step(x: jax.Array, *weights: jax.Array) -> Any:
        grads = gradients(blocks, 5)(x, *weights)
        size = sum(jnp.sum(jnp.abs(g)) for g in grads)
        pairs = zip(weights, grads[1:], strict=True)
        return [w - jnp.where(size > 0, g, 0) for w, g in pairs]

    ins, outs = (P("tp"), *BLOCK * 2), [*BLOCK * 2]
    exact(step, *operands(4), **tp(4, ins, outs, pipeline="p2p"))


def test_shards_in_pieces_stay_in_chunks() -> None:
    """Who asks for more chunks than devices gets a loop, with sums behind it."""
    how = settled(2, chunks=4)
    program = exact(gradients(blocks, 5), *operands(2), **how)
    assert not moments(program)


def test_tokens_go_to_experts_whole() -> None:
    """An all-to-all is permutes too, of parts of the other dim."""

    def loss(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = jnp.einsum("gecm,emf->gecf", x, up)
        h = h * lax.stop_gradient(jnp.sign(h))
        y = jhost.stream(jnp.einsum("gecf,efm->gecm", h, down), axis=0)
        return jnp.sum(jhost.shard(y, P("tp")))

    args = array(8, 4, 2, 3), array(4, 3, 4, seed=1), array(4, 4, 3, seed=2)
    specs = P("tp"), P("tp"), P("tp")
    how = tp(4, specs, specs, pipeline="p2p")
    program = exact(jax.grad(loss, (0, 1, 2)), *args, **how)
    assert [issued for issued, _ in moments(program)] == [3, 3]


def test_sums_over_several_axes_of_data() -> None:
    """Each row of devices moves its own rows, and sums are reduced over both."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = x @ up
        y = jhost.stream(hidden * lax.stop_gradient(jnp.sign(hidden)) @ down, axis=0)
        return jhost.shard(y, P(("dp", "tp")))

    args = array(16, MODEL), *operands(2, 1)[1:]
    specs = P(("dp", "tp")), *BLOCK
    how = on({"dp": 2, "tp": 2}, specs, specs, pipeline="p2p")
    exact(gradients(f, 3), *args, **how)


def test_a_sum_over_another_axis_waits_with_its_contraction() -> None:
    """It would take the contraction from the transfer that has nothing else beside."""

    def f(x: jax.Array, *weights: jax.Array) -> jax.Array:
        return jax.vmap(lambda x: blocks(x, *weights))(x)

    x, *weights = operands(4)
    specs = P("dp", "tp"), *BLOCK * 2
    how = on({"dp": 2, "tp": 2}, specs, specs, pipeline="p2p")
    with mock.patch.object(combine_small, "SMALL", 0):
        program = exact(gradients(f, 5), x.reshape(2, 4, MODEL), *weights, **how)
    assert "AllReduce dp sum" in communications(program)
    assert moments(program) == [(1, n) for n in (0, 1, 1, 1)]


@pytest.mark.slow
@settings(max_examples=budget.examples(6), deadline=None)
@given(st.data())
def test_any_blocks(data: st.DataObject) -> None:
    """Around a jhost function, and inside of one, in a scan, and computed again."""
    devices, count = data.draw(st.sampled_from([2, 4])), data.draw(st.integers(1, 3))
    checkpointed, scans = data.draw(st.booleans()), data.draw(st.booleans())

    def model(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            return blocks(x, *weights), None

        if checkpointed:
            layer = jax.checkpoint(layer)
        if scans:
            return lax.scan(layer, x, (up, down))[0]
        for n in range(count):
            x, _ = layer(x, (up[n], down[n]))
        return x

    rows = devices * data.draw(st.integers(1, 3))
    args = (
        array(rows, MODEL),
        array(count, MODEL, HIDDEN, seed=1),
        array(count, HIDDEN, MODEL, seed=2),
    )
    specs = P("tp"), P(None, None, "tp"), P(None, "tp")
    how = tp(devices, specs, specs, pipeline="p2p")
    exact(gradients(model, 3), *args, **how)
