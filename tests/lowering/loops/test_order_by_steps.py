"""Chunks of p2p loops lie in the order of the steps where nothing else reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import programs
from jhost.lowering.ir.index import Rank, leaves
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute, Select, walk
from tests import budget, sums
from tests.lowering.on_mesh import each_size, exact, on
from tests.lowering.traced import array

Golden = Callable[..., None]
ROWS, MODEL, HIDDEN, LAYERS = 8, 4, 8, 3


@pytest.fixture(params=["whole", "beside transfers"])
def whole_sums(request: pytest.FixtureRequest) -> Iterator[None]:
    """No loop adds up what it contracts."""
    with sums.standing(request.param):
        yield


def bent(x: jax.Array) -> jax.Array:
    """An activation with a derivative of its own, and no constants as large as it."""
    return x * lax.stop_gradient(x)


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    y = jhost.stream(bent(x @ up) @ down, axis=0)
    return jhost.shard(jnp.where(jnp.abs(y) < 4, y, 1), P("tp"))  # small integers


def gradients(f: Callable[..., Any], count: int = 3) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *args: jnp.sum(f(*args)), tuple(range(count)))


def scanned(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return block(x, *weights), None

    return lax.scan(layer, x, (up, down))[0]


WEIGHTS = P(None, "tp"), P("tp")
STACKED = P(None, None, "tp"), P(None, "tp")


def p2p(axes: dict[str, int], ins: Any, outs: Any, **how: Any) -> dict[str, Any]:
    return on(axes, ins, outs, pipeline="p2p", **how)


def both_ways(axes: dict[str, int], *specs: P, **how: Any) -> dict[str, Any]:
    """The settings of gradients that lie as their operands do."""
    return p2p(axes, specs, (P(), specs), **how)


def placed_by_rank(program: Program) -> int:
    """How many chunks, in any body, are in places that only the device knows."""
    return sum(
        isinstance(stmt, Select)
        and stmt.out.dims[stmt.dim].stream is not None
        and any(isinstance(leaf, Rank) for leaf in leaves(stmt.index))
        for each in programs(program)
        for stmt in walk(each.body)
    )


def added_up(program: Program) -> int:
    """How many computations add to what an earlier iteration made."""
    return sum(
        isinstance(stmt, Compute) and stmt.reducer is not None
        for each in programs(program)
        for stmt in walk(each.body)
    )


def weights(*shape: int) -> tuple[jax.Array, jax.Array]:
    return array(*shape, MODEL, HIDDEN, seed=1), array(*shape, HIDDEN, MODEL, seed=2)


def test_what_one_loop_makes_for_another(golden: Golden) -> None:
    """The forward's chunks are read by the backward, and by nobody else."""
    args = array(ROWS, MODEL), *weights()
    program = exact(gradients(block), *args, **both_ways({"tp": 4}, P("tp"), *WEIGHTS))
    assert not placed_by_rank(program)
    assert added_up(program) > 0
    golden(str(program))


@budget.first_is_quick("chunks", ["auto", 8])
@each_size
def test_what_a_scan_stacks_and_another_slices(devices: int, chunks: Any) -> None:
    chunks = chunks if chunks == "auto" else 2 * devices
    args = array(ROWS, MODEL), *weights(LAYERS)
    how = both_ways({"tp": devices}, P("tp"), *STACKED, chunks=chunks)
    program = exact(gradients(scanned), *args, **how)
    assert not placed_by_rank(program)


def test_what_is_read_whole_keeps_its_places() -> None:
    """A result is in order of position, whatever else reads its chunks."""

    def both(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        hidden = x @ up
        return jhost.stream(bent(hidden) @ down, axis=0), hidden

    args = array(ROWS, MODEL), *weights()
    outs = P("tp"), P(None, "tp")
    program = exact(both, *args, **p2p({"tp": 4}, (P("tp"), *WEIGHTS), outs))
    assert placed_by_rank(program) > 0


def test_what_a_scan_stacks_for_the_caller_keeps_its_places() -> None:
    def stacked(x: jax.Array, up: jax.Array, down: jax.Array) -> Any:
        def layer(x: jax.Array, weights: Any) -> Any:
            up, down = weights
            hidden = x @ up
            y = jhost.stream(bent(hidden) @ down, axis=0)
            return jhost.shard(jnp.clip(y, -3, 3), P("tp")), hidden

        return lax.scan(layer, x, (up, down))

    args = array(ROWS, MODEL), *weights(LAYERS)
    outs = P("tp"), P(None, None, "tp")
    program = exact(stacked, *args, **p2p({"tp": 4}, (P("tp"), *STACKED), outs))
    assert placed_by_rank(program) > 0


# --- Contractions behind the loop -------------------------------------------------- #


@pytest.mark.usefixtures("whole_sums")
def test_gradients_of_weights_are_one_matmul_each(golden: Golden) -> None:
    """Their operands come together in the order of the steps: a sum does not care."""
    args = array(ROWS, MODEL), *weights()
    program = exact(gradients(block), *args, **both_ways({"tp": 4}, P("tp"), *WEIGHTS))
    assert not added_up(program)
    assert not placed_by_rank(program)
    golden(str(program))


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("chunks", ["auto", 8])
@each_size
def test_in_scans_as_well(devices: int, chunks: Any) -> None:
    chunks = chunks if chunks == "auto" else 2 * devices
    args = array(ROWS, MODEL), *weights(LAYERS)
    how = both_ways({"tp": devices}, P("tp"), *STACKED, chunks=chunks)
    program = exact(gradients(scanned), *args, **how)
    assert not added_up(program)
    assert not placed_by_rank(program)


@pytest.mark.usefixtures("whole_sums")
def test_beside_data_parallelism() -> None:
    """Sums over the rows of all batches are reduced over the other axis as before."""
    args = array(2 * ROWS, MODEL), *weights()
    axes = {"dp": 2, "tp": 2}

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        y = jhost.stream(bent(x @ up) @ down, axis=0)
        return jhost.shard(jnp.clip(y, -3, 3), P(("dp", "tp")))

    program = exact(gradients(f), *args, **both_ways(axes, P(("dp", "tp")), *WEIGHTS))
    assert not added_up(program)


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_a_sum_that_all_devices_hold_is_the_same_on_each(dtype: Any) -> None:
    """Floats are added in order of position there; integers may be in any order."""

    def f(x: jax.Array, y: jax.Array) -> Any:
        rows = jhost.stream(bent(x), axis=0)
        rows, other = (jhost.shard(v, P()) for v in (rows, bent(y)))
        return lax.dot_general(rows, other, (((0,), (0,)), ((), ())))

    args = [array(ROWS, MODEL, seed=n).astype(dtype) for n in (0, 1)]
    program = exact(f, *args, **p2p({"tp": 4}, (P("tp"), P("tp")), P()))
    assert bool(placed_by_rank(program)) == (dtype == jnp.float32)


@pytest.mark.usefixtures("whole_sums")
@settings(max_examples=budget.examples(5), deadline=None)
@given(st.data())
def test_any_block(data: st.DataObject) -> None:
    devices = data.draw(st.sampled_from([2, 4]))
    pieces = data.draw(st.integers(1, 3))
    rows = devices * data.draw(st.integers(1, 4))
    layers = data.draw(st.integers(1, 2))
    args = array(rows, MODEL), *weights(layers)
    chunks = min(pieces, rows // devices) * devices
    how = both_ways({"tp": devices}, P("tp"), *STACKED, chunks=chunks)
    exact(gradients(scanned), *args, **how)


# --- What works on all of it -------------------------------------------------------- #


def read_as_a_whole(reader: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """Rows come in a loop, and what is made of them goes in another."""

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jhost.serial(jhost.stream(x @ up, axis=0))
        return jhost.stream(jhost.serial(reader(hidden)) @ down, axis=0)

    return f


READERS: dict[str, tuple[Callable[[jax.Array], jax.Array], bool]] = {
    "elementwise": (lambda h: jnp.abs(h) + 1, True),
    "along the rows": (lambda h: jnp.cumsum(h, axis=0), False),
    "where a row stands": (
        lambda h: h + lax.broadcasted_iota(h.dtype, h.shape, 0),
        False,
    ),
    "the other way round": (lambda h: h[::-1], False),
    "beside a constant": (
        lambda h: h * np.arange(h.size, dtype=h.dtype).reshape(h.shape),
        False,
    ),
    "itself": (lambda h: h[:, : h.shape[0]] @ h, False),
    "one by one": (
        lambda h: lax.scan(lambda c, row: (c + row, c - row), h[0] * 0, h)[1],
        False,
    ),
    "sequences of a shard": (
        lambda h: jnp.cumsum(h.reshape(-1, 2, h.shape[1]), axis=1).reshape(h.shape),
        True,
    ),
    "sequences of two shards": (
        lambda h: jnp.cumsum(h.reshape(-1, 4, h.shape[1]), axis=1).reshape(h.shape),
        False,
    ),
}


@pytest.mark.parametrize(("reader", "turned"), READERS.values(), ids=READERS.keys())
def test_what_a_whole_is_read_by(
    reader: Callable[[jax.Array], jax.Array], turned: bool
) -> None:
    """It lies in the order of the steps where a row's place means nothing to that."""
    args = array(ROWS, MODEL), *weights()
    how = p2p({"tp": 4}, (P("tp"), *WEIGHTS), P("tp"))
    program = exact(read_as_a_whole(reader), *args, **how)
    assert (placed_by_rank(program) == 0) == turned


@given(
    st.sampled_from([2, 4]),
    st.booleans(),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from([P(), P("tp")]),
    st.sampled_from([P("tp"), P()]),
)
@settings(max_examples=budget.examples(6), deadline=None)
def test_iterations_of_a_scan_have_their_order(
    devices: int, reverse: bool, row: tuple[int, ...], ins: P, outs: P
) -> None:
    """Without a loop over chunks, too: shards of what it stacks, slices, or both."""

    def f(x: jax.Array) -> Any:
        rows = jhost.shard(x * 2, ins)
        start = jnp.zeros(row)
        carry, ys = lax.scan(
            lambda c, r: (c + r, c * r), start, jhost.shard(rows, P()), reverse=reverse
        )
        return carry, jhost.shard(jhost.shard(ys, outs) * 2, outs)

    args = array(2 * devices, *row)
    exact(f, args, **p2p({"tp": devices}, (ins,), (P(), outs)))


def test_sequences_of_two_shards_beside_data_parallelism() -> None:
    """Of four sequences each row of devices has two, and a device half of one."""
    reader, _ = READERS["sequences of two shards"]
    args = array(2 * ROWS, MODEL), *weights()
    rows = P(("dp", "tp"))
    how = p2p({"dp": 2, "tp": 4}, (rows, *WEIGHTS), rows)
    exact(read_as_a_whole(reader), *args, **how)
