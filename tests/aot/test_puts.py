"""Puts and peer copies on four H200s: one schedule, whichever way permutes go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jhost
from jhost.runtime.accepted_options import accepted
from jhost.runtime.compiler_options import PERMUTE_MODE, PUTS
from tests.aot.on_h200 import MakeH200s

COPIES = {PERMUTE_MODE: "COLLECTIVES_PEER_MEMORY"}
TYPES = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for shape in ((2048, 4096), (4096, 14336), (14336, 4096))
]
SPECS = P("tp"), P(None, "tp"), P("tp")


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jhost.stream(jax.nn.relu(x @ up) @ down, axis=0)


def compiled(mesh: Mesh, options: Mapping[str, Any]) -> jhost.Compiled:
    f = jhost.jit(
        mlp,
        mesh=mesh,
        in_shardings=SPECS,
        out_shardings=P("tp"),
        pipeline="p2p",
        compiler_options=options,
    )
    return f.lower(*TYPES).compile()


def modes(found: jhost.Compiled) -> set[str]:
    """How the permutes of an executable go."""
    starts = re.findall(r"collective-permute-start\(.*", found.as_text() or "")
    assert starts
    return {re.findall(r'"collectives_mode":"(\w+)"', start)[0] for start in starts}


def test_puts_are_issued_and_overlap_as_peer_copies_do(h200s: MakeH200s) -> None:
    """A parameter that is sent is copied to where NCCL puts from; nothing else differs.

    Nothing is chosen unasked for devices that are not there: their NCCL is not known.
    """
    mesh = h200s({"tp": 4})
    if not accepted(mesh, PUTS):
        pytest.skip("this XLA has no puts")
    copied, put = (compiled(mesh, options) for options in (COPIES, PUTS))
    assert (modes(copied), modes(put)) == (set(COPIES.values()), set(PUTS.values()))
    schedules = copied.schedule(), put.schedule()
    assert schedules[0].communications == schedules[1].communications
    assert all(c.asynchronous and c.matmuls for c in schedules[1].communications)
    counts = [len(schedule.matmuls) for schedule in schedules]
    assert counts == [8, 8]
    assert modes(compiled(mesh, {})) == set(COPIES.values())
