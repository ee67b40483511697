"""What pipelines move and hold: no byte more than needed, and nothing assembled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jhost
from jhost.lowering.explain import explain_program
from jhost.lowering.ir.program import Program
from jhost.lowering.ir.statements import (
    Allocate,
    Buffer,
    Communicate,
    Compute,
    Deallocate,
    For,
    Select,
    Set,
    Stmt,
    walk,
)
from tests.lowering.on_mesh import calls, each_size, exact, program_of, tp
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

    x, weights = array(devices * 8, 8), [array(8, 64, seed=i) for i in range(3)]
    specs = (P("tp"), *[P(None, "tp")] * 3), P(None, "tp")
    program = program_of(f, x, *weights, **tp(devices, *specs, **HOW[how](devices)))
    assert received(program) == x.nbytes * (devices - 1) // devices
    for loop in loops(program):
        assert sum(isinstance(stmt, Communicate) for stmt in loop.body) <= 1


@each_size
@each_way
def test_what_is_returned_whole_as_well_is_gathered_once(
    devices: int, how: str
) -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        return jhost.stream(x @ w, 0), x

    x, w = array(devices * 8, 8), array(8, 64, seed=1)
    specs = GATHER[0], (GATHER[1], P())
    program = exact(f, x, w, **tp(devices, *specs, **HOW[how](devices)))
    assert received(program) == x.nbytes * (devices - 1) // devices


# --- Memory: the Host IR ------------------------------------------------------------ #

ROWS, INNER, HIDDEN, OUTER = 32, 8, 128, 4
PIPELINED = [how for how in HOW if how != "off"]


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jnp.maximum(x @ up, 0) @ down, 0)


def block_program(devices: int, how: str) -> Program:
    shapes = (ROWS, INNER), (INNER, HIDDEN), (HIDDEN, OUTER)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return program_of(block, *args, **tp(devices, *BLOCK, **HOW[how](devices)))


def live(program: Program) -> Iterator[list[Buffer]]:
    """What has memory of its own after each statement, the parameters left aside."""
    aliases = {s.out.name for s in walk(program.body) if isinstance(s, Select)}
    yield from _live(program.body, {}, aliases)


def _live(
    body: Sequence[Stmt], held: dict[str, Buffer], aliases: set[str]
) -> Iterator[list[Buffer]]:
    for stmt in body:
        made: Sequence[Buffer] = ()
        match stmt:
            case Allocate(buffer=buffer):
                made = (buffer,)
            case Compute(outs=outs):
                made = outs
            case Communicate(out=out) | Set(out=out):
                made = (out,)
            case Deallocate(buffer=buffer):
                del held[buffer.name]
            case For(body=inner):
                inside = dict(held)
                yield from _live(inner, inside, aliases)
                assert inside == held, "what is made in an iteration is freed in it"
            case _:
                pass
        held |= {b.name: b for b in made if b.name not in aliases | set(held)}
        yield list(held.values())


def size(buffer: Buffer) -> int:
    return math.prod(buffer.shape) * buffer.dtype.itemsize


def peak(program: Program, hidden: int) -> int:
    """The most bytes live at once; but for hidden values, which units hold inside."""
    return max(
        sum(size(buffer) for buffer in buffers if buffer.shape[-1] != hidden)
        for buffers in live(program)
    )


def has_whole(program: Program, rows: int, columns: int) -> bool:
    """Whether a device ever has all of a value of that shape."""
    shapes = {buffer.shape for buffers in live(program) for buffer in buffers}
    return (rows, columns) in shapes


@each_size
@pytest.mark.parametrize("how", PIPELINED)
def test_neither_the_input_nor_the_partial_output_is_ever_whole(
    devices: int, how: str
) -> None:
    program = block_program(devices, how)
    assert not has_whole(program, ROWS, INNER)
    assert not has_whole(program, ROWS, OUTER)
    plain = block_program(devices, "off")
    assert has_whole(plain, ROWS, INNER)
    assert has_whole(plain, ROWS, OUTER)
    hidden = HIDDEN // devices
    assert peak(program, hidden) < peak(plain, hidden)


@each_size
def test_at_most_one_shard_is_there_beside_the_own(devices: int) -> None:
    """In a p2p pipeline: of the input, one chunk an iteration."""
    program = block_program(devices, "p2p")
    most = max(
        sum(buffer.shape == (ROWS // devices, INNER) for buffer in buffers)
        for buffers in live(program)
    )
    assert most == 1


@each_size
@pytest.mark.parametrize("how", ["p2p", "p2p in pieces", "p2p in ragged pieces"])
def test_what_others_send_is_kept_until_it_is_added(devices: int, how: str) -> None:
    """D parts of the own rows: together as large as the output, and no larger."""
    (terms,) = {
        buffer
        for buffers in live(block_program(devices, how))
        for buffer in buffers
        if buffer.partial and len(buffer.shape) == 3
    }
    assert terms.shape == (devices, ROWS // devices, OUTER)


# --- Memory: what XLA allocates ----------------------------------------------------- #


def temporaries(fun: Any, args: Sequence[Any]) -> int:
    return fun.lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("how", ["collective", "p2p", "p2p in pieces"])
def test_xla_needs_less_memory_than_for_the_plain_function(how: str) -> None:
    """Than for jhost's without a pipeline, and than for `jax.jit`'s own."""
    shapes = (256, 64), (64, 1024), (1024, 64)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    plain = jhost.jit(block, **tp(4, *BLOCK, pipeline="off"))
    pipelined = jhost.jit(block, **tp(4, *BLOCK, **HOW[how](4)))
    gathered, hidden = 256 * 64 * 4, 256 * 1024 // 4 * 4
    assert temporaries(plain, args) >= gathered + hidden
    assert temporaries(pipelined, args) < gathered + hidden
    mesh = tp(4, *BLOCK)["mesh"]
    ins, outs = jax.tree.map(lambda spec: NamedSharding(mesh, spec), BLOCK)
    by_jax = jax.jit(block, in_shardings=ins, out_shardings=outs)
    assert temporaries(pipelined, args) < temporaries(by_jax, args)
