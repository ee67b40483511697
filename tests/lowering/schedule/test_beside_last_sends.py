"""Casts of the next weights stand beside the last sends of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.emit.program import emit
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Compute, Stmt, Synchronize
from tests.lowering.hand_built import mesh_of
from tests.lowering.on_mesh import exact, program_of, tp

COLUMNS, ROWS = P(None, "tp"), P("tp", None)
INS = COLUMNS, ROWS, COLUMNS


def layers(x: Any, w: Any, v: Any) -> Any:
    """A product that is summed, and one by a weight that is cast."""
    y = jhost.shard(jhost.stream(x @ w, 0, pipeline="p2p"), ROWS)
    z = jhost.stream((y + 1) @ v.astype(jnp.bfloat16), 0, pipeline="p2p")
    return jhost.shard(z, COLUMNS)


def operands(columns: int = 4096) -> tuple[np.ndarray, ...]:
    bits = np.random.default_rng(0).integers(0, 2, (16, 32))
    x, w = bits.astype(jnp.bfloat16), np.resize(bits, (32, 512)).astype(jnp.bfloat16)
    return x, w, np.resize(bits, (512, columns)).astype(np.float32)


def casts(stmts: Sequence[Stmt]) -> list[int]:
    """The statements that do nothing but cast a weight."""
    return [
        number
        for number, stmt in enumerate(stmts)
        if isinstance(stmt, Compute)
        and [each.eqn.primitive.name for each in stmt.unit.eqns]
        == ["convert_element_type"]
    ]


def readers_of_casts(program: Program) -> set[str]:
    """What reads a weight's cast in the function that is emitted."""
    mesh = mesh_of(**program.mesh.shape)
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands()]
    (outer,) = jax.make_jaxpr(emit(program, mesh))(*avals).jaxpr.eqns
    eqns = outer.params["jaxpr"].eqns
    made = [e for e in eqns if e.outvars[0].aval.shape == (512, 2048)]
    (cast,) = (e for e in made if e.primitive.name == "convert_element_type")
    return {e.primitive.name for e in eqns if cast.outvars[0] in e.invars}


def test_a_cast_comes_before_the_last_own_chunk() -> None:
    program = exact(layers, *operands(), **tp(2, INS, COLUMNS))
    (cast,) = casts(program.body)
    own = program.body[cast + 1 :]
    # The chunk of the device itself, and only then the wait for all.
    number, chunk = next((n, s) for n, s in enumerate(own) if isinstance(s, Compute))
    assert chunk.chunk is not None
    assert any(each.rule.contracts for each in chunk.unit.eqns)
    assert not any(isinstance(stmt, Synchronize) for stmt in own[:number])


def test_its_readers_read_it_behind_the_barrier_of_the_chunk() -> None:
    """Else XLA would compute it where it is read: behind the wait."""
    program = program_of(layers, *operands(), **tp(2, INS, COLUMNS))
    assert readers_of_casts(program) == {"optimization_barrier"}


def test_what_is_small_stays_where_it_is_read() -> None:
    program = program_of(layers, *operands(256), **tp(2, INS, COLUMNS))
    assert not casts(program.body)


def test_what_reads_the_sum_stays_behind_it() -> None:
    def f(x: Any, w: Any, v: Any) -> Any:
        y = jhost.shard(jhost.stream(x @ w, 0, pipeline="p2p"), ROWS)
        scaled = (v * jnp.sum(y, dtype=np.float32)).astype(jnp.bfloat16)
        z = jhost.stream((y + 1) @ scaled, 0, pipeline="p2p")
        return jhost.shard(z, COLUMNS)

    assert not casts(program_of(f, *operands(), **tp(2, INS, COLUMNS)).body)
