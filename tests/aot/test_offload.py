"""XLA compiles for GPUs what `jax.checkpoint` offloads to the host's memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jhost
from tests.aot.on_h200 import (
    QUICKLY,
    MakeH200s,
    compile_both_ways,
    exposed_in_bodies,
)

OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)
ROWS, COLUMNS = 8192, 14336


def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    hidden = checkpoint_name(x @ up, "hidden")
    return jhost.stream(jax.nn.gelu(hidden) @ down, 0)


Place = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a jhost function with `jax.checkpoint` in it or around it."""


def around(hosted: Place) -> Callable[..., Any]:
    return jax.checkpoint(hosted(block), policy=OFFLOAD)


def inside(hosted: Place) -> Callable[..., Any]:
    return hosted(jax.checkpoint(block, policy=OFFLOAD))


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
@pytest.mark.parametrize(
    ("place", "pipeline"), [(around, "p2p"), (inside, "collective"), (inside, "off")]
)
def test_each_device_copies_its_own_part_and_back(
    h200s: MakeH200s, place: Callable[[Place], Callable[..., Any]], pipeline: Any
) -> None:
    mesh = h200s({"tp": 4})
    ins, out = (P("tp"), P(None, "tp"), P("tp")), P("tp")

    def hosted(fun: Callable[..., Any]) -> Callable[..., Any]:
        shardings: dict[str, Any] = {"in_shardings": ins, "out_shardings": out}
        return jhost.jit(fun, mesh=mesh, pipeline=pipeline, **shardings)

    shapes = ((ROWS, 4096), (4096, COLUMNS), (COLUMNS, 4096))
    *_, text = compile_both_ways(place(hosted), mesh, shapes, ins, out)
    # Both copies are of a device's own columns, and nothing else is done on the host.
    here = f"bf16[{ROWS},{COLUMNS // 4}]{{1,0}}"
    there = here.replace("}", ":S(5)}")
    copies = re.findall(r"= \((\S+), (\S+), u32\[\]\) copy-start\(", text)
    assert sorted(copies) == sorted([(there, here), (here, there)])
    made = re.findall(r"= \S+:S\(5\)\} ([\w-]+)\(", text)
    assert set(made) <= {"copy-done", "get-tuple-element"}


def test_layers_that_offload_their_inputs_have_their_weights_beside_work(
    h200s: MakeH200s,
) -> None:
    """And the stack of inputs is in the host's memory alone."""

    def layer(x: jax.Array, weights: Any) -> Any:
        first, up, down = weights
        x = checkpoint_name(x, "hidden")
        return x + jax.nn.gelu(jax.nn.gelu(x @ first) @ up) @ down, None

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(jax.checkpoint(layer, policy=OFFLOAD), x, weights)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    layers, rows, width = 4, 32768, 4096
    shapes = (width, width), (width, 2 * width), (2 * width, width)
    weights = [jax.ShapeDtypeStruct((layers, *s), jnp.bfloat16) for s in shapes]
    specs = [P(None, "fsdp")] * 3
    step: Any = jhost.jit(
        jax.grad(loss),
        mesh=h200s({"fsdp": 4}),
        in_shardings=(specs, P("fsdp")),
        out_shardings=specs,
        pipeline="p2p",
        streams="marked",
    )
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    compiled = step.lower(weights, x).compile(dict(QUICKLY))
    assert not exposed_in_bodies(compiled.schedule()), str(compiled.schedule())
    inputs = layers * rows // 4 * width * 2
    assert compiled.memory_analysis().host_temp_size_in_bytes == inputs
