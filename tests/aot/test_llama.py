"""The training step of `examples/llama.py`, compiled for four H200s without one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

import jhost
from tests.aot.on_h200 import QUICKLY, MakeH200s, exposed_in_bodies
from tests.llama_step import step_of

for needed in ("optax", "orbax.checkpoint", "tqdm"):
    pytest.importorskip(needed)

# A model of 8B, but for its vocabulary and eight of its layers.
WIDTHS: dict[str, Any] = dict(
    layers=24, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=32000
)
BATCHES: dict[str, Any] = dict(sequence=2048, batch=8, microbatches=2)
MOST = 1.05
"""The temporary memory of the step, as a share of plain JAX's."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax and orbax
def test_a_step_takes_no_more_memory_and_its_layers_never_wait(
    h200s: MakeH200s,
) -> None:
    mesh = h200s({"dp": 1, "fsdp": 2, "tp": 2})
    memory: list[int] = []
    schedules: list[jhost.Schedule] = []
    for jit in (jax.jit, functools.partial(jhost.jit, mesh=mesh)):
        step, arguments = step_of(jit, mesh, **WIDTHS, **BATCHES)
        with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
            compiled = step.lower(*arguments).compile(compiler_options=dict(QUICKLY))
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        if isinstance(compiled, jhost.Compiled):
            schedules.append(compiled.schedule())
    plain, hosted = memory
    assert hosted <= MOST * plain, f"{hosted / 1e6:.0f} MB against {plain / 1e6:.0f}"
    (schedule,) = schedules
    layers = {c.computation for c in schedule.communications if c.computation}
    exposed = exposed_in_bodies(schedule, 1 << 20)
    # All in the microbatch around the layers, where the lookup and the head are.
    waiting = {each.rpartition(" in ")[2] for each in exposed}
    assert (len(layers), len(waiting)) == (3, 1), str(schedule)
