"""In no scan's body does a large transfer stand beside nothing.

Beside some stand no matmuls but other kernels: these are named.

Each layer is computed again in the backward, and compiled for H200s over each kind of
mesh.  `test_llama.py` and `test_whole_steps.py` have whole steps.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from tests.aot.on_h200 import QUICKLY, MakeH200s

LARGE = 1_000_000
"""The bytes of a transfer that is worth hiding."""
LAYERS, WIDTH = 4, 8192

Layer = Callable[[jax.Array, Any], jax.Array]


def gated(x: jax.Array, weights: Any) -> jax.Array:
    gate, up, down = map(bfloat16, weights)
    return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down


def over_both(x: jax.Array, weights: Any) -> jax.Array:
    """Shards of weights come over fsdp, and rows move over tp."""
    first, second = weights
    rows = P(("fsdp", "tp"))
    hidden = jax.nn.gelu(jhost.shard(x, P("fsdp")) @ first)
    hidden = jhost.shard(hidden, P("fsdp", "tp"))
    return jhost.shard(x + jhost.shard(hidden @ second, rows), rows)


def bfloat16(w: jax.Array) -> jax.Array:
    return w.astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers over a mesh, and how many large transfers of each kind they have.

    Those of bodies are `moved`.  Beside no matmul stand the `alone` of them, and the
    `ends` of the program around.  A device receives so many `bytes` at a time.
    """

    axes: Mapping[str, int]
    weights: tuple[P, ...]
    moved: Mapping[str, int]
    bytes: set[int]
    alone: Mapping[tuple[str, str], int] = dataclasses.field(
        default_factory=dict[tuple[str, str], int]
    )
    ends: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    layer: Layer = gated
    shapes: tuple[tuple[int, int], ...] = ((WIDTH, WIDTH),) * 3
    rows: int = 32768
    masters: Any = jnp.float32

    def compiled(self, mesh: Mesh) -> jhost.Compiled:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            again = jax.checkpoint(self.layer)
            y, _ = lax.scan(lambda x, w: (again(x, w), None), x, weights)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        specs = [P(None, *spec) for spec in self.weights]
        step: Any = jhost.jit(
            jax.grad(loss),
            mesh=mesh,
            in_shardings=(specs, P(tuple(self.axes))),
            out_shardings=specs,
            # Over two axes jhost finds loops over chunks by itself.
            streams="marked",
        )
        weights = [
            jax.ShapeDtypeStruct((LAYERS, *shape), self.masters)
            for shape in self.shapes
        ]
        x = jax.ShapeDtypeStruct((self.rows, self.shapes[0][0]), jnp.bfloat16)
        return step.lower(weights, x).compile(dict(QUICKLY))


FSDP, DP = (P("fsdp"),) * 3, (P(),) * 3
WEIGHT = 2 * WIDTH * WIDTH
"""Its bytes in bfloat16: masters are cast before they are sent."""

TOGETHER = {
    # The ends are the first layer's first weight and its last sums.
    "fsdp2": Layers(
        {"fsdp": 2},
        FSDP,
        {"CollectivePermute": 9},
        {WEIGHT // 2},
        ends={"AllGather": 1, "CollectivePermute": 1},
    ),
    "fsdp4": Layers(
        {"fsdp": 4},
        FSDP,
        {"CollectivePermute": 27},
        {WEIGHT // 4},
        ends={"AllGather": 1, "CollectivePermute": 6},
    ),
    # An all-reduce over four has two rounds.  The second one of an iteration's last sum
    # has no matmul left, so that sum stands in the next iteration.
    "dp4": Layers(
        {"dp": 4},
        DP,
        {"CollectivePermute": 6},
        {WEIGHT},
        ends={"CollectivePermute": 4},
    ),
    # In the forward each product is made of the rows before it, and makes the rows
    # behind it.  So beside their transfers stand only the pieces of gathered weights,
    # and with streams the chunks of other rows.  In the backward gradients of weights
    # stand beside them, but in the iterations outside of the scan.
    "fsdp2-tp2": Layers(
        {"fsdp": 2, "tp": 2},
        (P("fsdp", "tp"), P("tp", "fsdp")),
        {"AllGather": 1, "CollectivePermute": 8, "ReduceScatter": 2},
        {16 << 20, 32 << 20, 64 << 20},
        alone={("forward", "AllGather"): 1, ("forward", "ReduceScatter"): 1},
        ends={"AllGather": 3, "AllReduce": 1, "ReduceScatter": 1},
        layer=over_both,
        shapes=((4096, 8192), (8192, 4096)),
        rows=16384,
        masters=jnp.bfloat16,
    ),
}

APART = {
    "fsdp4": Layers(
        {"fsdp": 4},
        FSDP,
        {"AllGather": 6, "ReduceScatter": 3},
        {3 * WEIGHT // 4},
        ends={"AllGather": 1, "ReduceScatter": 1},
    ),
    "dp4": Layers(
        {"dp": 4}, DP, {"AllReduce": 3}, {3 * WEIGHT // 2}, ends={"AllReduce": 1}
    ),
}


def check(layers: Layers, mesh: Mesh) -> None:
    schedule = layers.compiled(mesh).schedule()
    table = str(schedule)
    large = [c for c in schedule.communications if c.bytes >= LARGE]
    bodies = dict.fromkeys(c.computation for c in large if c.computation)
    passes = dict(zip(bodies, ["forward", "backward"][-len(bodies) :], strict=True))
    inside = [c for c in large if c.computation]
    assert Counter(c.kind for c in inside) == layers.moved, table
    assert all(c.asynchronous and (c.matmuls or c.others) for c in inside), table
    alone = Counter((passes[c.computation], c.kind) for c in inside if not c.matmuls)
    assert alone == layers.alone, table
    ends = Counter(c.kind for c in large if not (c.computation or c.matmuls))
    assert ends == layers.ends, table
    assert {c.bytes for c in inside} == layers.bytes, table


@pytest.mark.parametrize("layers", TOGETHER.values(), ids=TOGETHER)
def test_in_no_body_does_a_large_transfer_stand_alone(
    h200s: MakeH200s, layers: Layers
) -> None:
    count = int(np.prod([*layers.axes.values()]))
    devices = h200s({"all": 4}).devices[:count].reshape(tuple(layers.axes.values()))
    check(layers, Mesh(devices, tuple(layers.axes)))


@pytest.mark.parametrize("layers", APART.values(), ids=APART)
def test_nor_between_processes(two_processes: MakeH200s, layers: Layers) -> None:
    check(layers, two_processes(layers.axes))
