"""Cases of the benchmarks, compiled for H200s: what XLA may hoist, and must not."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding

from jhost.runtime.profile.schedule import parse_schedule
from tests.aot.on_h200 import MakeH200s

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks import arms, cases
from benchmarks.axes import along_tp


@pytest.mark.parametrize("arm", ["plain", "xla"])
def test_a_cotangent_is_not_gathered_before_the_result(
    h200s: MakeH200s, arm: str
) -> None:
    (case,) = cases.select(cases.all_cases(along_tp(4), small=False), ["mlp/8b/8192"])
    mesh = h200s({"tp": 4})
    (built,) = arms.ARMS[arm](case, mesh, True)
    types = [
        jax.ShapeDtypeStruct(o.shape, jax.numpy.bfloat16).update(
            sharding=NamedSharding(mesh, o.spec)
        )
        for o in built.operands
    ]
    schedule = parse_schedule(
        jax.jit(built.instance).lower(*types).compile().as_text() or ""
    )
    kinds = [communication.kind for communication in schedule.communications]
    assert kinds == ["AllGather", "ReduceScatter"] * 2, schedule
