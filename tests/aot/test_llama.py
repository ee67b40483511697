"""The whole training step of `examples/llama.py`, compiled for four H200s without one."""

from __future__ import annotations

import functools
import runpy
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from tests.aot.on_h200 import MakeH200s

for needed in ("optax", "orbax.checkpoint", "tqdm"):
    pytest.importorskip(needed)

# A model of 8B, but for its vocabulary and eight layers.
WIDTHS: dict[str, Any] = dict(
    layers=24, width=4096, heads=32, kv_heads=8, hidden=14336, vocab=32000
)
BATCHES: dict[str, Any] = dict(sequence=2048, batch=8, microbatches=2)
MOST = 1.05
"""The temporary memory of the step, as a share of plain JAX's."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax and orbax
@pytest.mark.parametrize("axes", [{"dp": 1, "fsdp": 2, "tp": 2}], ids=str)
def test_a_step_takes_no_more_memory(h200s: MakeH200s, axes: dict[str, int]) -> None:
    llama = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "llama.py"))
    mesh = h200s(axes)
    sizes = ",".join(f"{name}={size}" for name, size in axes.items())
    config = llama["Config"](mesh=sizes, **WIDTHS, **BATCHES)
    specs = llama["specs_of"](config)
    state = jax.eval_shape(functools.partial(llama["first_state"], config))
    rows = config.batch // config.microbatches
    tokens = (config.microbatches, rows, config.sequence + 1)
    batch = jax.ShapeDtypeStruct(tokens, np.int32)
    memory: list[int] = []
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        for jit in (jax.jit, functools.partial(jhost.jit, mesh=mesh)):
            step: Any = jit(
                functools.partial(llama["train_step"], config),
                in_shardings=(specs, llama["MICROBATCHES"]),
                out_shardings=(specs, P()),
                donate_argnums=0,
            )
            compiled = step.lower(state, batch).compile()
            memory.append(compiled.memory_analysis().temp_size_in_bytes)
    plain, hosted = memory
    assert hosted <= MOST * plain, f"{hosted / 1e6:.0f} MB against {plain / 1e6:.0f}"
