"""What pipelines move and hold: no byte more than needed, and nothing assembled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost.lowering.explain import explain_program
from jhost.lowering.ir import (
    Allocate,
    Buffer,
    Communicate,
    Compute,
    Deallocate,
    For,
    Program,
    Set,
    Stmt,
    walk,
)
from tests.lowering.on_mesh import calls, each_size, program_of, tp
from tests.lowering.traced import array, loops

Function = Callable[..., jax.Array]

GATHER = (P("tp"), P(None, "tp")), P(None, "tp")
SCATTER = (P(None, "tp"), P("tp")), P("tp")
BLOCK = (P("tp"), P(None, "tp"), P("tp")), P("tp")

HOW: dict[str, Callable[[int], dict[str, Any]]] = {
    "off": lambda devices: {"pipeline": "off"},
    "collective": lambda devices: {"pipeline": "collective", "chunks": 2},
    "collective, ragged": lambda devices: {"pipeline": "collective", "chunks": 3},
    "p2p": lambda devices: {"pipeline": "p2p"},
    "p2p in pieces": lambda devices: {"pipeline": "p2p", "chunks": 2 * devices},
    "p2p in ragged pieces": lambda devices: {"pipeline": "p2p", "chunks": 3 * devices},
}
each_way = pytest.mark.parametrize("how", HOW)

# --- Bytes -------------------------------------------------------------------------- #


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jhost.stream(x @ w, 0)


def received(program: Program) -> int:
    """The bytes that each device receives, as `jhost.explain` counts them."""
    return sum(row.bytes for row in explain_program(program).communications)


def emitted_bytes(program: Program, devices: int) -> int:
    """The same from the collectives that are emitted, of float32."""
    factors = {
        "all_gather": devices - 1,
        "ppermute": 1,
        "reduce_scatter": (devices - 1) / devices,
        "psum": 2 * (devices - 1) / devices,
    }
    total = 0.0
    for call, times in calls(program, *factors).items():
        name, shape = call.split()
        elements = math.prod(map(int, shape.split("x")))
        total += 4 * elements * factors[name] * times
    return round(total)


@each_size
@each_way
def test_a_gather_moves_the_others_shards_once(devices: int, how: str) -> None:
    x, w = array(devices * 8, 8), array(8, 64, seed=1)
    program = program_of(matmul, x, w, **tp(devices, *GATHER, **HOW[how](devices)))
    least = x.nbytes * (devices - 1) // devices
    assert received(program) == emitted_bytes(program, devices) == least


@each_size
@each_way
def test_a_reduce_scatter_moves_one_part_from_each_other(
    devices: int, how: str
) -> None:
    x, w = array(devices * 8, devices * 8), array(devices * 8, 2, seed=1)
    program = program_of(matmul, x, w, **tp(devices, *SCATTER, **HOW[how](devices)))
    least = 4 * devices * 8 * 2 * (devices - 1) // devices
    assert received(program) == emitted_bytes(program, devices) == least


@each_size
@each_way
def test_an_all_reduce_moves_twice_as_much(devices: int, how: str) -> None:
    """To an owner and back: the two halves of a p2p pipeline cost no more."""
    x, w = array(devices * 8, devices * 8), array(devices * 8, 4, seed=1)
    settings = tp(devices, SCATTER[0], P(), **HOW[how](devices))
    program = program_of(matmul, x, w, **settings)
    least = 2 * 4 * devices * 8 * 4 * (devices - 1) // devices
    assert received(program) == emitted_bytes(program, devices) == least


# --- Once --------------------------------------------------------------------------- #


@each_size
@each_way
def test_what_several_weights_need_is_gathered_once(devices: int, how: str) -> None:
    """Queries, keys and values of one input: as many bytes as for one of them."""

    def f(x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jhost.stream(x @ q, 0), x @ k, x @ v

    x, *weights = array(devices * 8, 8), *(array(8, 64, seed=i) for i in range(3))
    specs = (P("tp"), *[P(None, "tp")] * 3), P(None, "tp")
    program = program_of(f, x, *weights, **tp(devices, *specs, **HOW[how](devices)))
    assert received(program) == x.nbytes * (devices - 1) // devices
    for loop in loops(program):
        assert [s.source.name for s in loop.body if isinstance(s, Communicate)] in (
            *([], ["x"], ["x_i"], ["x_i_1"]),
        )


# --- Memory: the Host IR ------------------------------------------------------------ #


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jnp.maximum(x @ up, 0) @ down, 0)


def live(body: Sequence[Stmt], held: dict[str, Buffer]) -> Iterator[list[Buffer]]:
    """What has memory of its own after each statement; `held` is what had before."""
    for stmt in body:
        match stmt:
            case Allocate(buffer=buffer):
                held[buffer.name] = buffer
            case Deallocate(buffer=buffer):
                del held[buffer.name]
            case Compute(outs=outs):
                held |= {out.name: out for out in outs if out.name not in aliased}
            case Communicate(out=out) | Set(out=out) if out.name not in aliased:
                held[out.name] = out
            case For(body=inner):
                yield from live(inner, dict(held))
            case _:
                pass
        yield list(held.values())
