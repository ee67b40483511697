"""The streams that XLA puts communications on, read back from what is compiled."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s


@pytest.mark.skipif(
    importlib.util.find_spec("jax.experimental.thunky") is None,
    reason="JAX tells from 0.12 on",
)
def test_all_permutes_of_a_block_are_on_one_stream(h200s: MakeH200s) -> None:
    specs = P("tp"), P(None, "tp"), P("tp")
    f = jhost.jit(
        lambda x, up, down: jhost.stream(x @ up @ down, axis=0),
        mesh=h200s({"tp": 4}),
        in_shardings=specs,
        out_shardings=P("tp"),
        pipeline="p2p",
    )
    shapes = (8192, 4096), (4096, 14336), (14336, 4096)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    schedule = f.lower(*types).compile().schedule()
    assert len(schedule.communications) == 6
    assert [each.stream for each in schedule.communications] == [0] * 6
    assert schedule.streams == (0,)
