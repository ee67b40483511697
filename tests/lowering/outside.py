"""Functions whose weights and gradients move outside of loops, and what then moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.ir.bodies import statements
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import Communicate, Compute, Scan, Wait, walk
from tests.lowering.traced import array


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """With small integers throughout."""
    y = x @ w
    return jnp.where(jnp.abs(y) < 4, y, 1).astype(x.dtype)


def gradients_of(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Those of the sum of what `f` gives, by all of its operands."""

    def gradients(*args: jax.Array) -> Any:
        every = tuple(range(len(args)))
        return jax.grad(lambda *args: jnp.sum(f(*args)), every)(*args)

    return gradients


def operands(rows: int, count: int, width: int) -> list[jax.Array]:
    """Rows, and that many square weights."""
    weights = [array(width, width, seed=n) for n in range(count)]
    return [array(rows, width, seed=9), *weights]


def tensor_parallel_blocks(rows: str) -> Callable[..., jax.Array]:
    """Pairs of weights in blocks with a stream along tp; rows lie over `rows` too."""
    spec = P((rows, "tp"))

    def blocks(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            y = jhost.shard(jhost.stream(layer(x, up) @ down, axis=0), spec)
            x = jhost.shard(x + jnp.where(jnp.abs(y) < 4, y, 1), spec)
            x = jnp.where(jnp.abs(x) < 4, x, 1)
        return x

    return blocks


def kinds(program: Program) -> list[str]:
    """What communicates, in bodies as well."""
    every = statements(program)
    return [stmt.kind for stmt in every if isinstance(stmt, Communicate)]


def exposed(program: Program) -> Counter[tuple[Any, ...]]:
    """The transfers that are waited for before any work behind their issue."""
    found = Counter[tuple[Any, ...]]()
    work = 0
    issued: dict[str, tuple[int, Communicate]] = {}
    for stmt in walk(program.body):
        match stmt:
            case Compute():
                work += sum(eqn.rule.contracts for eqn in stmt.unit.eqns)
            case Scan():
                for what, times in exposed(stmt.body).items():
                    found[what] += times * stmt.length
            case Communicate(name=name):
                issued[name] = work, stmt
            case Wait(communication=name):
                before, transfer = issued[name]
                found[transfer.kind, transfer.out.shape] += before == work
            case _:
                pass
    return +found
