"""What XLA schedules beside what, on four H200s, for the patterns of docs/patterns.md.

At the sizes of Llama-3 8B and 70B with 8192 tokens: forward, and at the end forward and
backward in one program.  A pattern's `exposed` transfers are those that no matmul
hides: because none could, or because jhost does not have it so yet.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from tests import sums
from tests.aot.on_h200 import Case, MakeH200s, Moves, check, check_both_ways, each

TOKENS, MODEL, HIDDEN = 8192, 4096, 14336  # 8B
WHOLE = f"bf16[{TOKENS},{MODEL}]"

ROW, COLUMN = P("tp"), P(None, "tp")

P2P = {"pipeline": "p2p", "chunks": 4}
P2P_IN_PIECES = {"pipeline": "p2p", "chunks": 8}
COLLECTIVE = {"pipeline": "collective", "chunks": 4}

# Which no schedule can hide:
FIRST = "no chunk is there before it, to be worked on meanwhile"
LAST = "no chunk is left to be worked on after it"
LAST_BACK = "what the owners added of the last piece is sent when all matmuls are done"
LAST_THREE_BACK = dict.fromkeys(range(9, 12), LAST_BACK)

# Which a better program could:
AFTER_ALL = "what the owners added is sent when all matmuls are done"
PIECE = "the last piece is sent when all matmuls are done"
UNCUT = "the device's own matmul stands before the loop, in one piece"

PERMUTES_3 = {"CollectivePermute": Moves(3)}
PERMUTES_6 = {"CollectivePermute": Moves(6)}
PERMUTES_12 = {"CollectivePermute": Moves(12)}
GATHERS = {"AllGather": Moves(4, exposed={0: FIRST})}
SCATTERS = {"ReduceScatter": Moves(4, exposed={3: LAST})}


@pytest.fixture
def tp(h200s: MakeH200s) -> Mesh:
    return h200s({"tp": 4})


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jhost.stream(x @ w, 0)


# --- One matmul ------------------------------------------------------------------- #


@each(
    p2p=Case(P2P, 4, PERMUTES_3),
    p2p_in_pieces=Case(P2P_IN_PIECES, 8, PERMUTES_6),
    collective=Case(COLLECTIVE, 4, GATHERS),
)
def test_all_gather_and_matmul(tp: Mesh, case: Case) -> None:
    shapes = (TOKENS, MODEL), (MODEL, HIDDEN)
    check(tp, case, matmul, shapes, (ROW, COLUMN), COLUMN, never=WHOLE)


@each(
    p2p=Case(P2P, 1, {"CollectivePermute": Moves(3, dict.fromkeys(range(3), UNCUT))}),
    collective=Case(COLLECTIVE, 4, {"AllGather": Moves(4, exposed={3: LAST})}),
)
def test_matmul_and_all_gather(tp: Mesh, case: Case) -> None:
    """The result is smaller than the operand, so the result is what is gathered."""
    shapes = (TOKENS, MODEL), (MODEL, MODEL // 4)
    check(tp, case, matmul, shapes, (ROW, P()), P(), never=WHOLE)


@each(
    p2p=Case(P2P, 4, PERMUTES_3),
    p2p_in_pieces=Case(P2P_IN_PIECES, 8, PERMUTES_6),
    collective=Case(COLLECTIVE, 4, SCATTERS),
)
def test_matmul_and_reduce_scatter(tp: Mesh, case: Case) -> None:
    shapes = (TOKENS, HIDDEN), (HIDDEN, MODEL)
    check(tp, case, matmul, shapes, (COLUMN, ROW), ROW, never=WHOLE)


@each(
    p2p=Case(
        P2P, 4, {"CollectivePermute": Moves(6, dict.fromkeys(range(3, 6), AFTER_ALL))}
    ),
    p2p_in_pieces=Case(
        P2P_IN_PIECES,
        8,
        {"CollectivePermute": Moves(12, LAST_THREE_BACK)},
    ),
    collective=Case(COLLECTIVE, 4, {"AllReduce": Moves(4, exposed={3: LAST})}),
)
def test_matmul_and_all_reduce(tp: Mesh, case: Case) -> None:
    shapes = (TOKENS, HIDDEN), (HIDDEN, MODEL)
    check(tp, case, matmul, shapes, (COLUMN, ROW), P())


@each(
    p2p=Case(P2P, 4, PERMUTES_3),
    collective=Case(COLLECTIVE, 4, GATHERS),
)
def test_the_gathered_dim_is_contracted(tp: Mesh, case: Case) -> None:
    """A weight's gradient: the chunks' products are summed."""

    def f(x: jax.Array, dy: jax.Array) -> jax.Array:
        return jhost.stream(x, 0).T @ dy

    shapes = (TOKENS, MODEL), (TOKENS, HIDDEN)
    check(tp, case, f, shapes, (ROW, COLUMN), COLUMN, never=WHOLE)


@each(
    p2p_in_pieces=Case(P2P_IN_PIECES, 8, PERMUTES_6),
)
def test_the_gathered_dim_is_on_the_right_operand(tp: Mesh, case: Case) -> None:
    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return w @ jhost.stream(x, 1)

    shapes = (HIDDEN, MODEL), (MODEL, TOKENS)
    whole = f"bf16[{MODEL},{TOKENS}]"
    check(tp, case, f, shapes, (ROW, COLUMN), ROW, never=whole)


@each(
    p2p=Case(P2P, 4, PERMUTES_3),
)
def test_bias_and_activation(tp: Mesh, case: Case) -> None:
    def f(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return jhost.stream(jax.nn.gelu(x @ w + b[None]), 0)

    shapes = (TOKENS, MODEL), (MODEL, HIDDEN), (HIDDEN,)
    check(tp, case, f, shapes, (ROW, COLUMN, ROW), COLUMN, never=WHOLE)


# A block that is tried both ways by p2p, is not tried forward alone by p2p.

# --- Blocks ----------------------------------------------------------------------- #

PIECES_12 = {"CollectivePermute": Moves(12, exposed={11: PIECE})}


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jax.nn.gelu(x @ up) @ down, 0)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream((jax.nn.silu(x @ gate) * (x @ up)) @ down, 0)


@each(
    p2p_in_pieces=Case(P2P_IN_PIECES, 16, PIECES_12),
    collective=Case(COLLECTIVE, 8, GATHERS | SCATTERS),
)
def test_mlp_block(tp: Mesh, case: Case) -> None:
    shapes = (TOKENS, MODEL), (MODEL, HIDDEN), (HIDDEN, MODEL)
    check(tp, case, mlp, shapes, (ROW, COLUMN, ROW), ROW, never=WHOLE)


@each(
    p2p=Case({"pipeline": "p2p", "chunks": 2}, 4, {"CollectivePermute": Moves(2)}),
    collective=Case(COLLECTIVE, 8, GATHERS | SCATTERS),
)
def test_mlp_block_beside_data_parallelism(h200s: MakeH200s, case: Case) -> None:
    mesh, rows = h200s({"dp": 2, "tp": 2}), P(("dp", "tp"))
    shapes = (TOKENS, MODEL), (MODEL, HIDDEN), (HIDDEN, MODEL)
    whole = f"bf16[{TOKENS // 2},{MODEL}]"
    check(mesh, case, mlp, shapes, (rows, COLUMN, ROW), rows, never=whole)


@each(
    p2p_in_pieces=Case(P2P_IN_PIECES, 24, PIECES_12),
    collective=Case(COLLECTIVE, 12, GATHERS | SCATTERS),
)
def test_swiglu_block(tp: Mesh, case: Case) -> None:
    shapes = (TOKENS, MODEL), (MODEL, HIDDEN), (MODEL, HIDDEN), (HIDDEN, MODEL)
    specs = ROW, COLUMN, COLUMN, ROW
    check(tp, case, swiglu, shapes, specs, ROW, never=WHOLE)


EXPERTS = (TOKENS, 8, MODEL), (8, MODEL, HIDDEN // 4), (8, HIDDEN // 4, MODEL)


def experts(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    there = jhost.shard(x, P(None, "tp"))
    h = jax.nn.silu(jnp.einsum("tek,ekf->tef", there, up))
    return jhost.stream(jnp.einsum("tef,efk->tek", h, down), 0)


@each(
    p2p_in_pieces=Case(P2P_IN_PIECES, 16, PERMUTES_12),
    collective=Case(COLLECTIVE, 8, {"AllToAll": Moves(8, exposed={0: FIRST, 7: LAST})}),
)
def test_all_to_all_and_experts(tp: Mesh, case: Case) -> None:
    """Tokens go to eight experts and come back."""
    whole = f"bf16[{TOKENS},2,{MODEL}]"
    check(tp, case, experts, EXPERTS, (ROW, ROW, ROW), ROW, never=whole)


# --- Attention and a layer, of 70B ------------------------------------------------ #

MODEL_70B, HIDDEN_70B, SEQUENCE = 8192, 28672, 2048
HEADS, SHARED, HEAD = 64, 8, 128  # of queries, of keys and values, the size of one
WHOLE_70B = f"bf16[{TOKENS},{MODEL_70B}]"

QKV = (
    (TOKENS, MODEL_70B),
    (MODEL_70B, HEADS * HEAD),
    (MODEL_70B, SHARED * HEAD),
    (MODEL_70B, SHARED * HEAD),
)
QKV_SPECS = ROW, COLUMN, COLUMN, COLUMN


def qkv(
    x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, ...]:
    # Without this the small weights are gathered, although x comes for the queries.
    x = jhost.shard(x, P())
    return jhost.stream(x @ q, 0), x @ k, x @ v


def heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of each head along its sequence, without a mask."""
    sequences = TOKENS // SEQUENCE
    q = q.reshape(sequences, SEQUENCE, SHARED, HEADS // SHARED, HEAD)
    k = k.reshape(sequences, SEQUENCE, SHARED, HEAD)
    v = v.reshape(sequences, SEQUENCE, SHARED, HEAD)
    scores = jnp.einsum("sqhgd,skhd->shgqk", q, k).astype(jnp.float32) / HEAD**0.5
    weights = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("shgqk,skhd->sqhgd", weights, v).reshape(TOKENS, HEADS * HEAD)


def attention(
    x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array
) -> jax.Array:
    # Streams stop where a whole sequence is needed.
    parts = [jhost.serial(part) for part in qkv(x, q, k, v)]
    return jhost.stream(jhost.serial(heads(*parts)) @ out, 0)


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + 1e-5)).astype(x.dtype)


def layer(x: jax.Array, *weights: jax.Array) -> jax.Array:
    q, k, v, out, gate, up, down = weights
    x = x + attention(norm(x), q, k, v, out)
    return x + swiglu(norm(x), gate, up, down)


@each(
    p2p_in_pieces=Case(P2P_IN_PIECES, 24, PERMUTES_6),
)
def test_queries_keys_and_values(tp: Mesh, case: Case) -> None:
    check(tp, case, qkv, QKV, QKV_SPECS, (COLUMN,) * 3, never=WHOLE_70B)


@each(p2p=Case(P2P, 8, PERMUTES_6), p2p_in_pieces=Case(P2P_IN_PIECES, 16, PERMUTES_12))
def test_ring_attention(tp: Mesh, case: Case) -> None:
    """Keys and values of one sequence go around; sums of weights need no maximum."""

    def f(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("hqd,hkd->hqk", q, k, preferred_element_type=jnp.float32)
        weights = jhost.stream(jnp.exp(scores / HEAD**0.5), 2)
        y = jnp.einsum("hqk,hkd->hqd", weights.astype(v.dtype), v)
        return y / jnp.sum(weights, axis=2, keepdims=True).astype(v.dtype)

    shape, rows = (HEADS, TOKENS, HEAD), P(None, "tp")
    whole = f"[{HEADS},{TOKENS // 4},{TOKENS}]"
    check(tp, case, f, (shape,) * 3, (rows,) * 3, rows, never=whole)


@each(
    p2p=Case(P2P, 30, PERMUTES_12),
    collective=Case(
        COLLECTIVE,
        30,
        {
            "AllGather": Moves(8, exposed={0: FIRST}),
            "ReduceScatter": Moves(8, exposed={7: LAST}),
        },
    ),
)
def test_transformer_layer(tp: Mesh, case: Case) -> None:
    up, down = (MODEL_70B, HIDDEN_70B), (HIDDEN_70B, MODEL_70B)
    shapes = *QKV, (HEADS * HEAD, MODEL_70B), up, up, down
    specs = *QKV_SPECS, ROW, COLUMN, COLUMN, ROW
    check(tp, case, layer, shapes, specs, ROW, never=WHOLE_70B)


# --- Forward and backward --------------------------------------------------------- #

# Where this is tried, there are no GPUs for `jhost.compiler_options()` to know.
outer_jit = pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")


@outer_jit
@each(p2p=Case(P2P, 12, PERMUTES_6))
def test_all_gather_and_matmul_both_ways(tp: Mesh, case: Case) -> None:
    """x comes, also for the weight's gradient, and x's cotangent goes."""
    shapes = (TOKENS, MODEL), (MODEL, HIDDEN)
    check_both_ways(tp, case, matmul, shapes, (ROW, COLUMN), COLUMN)


@outer_jit
@each(
    p2p=Case(P2P, 24, PERMUTES_12),
    collective=Case(
        COLLECTIVE,
        24,
        {
            "AllGather": Moves(8, exposed={0: FIRST}),
            "ReduceScatter": Moves(8),
        },
    ),
)
def test_mlp_block_both_ways(tp: Mesh, case: Case) -> None:
    """x comes and y goes, dy comes and dx goes."""
    shapes = (TOKENS, MODEL), (MODEL, HIDDEN), (HIDDEN, MODEL)
    check_both_ways(tp, case, mlp, shapes, (ROW, COLUMN, ROW), ROW)


@outer_jit
@each(p2p=Case(P2P, 36, PERMUTES_12))
def test_swiglu_block_both_ways(tp: Mesh, case: Case) -> None:
    shapes = (TOKENS, MODEL), (MODEL, HIDDEN), (MODEL, HIDDEN), (HIDDEN, MODEL)
    check_both_ways(tp, case, swiglu, shapes, (ROW, COLUMN, COLUMN, ROW), ROW)


def shifted(x: jax.Array, by: int) -> jax.Array:
    """All rows so far on."""
    if by < 0:
        return jnp.pad(x[-by:], ((0, -by), (0, 0)))
    return jnp.pad(x, ((by, 0), (0, 0)))[:TOKENS]


@outer_jit
@pytest.mark.parametrize(
    ("first", "times"), [(0, 1), (-1, 1), (0, 2)], ids=["causal", "centred", "twice"]
)
@each(p2p=Case(P2P, 36, PERMUTES_12))
def test_convolution_both_ways(tp: Mesh, case: Case, first: int, times: int) -> None:
    """Between two products, with a gate: a chunk keeps its edge rows for others."""

    def f(
        x: jax.Array, up: jax.Array, gate: jax.Array, taps: jax.Array, down: jax.Array
    ) -> jax.Array:
        mixed = x @ up
        for _ in range(times):
            rows = [shifted(mixed, first + n) for n in range(4)]
            each = (tap * row for tap, row in zip(taps, rows, strict=True))
            mixed = sum(each, jnp.zeros_like(mixed))
        return jhost.stream(mixed * (x @ gate) @ down, 0)

    shapes = (TOKENS, MODEL), *[(MODEL, HIDDEN)] * 2, (4, HIDDEN), (HIDDEN, MODEL)
    specs = ROW, COLUMN, COLUMN, COLUMN, ROW
    check_both_ways(tp, case, f, shapes, specs, ROW)


@outer_jit
@each(p2p=Case(P2P, 24, PERMUTES_12))
def test_all_to_all_and_experts_both_ways(tp: Mesh, case: Case) -> None:
    """x goes and y comes back, dy goes and dx comes back."""
    check_both_ways(tp, case, experts, EXPERTS, (ROW, ROW, ROW), ROW)


@outer_jit
@each(p2p=Case(P2P, 54, {"CollectivePermute": Moves(15)}))
def test_attention_block_both_ways(tp: Mesh, case: Case) -> None:
    shapes, specs = (*QKV, (HEADS * HEAD, MODEL_70B)), (*QKV_SPECS, ROW)
    check_both_ways(tp, case, attention, shapes, specs, ROW)


def test_gradients_of_weights_are_beside_whole_shards(tp: Mesh) -> None:
    """Two blocks: those of one hide its cotangent's way on, and that to the other."""

    def loss(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = jhost.shard(x + mlp(x, up, down), ROW)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    shapes = (TOKENS, MODEL), *((MODEL, HIDDEN), (HIDDEN, MODEL)) * 2
    specs = (ROW, *(COLUMN, ROW) * 2)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    hosted: Any = jhost.jit(
        jax.grad(loss, tuple(range(5))),
        mesh=tp,
        in_shardings=specs,
        out_shardings=specs,
        pipeline="p2p",
    )
    with sums.standing("beside transfers"):
        compiled = hosted.lower(*types).compile()
    schedule = compiled.schedule()
    permutes = [c for c in schedule.communications if c.kind == "CollectivePermute"]
    assert len(permutes) == 24, str(schedule)
    exposed = [n for n, each in enumerate(permutes) if not each.matmuls]
    assert exposed == [12, 13, 14], str(schedule)  # of the first gather of the backward
    # What is sent is copied out of a product, and what stays is added where it is.
    copied = re.findall(
        rf"%wrapped_slice\S* = bf16\[{TOKENS // 4},", compiled.as_text()
    )
    assert len(copied) == 2 * 3
