"""What is issued and waited for where, whatever a transfer is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import most_under_way, programs
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute, Wait, walk
from jhost.lowering.rules.properties import is_barrier
from jhost.lowering.schedule.scheduled_transfer import TransferForm
from tests import sums
from tests.lowering.on_mesh import each_size, exact, on, program_of
from tests.lowering.outside import gradients_of, kinds, layer, operands
from tests.lowering.traced import array, lowered

each_way = pytest.mark.parametrize("way", get_args(TransferForm))


def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    """Rows stay where they are."""
    for w in weights:
        x = jhost.shard(layer(x, w), P("fsdp"))
    return x


def cast(x: jax.Array, *masters: jax.Array) -> jax.Array:
    """Each weight is cast where it is used."""
    for w in masters:
        x = jhost.shard(layer(x, w.astype(x.dtype)), P("fsdp"))
    return x


def scanned(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Two layers in each iteration, whose weights are float32."""

    @jax.checkpoint
    def both(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return cast(x, w, v, w)

    return lax.scan(lambda x, each: (both(x, *each), None), x, (w, v))[0]


def waits_behind(program: Program) -> list[int]:
    """For each transfer, how many matmuls stand between its issue and its wait."""
    behind: list[int] = []
    for each in programs(program):
        matmuls = 0
        issued: dict[str, int] = {}
        for stmt in walk(each.body):
            match stmt:
                case Compute():
                    matmuls += sum(eqn.rule.contracts for eqn in stmt.unit.eqns)
                case Communicate(name=name):
                    issued[name] = matmuls
                case Wait(communication=name):
                    behind.append(matmuls - issued[name])
                case _:
                    pass
    return behind


# --- What stands where ------------------------------------------------------------- #


def test_collectives_keep_their_kind_in_order(golden: Callable[..., None]) -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x, w, v = (jhost.shard(each, P("fsdp")) for each in (x, w, v))
        return jhost.shard(x @ w, P("fsdp")) @ v

    with sums.moving("collective"):
        golden(str(lowered(f, (4, 2), (2, 2), (2, 2), fsdp=2)))


def test_all_but_the_first_gather_have_work_beside_them() -> None:
    specs = (P("fsdp"),) * 5
    with sums.moving("collective"):
        program = program_of(
            gradients_of(layers), *operands(32, 4, 4), **on({"fsdp": 2}, specs, specs)
        )
    assert waits_behind(program).count(0) == 1
    assert most_under_way(program) <= 3


def test_an_all_to_all_stands_beside_work_that_does_not_need_it() -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        rows, columns = P("ep"), P(None, "ep")
        moved = jhost.shard(jhost.shard(layer(x, w), rows), columns)
        beside = jhost.shard(layer(layer(x, v), v), rows)
        return jhost.shard(layer(w, moved) + beside, columns)

    args, specs = operands(4, 2, 4), (P("ep"), P(), P())
    with sums.moving("collective"):
        program = exact(f, *args, **on({"ep": 2}, specs, P(None, "ep")))
    assert kinds(program)[0] == "AllToAll"
    assert waits_behind(program)[0] == 2


def test_what_an_update_makes_of_its_state_waits_with_it() -> None:
    """Made before, the decayed momentum would be written to memory and read again."""

    def step(x: jax.Array, w: jax.Array, v: jax.Array, momentum: jax.Array) -> Any:
        decayed = momentum * 3
        g, h = jax.grad(lambda w, v: layer(layer(x, w), v).sum(), (0, 1))(w, v)
        return decayed + g, layer(h, h)

    specs = (P("dp"), P(), P(), P()), (P(), P())
    with sums.moving("collective"):
        program = exact(step, *operands(8, 3, 4), **on({"dp": 2}, *specs))
    body = [*walk(program.body)]
    last = max(n for n, stmt in enumerate(body) if isinstance(stmt, Wait))
    (reader,) = (
        n
        for n, stmt in enumerate(body)
        if isinstance(stmt, Compute) and "momentum" in {b.name for b in stmt.ins}
    )
    assert reader > last


@each_way
def test_what_is_cast_where_it_is_used_is_cast_and_moved_early(
    way: TransferForm,
) -> None:
    """No transfer of a body is waited for where it is issued, as it is a cycle."""
    args = [x.astype(t) for x, t in zip(_of_scan(2), _DTYPES, strict=True)]
    with sums.moving(way):
        program = program_of(gradients_of(scanned), *args, **_on_scan(2))
    bodies = [*programs(program)][1:]
    assert len(bodies) == 2
    for body in bodies:
        moved = [s for s in walk(body.body) if isinstance(s, Communicate)]
        gathers = [s for s in moved if s.kind != "ReduceScatter"]
        assert {str(s.source.dtype) for s in gathers} == {"bfloat16"}
    assert not any(0 in waits_behind(body) for body in bodies)


def written_out(x: jax.Array, *masters: jax.Array) -> jax.Array:
    """Layers in a row, each computed again in the backward."""
    for w in masters:
        x = jax.checkpoint(cast)(x, w)
    return x


@each_way
def test_what_is_computed_again_has_its_weights_before_its_gradient(
    way: TransferForm,
) -> None:
    """In `jax.checkpoint`'s barrier a weight waits for no incoming gradient."""
    masters = [array(4, 4, seed=n).astype(jnp.float32) for n in range(3)]
    args = [array(32, 4).astype(jnp.bfloat16), *masters]
    specs = (P("fsdp"),) * 4
    with sums.moving(way):
        program = program_of(
            gradients_of(written_out), *args, **on({"fsdp": 2}, specs, specs)
        )
    assert waits_behind(program).count(0) == 1  # the first gather
    # It still has a barrier of its own, or XLA would keep what the forward gathered.
    gathered = {s.source.name for s in walk(program.body) if isinstance(s, Communicate)}
    again = [
        stmt
        for stmt in walk(program.body)
        if isinstance(stmt, Compute)
        and not gathered.isdisjoint(b.name for b in stmt.outs)
        if any(is_barrier(eqn.eqn) for eqn in stmt.unit.eqns)
    ]
    assert again


def test_what_makes_more_bytes_is_not_made_early() -> None:
    """A weight of int8, which stands for one of float32."""

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        x = layer(jhost.shard(x, P("fsdp")), w)
        wide = jhost.shard(v.astype(jnp.float32), P("fsdp"))
        return jhost.shard(x, P("fsdp")) @ jhost.shard(wide, P())

    args = array(8, 4), array(4, 4), array(4, 4).astype(jnp.int8)
    specs = P("fsdp"), P(), P("fsdp")
    with sums.moving("permutes", within=False):
        program = program_of(f, *args, **on({"fsdp": 2}, specs, P("fsdp")))
    assert kinds(program) == ["AllGather"]


# --- Values ------------------------------------------------------------------------ #

_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float32)


def _of_scan(devices: int) -> list[jax.Array]:
    weights = (array(2, 4, 4, seed=n) for n in (1, 2))
    return [array(4 * devices, 4), *(jnp.where(abs(w) == 1, w, 0) for w in weights)]


def _on_scan(devices: int) -> dict[str, Any]:
    specs = P("fsdp"), P(None, "fsdp"), P(None, None, "fsdp")
    return on({"fsdp": devices}, specs, specs)


@each_way
@each_size
def test_a_scan_of_layers_is_exact(way: TransferForm, devices: int) -> None:
    args = [x.astype(t) for x, t in zip(_of_scan(devices), _DTYPES, strict=True)]
    with sums.moving(way):
        exact(gradients_of(scanned), *args, **_on_scan(devices))


@pytest.mark.parametrize("devices", [3, 4])
def test_gradients_by_collectives_are_exact(devices: int) -> None:
    """Of any number of devices."""
    specs = (P("fsdp"),) * 5
    args = operands(8 * devices, 4, 2 * devices)
    with sums.moving("collective"):
        program = exact(
            gradients_of(layers), *args, **on({"fsdp": devices}, specs, specs)
        )
    assert "CollectivePermute" not in kinds(program)


def test_what_is_made_of_a_transfer_waits_for_it() -> None:
    """A weight's new value, of a sum over devices, is gathered behind that sum."""

    def step(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        x = jhost.shard(x, P("dp"))
        gradient = jhost.shard(x.T @ x, P("dp"))
        y = jhost.shard(x @ w, P("dp"))
        new = jhost.shard(v - gradient, P())
        return jhost.shard(y @ w, P("dp")) @ new

    args, specs = operands(8, 2, 4), (P("dp"), P(), P("dp"))
    for way in get_args(TransferForm):
        with sums.moving(way):
            exact(step, *args, **on({"dp": 2}, specs, P("dp")))
