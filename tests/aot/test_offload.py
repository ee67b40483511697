"""XLA compiles for GPUs what `jax.checkpoint` offloads to the host's memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s, compile_both_ways

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
