"""What two processes of two H200s each overlap: meshes (dp, tp) in both orders.

And in one program data parallelism, or FSDP, across processes and tensor parallelism
within them: each loop by its own axis, and nothing of jhost's in the way of the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jhost
from jhost.runtime.compiler_options import EARLY_COLLECTIVES, overlap_options
from jhost.runtime.profile.schedule import ScheduledCommunication, parse_schedule
from tests.aot.on_h200 import MakeH200s

TOKENS, MODEL, HIDDEN = 8192, 4096, 14336  # 8B
SHAPES = (TOKENS, MODEL), (MODEL, HIDDEN), (HIDDEN, MODEL)
SPECS = P(None, "tp"), P("tp")
TYPES = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in SHAPES]


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jax.nn.relu(x @ up) @ down, axis=0)


def compiled(mesh: Mesh, **how: Any) -> jhost.Compiled:
    axes = tuple(axis for axis in ("dp", "tp") if axis in mesh.shape)
    specs = (P(axes), *SPECS)
    f = jhost.jit(mlp, mesh=mesh, in_shardings=specs, out_shardings=P(axes), **how)
    return f.lower(*TYPES).compile()


@pytest.fixture(scope="module")
def within(two_processes: MakeH200s) -> jhost.Compiled:
    """tp within a process, as it should be."""
    return compiled(two_processes({"dp": 2, "tp": 2}))


def test_what_moves_within_a_process_is_pipelined_unasked(
    within: jhost.Compiled,
) -> None:
    """As in one process: two permutes, each beside a matmul, and no other rates."""
    (stream,) = within.explain().streams
    assert stream.pipeline == "p2p"
    schedule = within.schedule()
    assert [c.kind for c in schedule.communications] == ["CollectivePermute"] * 2
    assert all(c.asynchronous and c.matmuls for c in schedule.communications)


def test_its_permutes_join_the_devices_of_a_process_alone(
    within: jhost.Compiled,
) -> None:
    """So that each is a copy: XLA asks whether a process owns all that it joins."""
    text = within.as_text() or ""
    pairs = re.findall(r"collective-permute-start\(.*source_target_pairs=(\S+),", text)
    assert pairs == ["{{0,1},{1,0},{2,3},{3,2}}"] * 2
    (applied, *missed) = within.explain().options
    assert "collective_permute_connected_components=True" in applied
    assert "COLLECTIVES_PEER_MEMORY" in applied
    assert not missed
    assert ":S(7)" not in text  # a buffer of NCCL's


def test_nothing_across_processes_is_pipelined_unasked(
    two_processes: MakeH200s,
) -> None:
    """And an axis that lies so without need is named."""
    (stream,) = compiled(two_processes({"tp": 2, "dp": 2})).explain().streams
    assert stream.pipeline == "off"
    assert "the devices along tp are in several processes of a host" in stream.reason
    assert "one process, where dp lies: jhost.distributed.make_mesh" in stream.reason
    assert "make_mesh({'dp': 2, 'tp': 2})" in stream.reason
    (stream,) = compiled(two_processes({"tp": 4})).explain().streams
    assert stream.pipeline == "off"
    assert "one process a host, with all its GPUs" in stream.reason


def test_what_is_asked_for_across_processes_is_done_and_said_to_hide_little(
    two_processes: MakeH200s,
) -> None:
    asked = compiled(two_processes({"tp": 2, "dp": 2}), pipeline="p2p")
    (note,) = [n for n in asked.explain().notes if "hides little" in n]
    assert "the devices along tp" in note
    assert "symmetric_buffers=True" in str(asked.explain().options)
    pairs = re.findall(
        r"permute-start\(.*source_target_pairs=(\S+),", asked.as_text() or ""
    )
    assert set(pairs) == {"{{0,2},{2,0},{1,3},{3,1}}"}


def both_passes(mesh: Mesh, specs: Sequence[P]) -> Sequence[ScheduledCommunication]:
    """What two blocks and their weights' gradients move, in one program."""
    how: dict[str, Any] = {"mesh": mesh, "pipeline": "p2p"}
    rows, *weights = specs
    block = jhost.jit(mlp, in_shardings=specs, out_shardings=rows, **how)

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = x + block(x, *layer)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    sharded = [
        jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, spec))
        for t, spec in zip(TYPES, specs, strict=True)
    ]
    layers = [tuple(sharded[1:])] * 2
    outer = jax.jit(
        jax.grad(loss),
        out_shardings=[tuple(NamedSharding(mesh, spec) for spec in weights)] * 2,
        compiler_options=overlap_options(mesh, adds_up=True),
    )
    text = outer.lower(layers, sharded[0]).compile().as_text() or ""
    return parse_schedule(text).communications


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
@pytest.mark.parametrize(
    ("weights", "kinds"),
    [
        ((P(None, "tp"), P("tp")), {"CollectivePermute": 9, "AllReduce": 4}),
        (
            (P("dp", "tp"), P("tp", "dp")),
            {"CollectivePermute": 8, "AllGather": 4, "ReduceScatter": 4},
        ),
    ],
    ids=["data parallel", "fsdp"],
)
def test_weights_move_between_processes_beside_loops_within_them(
    weights: tuple[P, P], kinds: dict[str, int], two_processes: MakeH200s
) -> None:
    """All but the first gather, which everything waits for, and the last reduction.

    And in each block's backward the gather of the cotangent.
    """
    mesh = two_processes({"dp": 2, "tp": 2})
    moved = both_passes(mesh, (P(("dp", "tp")), *weights))
    assert Counter(c.kind for c in moved) == kinds
    hidden = [c for c in moved if c.asynchronous and c.matmuls]
    exposed = [
        c.kind for c in moved if c not in hidden and c.kind != "CollectivePermute"
    ]
    assert exposed in ([], ["AllReduce"], ["AllGather", "ReduceScatter"])
    permutes = [c for c in moved if c.kind == "CollectivePermute"]
    assert len([c for c in permutes if c not in hidden]) <= 2


# --- Collectives in order -------------------------------------------------------- #

LAYERS, WIDTH = 4, 8192


def layers(weights: Any, x: jax.Array) -> jax.Array:
    """A scan of layers with float32 masters, each computed again in the backward."""

    @jax.checkpoint
    def layer(x: jax.Array, weights: Any) -> jax.Array:
        gate, up, down = weights
        inner = jax.nn.silu(x @ bfloat16(gate)) * (x @ bfloat16(up))
        return x + inner @ bfloat16(down)

    y, _ = lax.scan(lambda x, each: (layer(x, each), None), x, weights)
    return jnp.sum(y.astype(jnp.float32) ** 2)


def bfloat16(w: jax.Array) -> jax.Array:
    return w.astype(jnp.bfloat16)


def test_what_is_not_to_be_ordered_is_as_jax_jit_has_it(
    two_processes: MakeH200s,
) -> None:
    """With the options that let collectives start early."""
    mesh = two_processes({"fsdp": 4})
    spec, rows = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P("fsdp"))
    how: dict[str, Any] = {"in_shardings": ([spec] * 3, rows)}
    how["out_shardings"] = [spec] * 3
    masters = [jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)] * 3
    types = masters, jax.ShapeDtypeStruct((32768, WIDTH), jnp.bfloat16)
    left = jhost.jit(jax.grad(layers), pipeline="off", **how).lower(*types).compile()
    assert "XLA partitions this program" in str(left.explain())
    plain = jax.jit(jax.grad(layers), compiler_options=dict(EARLY_COLLECTIVES), **how)
    text = plain.lower(*types).compile().as_text() or ""
    told = [
        [(c.kind, c.bytes, c.matmuls) for c in each.communications]
        for each in (left.schedule(), parse_schedule(text))
    ]
    assert told[0] == told[1]


def test_what_has_no_work_beside_it_is_left_to_xla_as_it_is(
    two_processes: MakeH200s,
) -> None:
    """Activations between matmuls: no option would help them."""
    made = compiled(two_processes({"tp": 4}))
    explanation = made.explain()
    assert "XLA partitions this program" in str(explanation)
    assert not explanation.options
