"""A user's whole training step: what stands beside nothing, and the memory it takes.

Embedding, layers in a scan with `jax.checkpoint`, the vocabulary's loss, clipping and
AdamW, with float32 masters that are cast in the layer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh

import jhost

pytest.importorskip("optax")  # of the step; it comes with test-ecosystem

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.layers import Model
from benchmarks.step.whole import arms
from benchmarks.step.whole.model import first_state
from benchmarks.step.whole.sizes import Case
from tests.aot.on_h200 import MakeH200s

MODEL = Model(
    "small", hidden=2048, ffn=6144, heads=16, kv_heads=8, head=128, sequence=512
)
VOCABULARY, LAYERS, SEQUENCES = 16_000, 4, 32
LARGE = 1 << 20
"""Bytes of a transfer that is worth hiding."""
MOST = 1.05
"""The temporary memory of a step, as a share of plain JAX's."""


def case_of(axes: Mapping[str, int]) -> Case:
    return Case(
        MODEL, VOCABULARY, "scan-checkpoint", LAYERS, SEQUENCES, tuple(axes.items())
    )


def types_of(case: Case) -> tuple[Any, jax.ShapeDtypeStruct]:
    tokens = (case.sequences, case.model.sequence + 1)
    state = jax.eval_shape(functools.partial(first_state, case))
    return state, jax.ShapeDtypeStruct(tokens, jnp.int32)


def compiled(case: Case, mesh: Mesh) -> jhost.Compiled:
    # As by name: what a prediction would leave alone is not what is tested.
    return arms.hosted("p2p")(case, mesh).lower(*types_of(case)).compile()


def memory_of(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.fixture
def apart(two_processes: MakeH200s) -> Callable[[Mapping[str, int]], Mesh]:
    """Makes a mesh of two H200s, each of a process of its own."""

    def make(axes: Mapping[str, int]) -> Mesh:
        four = two_processes({"all": 4})
        devices = four.devices[::2].reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    return make


def check(axes: Mapping[str, int], mesh: Mesh) -> None:
    """A step has its large transfers beside work, and takes no more memory."""
    case = case_of(axes)
    step = compiled(case, mesh)
    schedule = step.schedule()
    large = [c for c in schedule.communications if c.bytes >= LARGE]
    assert all(c.matmuls for c in large if c.computation), str(schedule)
    # The lookup and its gradient, and the first layer's first weights.
    alone = [n for n, c in enumerate(large) if not c.matmuls]
    assert set(alone) <= {0, 1, len(large) - 1}, str(schedule)
    assert all(c.asynchronous and c.others for c in large), str(schedule)
    plain = arms.jitted(case, mesh).lower(*types_of(case)).compile()
    assert memory_of(step) <= MOST * memory_of(plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax
def test_a_step_between_processes_never_waits_and_takes_no_more_memory(
    apart: Callable[[Mapping[str, int]], Mesh],
) -> None:
    with jax.numpy_dtype_promotion("standard"):
        check({"fsdp": 2}, apart({"fsdp": 2}))
