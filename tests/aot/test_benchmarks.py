"""Cases of the benchmarks, compiled for H200s: what XLA may hoist, hide and keep."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

import jhost
from jhost.runtime.compiler_options import overlap_options
from jhost.runtime.profile.schedule import parse_schedule
from tests.aot.on_h200 import QUICKLY, MakeH200s, exposed
from tests.lowering.rules.reference_attention import as_with_cudnn

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import arms, cases
from benchmarks.arms.base import Built
from benchmarks.axes import along_tp
from benchmarks.communication import Streamed


def case_of(name: str, devices: int = 4) -> cases.Case:
    (case,) = cases.select(cases.all_cases(along_tp(devices), small=False), [name])
    return case


def compiled(
    built: Built, mesh: Mesh, options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """One instance; without GPUs it has no options of its own."""
    types = [
        jax.ShapeDtypeStruct(o.shape, jnp.bfloat16).update(
            sharding=NamedSharding(mesh, o.spec)
        )
        for o in built.operands
    ]
    function = jax.jit(built.instance, compiler_options=dict(options or {}))
    return function.lower(*types).compile()


@pytest.mark.parametrize("arm", ["plain", "xla"])
def test_a_cotangent_is_not_gathered_before_the_result(
    h200s: MakeH200s, arm: str
) -> None:
    mesh = h200s({"tp": 4})
    (built,) = arms.ARMS[arm](case_of("mlp/8b/8192"), mesh, True)
    schedule = parse_schedule(compiled(built, mesh).as_text() or "")
    kinds = [communication.kind for communication in schedule.communications]
    assert kinds == ["AllGather", "ReduceScatter"] * 2, schedule


# A layer of GPT-3 has nothing that blocks in `test_overlap.py` have not, both ways.
NVFUSERS = "nvfuser_ag/h8192/8192", "nvfuser_ag/k32768/32768", "nvfuser_ag/k1024/1024"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
@pytest.mark.parametrize("name", NVFUSERS)
def test_both_passes_of_nvfuser_s_own_sizes(h200s: MakeH200s, name: str) -> None:
    mesh = h200s({"tp": 4})
    (built,) = arms.ARMS["jhost_p2p"](case_of(name), mesh, True)
    text = compiled(built, mesh, {**overlap_options(mesh), **QUICKLY}).as_text()
    schedule = parse_schedule(text or "")
    moved = [c for c in schedule.communications if c.kind == "CollectivePermute"]
    assert moved, schedule
    assert all(c.asynchronous for c in moved), schedule


def test_a_ring_by_hand_hides_the_keys_that_go_around(
    h200s: MakeH200s, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its gradients, which go home after the last kernel, two cannot be hidden."""
    as_with_cudnn(monkeypatch)
    mesh = h200s({"tp": 4})
    options = overlap_options(mesh)
    for backward, alone in ((False, set[int]()), (True, {16, 17})):
        (built,) = arms.ARMS["ring"](case_of("ring_attention/8b/32768"), mesh, backward)
        schedule = parse_schedule(compiled(built, mesh, options).as_text() or "")
        assert len(schedule.communications) == (18 if backward else 6), schedule
        assert exposed(schedule, "CollectivePermute") == alone, schedule


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
def test_memory_does_not_grow_with_chunks_of_keys(
    h200s: MakeH200s, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_with_cudnn(monkeypatch)
    mesh, case = h200s({"tp": 4}), case_of("ring_attention/8b/32768")

    def attend(*operands: jax.Array) -> jax.Array:
        return case.run(Streamed(), operands)

    def temporary(chunks: int) -> int:
        function = jhost.jit(
            attend,
            mesh=mesh,
            in_shardings=case.specs,
            out_shardings=case.out_spec,
            pipeline="p2p",
            chunks=chunks,
        )
        built = Built(function, case.operands)
        memory: Any = compiled(built, mesh, overlap_options(mesh)).memory_analysis()
        return memory.temp_size_in_bytes

    # Smaller blocks of keys are more, and one more stands beside those under way.
    assert temporary(8) <= 1.05 * temporary(4)


@pytest.mark.filterwarnings("ignore:.*an outer jax.jit:UserWarning")
@pytest.mark.parametrize("backward", [False, True])
def test_what_a_ring_of_two_finds_is_wide_in_no_memory(
    backward: bool, h200s: MakeH200s, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part waits as narrow as it came; both are added where they are read."""
    as_with_cudnn(monkeypatch)
    mesh, case = h200s({"dp": 2, "tp": 2}), case_of("ring_attention/8b/32768", 2)
    (built,) = arms.ARMS["jhost_p2p"](case, mesh, backward)
    text = compiled(built, mesh, overlap_options(mesh)).as_text() or ""
    entry = text[text.index("ENTRY") :]
    assert "bf16[1,16384,32,128]" in entry
    assert "f32[1,16384," not in entry
