"""Parity group E with nvFuser: rings, hand-written overlap, linear layers.

A test for each row of nvFuser's `test_multidevice_host_ir_overlap.cpp` and
`test_overlap.py`: the numbers exactly, and the matmuls and collectives of the chunks'
shapes that each device runs.  `test_blocks.py` has the Host IR of the same programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.lowering.on_mesh import calls, each_size, exact, program_of, tp
from tests.lowering.traced import array, interpreted, loops, work

Function = Callable[..., jax.Array]

GATHER = (P("tp"), P(None, "tp")), P(None, "tp")
"""Rows of the left operand come together, the columns of the right one stay apart."""

SCATTER = (P(None, "tp"), P("tp")), P("tp")
"""The contracted dim is sharded, and the rows of the result are."""


def matmul(**how: Any) -> Function:
    """A matmul whose rows are streamed."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w, 0, **how)

    return f


# --- Rings with more chunks than devices -------------------------------------------- #


@each_size
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_ring_allgather(devices: int, pieces: int) -> None:
    """nvFuser's ring hands shards on; here each comes from its owner.  Same result."""
    x, w = array(devices * 4, 8), array(8, 64, seed=1)
    how = {"pipeline": "p2p", "chunks": pieces * devices}
    program = exact(matmul(**how), x, w, **tp(devices, *GATHER))
    rows = 4 // pieces
    assert calls(program) == {
        f"ppermute {rows}x8": (devices - 1) * pieces,
        f"dot_general {rows}x8 8x{64 // devices}": devices * pieces,
    }


@each_size
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_reduce_scatter_ring(devices: int, pieces: int) -> None:
    """nvFuser's S / D rings of D steps."""
    x, w = array(devices * 4, devices * 8), array(devices * 8, 2, seed=1)
    how = {"pipeline": "p2p", "chunks": pieces * devices}
    program = exact(matmul(**how), x, w, **tp(devices, *SCATTER))
    rows = 4 // pieces
    assert calls(program) == {
        f"dot_general {rows}x8 8x2": devices * pieces,
        f"ppermute {rows}x2": (devices - 1) * pieces,
    }


# --- The hand-written overlap algorithms -------------------------------------------- #

M, K, N, S = 64, 32, 16, 8


def gather_all(**how: Any) -> Function:
    """C = A_full B on every device, as nvFuser's algorithms have it."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(jhost.shard(x, P()) @ w, 0, **how)

    return f


# Nine of nvFuser's tests are these four: each as ATen calls and as Host IR, and the
# ring of gathers a third time by CUDA IPC.
ALGORITHMS: dict[str, tuple[Function, Any, str]] = {
    "ReduceScatterBasedPipelining": (
        matmul(chunks=S),
        SCATTER,
        "dot_general, ReduceScatter",
    ),
    "ReduceScatterRingBasedPipelining": (
        matmul(pipeline="p2p", chunks=S),
        SCATTER,
        "dot_general, CollectivePermute",
    ),
    "AllgatherBasedPipelining": (
        gather_all(chunks=S),
        ((P("tp"), P()), P()),
        "AllGather, dot_general",
    ),
    "RingAllgatherBasedPipelining": (
        gather_all(pipeline="p2p", chunks=S),
        ((P("tp"), P()), P()),
        "CollectivePermute, dot_general",
    ),
}


@each_size
@pytest.mark.parametrize("name", ALGORITHMS)
def test_hand_written_overlap(name: str, devices: int) -> None:
    """Four iterations with fresh inputs."""
    f, specs, does = ALGORITHMS[name]
    # On 8 devices K = 32 is so small that an exchange of A moves less than C's sum.
    k = 2 * K if devices == 8 and specs is SCATTER else K
    settings = tp(devices, *specs)
    inputs = [(array(M, k, seed=i), array(k, N, seed=4 + i)) for i in range(4)]
    functions = [jhost.jit(f, **settings)]
    functions += [interpreted(f, **settings)] if devices <= 4 else []
    for function in functions:
        given = [function(*args) for args in inputs]
        for args, result in zip(inputs, given, strict=True):
            chex.assert_trees_all_equal(result, f(*args))
    program = program_of(f, *inputs[0], **settings)
    assert does in {", ".join(work(loop.body)) for loop in loops(program)}
    matmuls = sum(n for call, n in calls(program).items() if call[:3] == "dot")
    assert matmuls == S


def test_an_exchange_of_the_operand_may_be_cheaper_than_a_sum() -> None:
    """With K = 32 on 8 devices, where a p2p pipeline hides the sum."""
    x, w, settings = array(M, K), array(K, N, seed=1), tp(8, *SCATTER)
    program = exact(matmul(chunks=S), x, w, **settings)
    assert work(program.body) == ["AllGather", "loop(AllToAll, dot_general)"]
    program = exact(matmul(pipeline="p2p", chunks=S), x, w, **settings)
    (loop,) = loops(program)
    assert work(loop.body) == ["dot_general", "CollectivePermute"]


# --- Linear layers ------------------------------------------------------------------ #


def linear(**how: Any) -> Function:
    """As nvFuser's and torch's: the weight is [out, in]."""

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jhost.stream(x @ w.T, 0, **how)

    return f


@each_size
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_row_parallel_linear(devices: int, chunks: int) -> None:
    """s matmuls of [t / s, k / D] by [k / D, h], and as many all-reduces."""
    t, k, h = 16, 64, 4
    specs = (P(None, "tp"), P(None, "tp")), P()
    x, w = array(t, k), array(h, k, seed=1)
    program = exact(linear(chunks=chunks), x, w, **tp(devices, *specs))
    assert calls(program) == {
        f"dot_general {t // chunks}x{k // devices} {k // devices}x{h}": chunks,
        f"psum {t // chunks}x{h}": chunks,
    }


@each_size
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_column_parallel_linear(devices: int, chunks: int) -> None:
    """s matmuls of [t / s, h] by [h, n / D], and as many all-gathers."""
    t, h, n = 64, 4, 64
    specs = (P("tp"), P("tp")), P(None, "tp")
    x, w = array(t, h), array(n, h, seed=1)
    program = exact(linear(chunks=chunks), x, w, **tp(devices, *specs))
    assert calls(program) == {
        f"all_gather {t // devices // chunks}x{h}": chunks,
        f"dot_general {t // chunks}x{h} {h}x{n // devices}": chunks,
    }


@each_size
def test_column_parallel_linear_collective_permute(devices: int) -> None:
    """D matmuls of [t / D, h], and D - 1 permutes: as many as nvFuser's SendRecv."""
    t, h, n = 64, 4, 64
    specs = (P("tp"), P("tp")), P(None, "tp")
    x, w = array(t, h), array(n, h, seed=1)
    program = exact(linear(pipeline="p2p"), x, w, **tp(devices, *specs))
    assert calls(program) == {
        f"ppermute {t // devices}x{h}": devices - 1,
        f"dot_general {t // devices}x{h} {h}x{n // devices}": devices,
    }


@each_size
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_overlap_allgather_matmul_with_bias(devices: int, chunks: int) -> None:
    """The bias is added in the loop."""

    def f(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        return jhost.stream(x @ w.T + bias[None], 0, chunks=chunks)

    t, h, n = 64, 4, 64
    args = array(t, h), array(n, h, seed=1), array(n, seed=2)
    specs = (P("tp"), P("tp"), P("tp")), P(None, "tp")
    program = exact(f, *args, **tp(devices, *specs))
    assert [work(loop.body) for loop in loops(program)] == (
        [] if chunks == 1 else [["AllGather", "dot_general", "add"]]
    )
    matmul = f"dot_general {t // chunks}x{h} {h}x{n // devices}"
    assert calls(program)[matmul] == chunks
