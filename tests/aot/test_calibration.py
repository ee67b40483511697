"""What `jhost.calibrate` measures, as XLA compiles it for H200s."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jhost._calibrate.chains import (
    AXIS,
    OperationChain,
    behind_matmul,
    beside,
    chained,
    communicate,
    compiled,
    multiply,
    touch,
)
from jhost.lowering.ir.statements import CommunicationKind
from tests.aot.on_h200 import MakeH200s

COUNT = 4
SQUARE = jax.ShapeDtypeStruct((2 * 1024, 1024), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((2 << 20,), jnp.bfloat16)
SMALL = jax.ShapeDtypeStruct((2 * 8, 128), jnp.float32)

KERNELS = (
    "fusion|custom-call|copy|all-gather|reduce-scatter|all-reduce|"
    "collective-permute(?:-start|-done)?"
)


def ran(h200s: MakeH200s, chain: OperationChain, types: Sequence[object]) -> list[str]:
    """What the devices do, in order, behind the first matmul."""
    four = h200s({"of": 4})
    mesh = Mesh(np.array(four.devices)[:2], (AXIS,))
    call = compiled(mesh, behind_matmul(chain, COUNT), [SQUARE, *types])  # pyright: ignore[reportArgumentType]
    text: str = call.func.as_text()  # pyright: ignore
    entry = text[text.index("\nENTRY") :]
    return re.findall(rf" ({KERNELS})\(", entry)[1:]


@pytest.mark.parametrize(
    ("other", "types"), [(touch, [SMALL]), (multiply, [SQUARE, SQUARE])]
)
def test_a_permute_runs_on_a_stream_as_in_loops(
    other: OperationChain, types: Sequence[object], h200s: MakeH200s
) -> None:
    """One whose chain had nothing beside it was a kernel, and hid a tenth of itself."""
    chain = beside(communicate("CollectivePermute", 2), other)
    each = ["collective-permute-start", "fusion", "collective-permute-done"]
    assert ran(h200s, chain, [ROW, *types]) == COUNT * each


@pytest.mark.parametrize("kind", ["AllGather", "ReduceScatter"])
def test_a_collective_alone_counts(kind: CommunicationKind, h200s: MakeH200s) -> None:
    """The operand is copied once, so that one element can be written behind each."""
    name = {"AllGather": "all-gather", "ReduceScatter": "reduce-scatter"}[kind]
    assert ran(h200s, chained(communicate(kind, 2)), [ROW]) == [
        "copy",
        *COUNT * [name, "fusion"],
    ]
