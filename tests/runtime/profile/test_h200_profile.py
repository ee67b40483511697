"""What a profile of H200s has in it: one of the four, three calls of a p2p MLP block.

The events are those of jax 0.11.2 on four H200s (8192 tokens of Llama-3 8B): the line,
the kernel, `hlo_op`, `name`, and the start and duration in nanoseconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jhost.runtime.profile.hlo_text import parse_module
from jhost.runtime.profile.origins import Operations
from jhost.runtime.profile.overlap import device_overlap
from jhost.runtime.profile.timeline import Timeline, timeline
from jhost.runtime.profile.trace import read_trace
from tests.runtime.profile.profiles import Ran, profile

EVENTS = json.loads(Path(__file__).with_name("h200_mlp_p2p.json").read_text())

# XLA shows an asynchronous permute by the name of its start.
MODULE = """HloModule jit_mlp, is_scheduled=true, num_partitions=4

ENTRY %main (x: bf16[8,16]) -> bf16[8,16] {
  %x = bf16[8,16]{1,0} parameter(0)
  %start = bf16[8,16] collective-permute-start(%x), metadata={op_name="NAME/ppermute"}
  ROOT %done = bf16[8,16]{1,0} collective-permute-done(%start)
}
"""


def recorded() -> Timeline:
    lines: dict[str, list[Ran]] = {}
    for line, kernel, operation, op_name, start, time in EVENTS:
        stats = {"hlo_op": operation, "name": op_name, "hlo_module": "jit_mlp"}
        ran = Ran(kernel, start / 1e3, (start + time) / 1e3, stats)
        lines.setdefault(line, []).append(ran)
    module = parse_module(MODULE.replace("NAME", "jit(mlp)/shard_map"))
    return timeline(
        read_trace(profile({"/device:GPU:0": lines})),
        Operations(module),
        calls=3,
        name="mlp",
        module="jit_mlp",
        statements=(),
    )


def test_calls_are_told_apart() -> None:
    found = recorded()
    assert len(found.spans) == 23
    assert [round(1e6 * time) for time in found.calls] == [1750, 905, 879]
    assert found.streams(0) == ("queue 50", "queue 174")


def test_copies_between_gpus_communicate_and_all_else_computes() -> None:
    for span in recorded().spans:
        copies = span.kernel == "MemcpyP2P"
        assert (span.activity == "communication") == copies
        assert (span.stream == "queue 174") == copies


def test_sums_are_those_of_a_clock_that_ticks_in_nanoseconds() -> None:
    found = recorded()
    busy = {kind: np.zeros(10**6, bool) for kind in ("communication", "computation")}
    for span in found.spans:
        busy[span.activity][round(span.start * 1e9) : round(span.end * 1e9)] = True
    moving, computing = busy["communication"], busy["computation"]
    overlap = device_overlap(found, 0)
    for seconds, ticks in (
        (overlap.communication, moving.sum()),
        (overlap.computation, computing.sum()),
        (overlap.hidden, (moving & computing).sum()),
        (overlap.exposed, (moving & ~computing).sum()),
    ):
        assert seconds * 1e9 == pytest.approx(ticks, abs=1)
    # The three that gather are exposed but for a part, the three that send are hidden.
    assert overlap.efficiency == pytest.approx(0.55, abs=0.01)
