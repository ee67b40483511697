"""A pipeline that is asked for by name gets the communications that it can hide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.statements import Communicate
from jhost.lowering.layouts.hidden_dims import streamed_dims
from jhost.lowering.layouts.propagate_layouts import PropagateLayouts
from tests.jhost.derived import backward, moves, programs, vjp
from tests.lowering.on_mesh import communications, each_size, exact, on, program_of, tp
from tests.lowering.traced import array, asked, loops, work

BLOCK = (P("tp"), P(None, "tp"), P("tp")), P("tp")


def block(**how: Any) -> Callable[..., jax.Array]:
    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream(jnp.maximum(x @ up, 0) @ down, 0, **how)

    return f


def small() -> tuple[jax.Array, ...]:
    """An MLP block whose weights are smaller than its activations."""
    return array(56, 8), array(8, 16, seed=1), array(16, 8, seed=2)


@each_size
def test_p2p_gathers_the_rows_of_a_small_block_and_not_its_weights(
    devices: int,
) -> None:
    program = exact(block(pipeline="p2p"), *small(), **tp(devices, *BLOCK))
    assert communications(program) == ["CollectivePermute tp"] * 2
    assert len(loops(program)) == 1


def test_a_collective_pipeline_as_well() -> None:
    program = exact(block(pipeline="collective"), *small(), **tp(4, *BLOCK))
    assert communications(program) == ["AllGather tp 0", "ReduceScatter tp 0 sum"]
    assert len(loops(program)) == 1


def test_the_setting_of_the_function_counts_as_the_mark() -> None:
    settings = tp(4, *BLOCK, pipeline="p2p")
    program = program_of(block(), *small(), **settings)
    assert communications(program) == ["CollectivePermute tp"] * 2


@pytest.mark.usefixtures("combined_as_on_gpus")
@pytest.mark.parametrize("how", [{}, {"pipeline": "off"}, {"pipeline": "auto"}])
def test_without_a_pipeline_by_name_the_fewest_bytes_win(how: dict[str, Any]) -> None:
    program = program_of(block(**how), *small(), **tp(4, *BLOCK))
    # Both weights, in one gather, as they are small.
    assert communications(program) == ["AllGather tp 0"]


INS = {
    "rows and columns": (P("tp"), P(None, "tp")),
    "rows and rows": (P("tp"), P("tp")),
    "columns and rows": (P(None, "tp"), P("tp")),
}


@pytest.mark.parametrize("out", [P("tp"), P()], ids=["shards", "whole"])
@pytest.mark.parametrize("ins", INS.values(), ids=INS)
def test_wherever_rows_can_be_handed_on_p2p_finds_a_way(ins: Any, out: P) -> None:
    """Also where an exchange of either operand would take fewer bytes."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, 0, pipeline="p2p")

    args = array(64, 32), array(32, 16, seed=1)
    program = exact(f, *args, **tp(8, ins, out))
    assert any("CollectivePermute" in work(loop.body) for loop in loops(program))


def test_weights_are_gathered_over_another_axis_and_no_chunks_are_summed() -> None:
    """A loop could take in a collective over it, but not hide it."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(jnp.einsum("btm,mf->btf", x, w), 1, pipeline="p2p")

    specs = (P("fsdp", "tp"), P("fsdp", "tp")), P("fsdp", None, "tp")
    args = array(8, 16, 16), array(16, 16, seed=1)
    program = exact(f, *args, **on({"fsdp": 2, "tp": 2}, *specs))
    found = communications(program)
    assert found == ["AllGather fsdp 0", "CollectivePermute tp"]


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("devices", [2, 4])
def test_experts_move_by_all_to_alls_alone(devices: int, constrained: bool) -> None:
    """Also where tokens gathered in the loop would be beside more work.

    That is four times as much on four devices.  Forward and backward, of a shard of
    tokens in experts' places each way.
    """

    def f(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        x = jhost.shard(x, P(None, "tp")) if constrained else x
        h = jnp.einsum("gecm,emf->gecf", x, up)
        h = h * jax.nn.silu(jnp.einsum("gecm,emf->gecf", x, gate))
        return jhost.stream(jnp.einsum("gecf,efm->gecm", h, down), 0)

    x, (up, down) = array(16, 8, 16, 8), (array(8, 8, 256), array(8, 256, 8))
    part = x.nbytes // devices * (devices - 1) // devices
    for pipeline in ("p2p", "collective", "off"):
        settings = tp(devices, (P("tp"),) * 4, P("tp"), pipeline=pipeline)
        forward, back = backward(jhost.jit(f, **settings), x, up, up, down)
        kind = "CollectivePermute" if pipeline == "p2p" else "AllToAll"
        assert moves(forward) == [f"{kind} tp {part}"] * 2
        assert moves(back) == [f"{kind} tp {part}"] * 3


def test_behind_serial_nothing_is_streamed() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jhost.stream(jhost.serial(jnp.sin(x)) + 1, 0, pipeline="p2p")

    dims = streamed_dims(asked(f, (8, 8), tp=4))
    assert {name: streamed.dim for name, streamed in dims.items()} == {"v_1": 0, "y": 0}


def test_constraints_do_not_give_way_to_a_stream() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        h = jhost.shard(x @ w, P(None, "tp"))
        return jhost.shard(jhost.stream(h, 0, pipeline="p2p"), P("tp"))

    program = PropagateLayouts().apply(asked(f, (8, 8), (8, 8), tp=4))
    (result,) = program.results
    assert [dim.axes for dim in result.dims] == [("tp",), ()]


@pytest.mark.usefixtures("combined_as_on_gpus")
def test_chunks_move_along_one_of_the_axes_of_a_dim() -> None:
    """Rows over both axes, weights over both: what moves over dp is not hidden.

    The weights are gathered, and their gradients scattered, over dp; no rows are.
    """

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jhost.stream(jnp.maximum(x @ up, 0) @ down, 0, pipeline="p2p")

    args = array(32, 16), array(16, 32, seed=1), array(32, 16, seed=2)
    rows = P(("dp", "tp"))
    specs = (rows, P("dp", "tp"), P("tp", "dp")), rows
    how = on({"dp": 2, "tp": 2}, *specs)
    exact(f, *args, **how)
    _, backward = programs(vjp(jhost.jit(f, **how)), args[0], *args)
    moved = Counter(
        (stmt.kind, stmt.axes)
        for stmt in statements(backward)
        if isinstance(stmt, Communicate)
    )
    assert moved == {
        ("CollectivePermute", ("tp",)): 3,
        ("AllGather", ("dp",)): 2,
        ("ReduceScatter", ("dp",)): 1,  # of both, as they are small
    }
