"""PyTorch's arms of a step, and what their processes are told of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import torch_pool
from benchmarks.runner import Entry
from benchmarks.step.measure import ERROR_AT_MOST
from benchmarks.step.programs import Step
from benchmarks.timing import Effort

TORCH = ("torch_async", "torch_nccl")


@dataclasses.dataclass(frozen=True)
class Task:
    """A step, written out: PyTorch has no loop over layers that is one operation."""

    step: Step
    backward: bool
    effort: Effort
    profiled: bool

    def reason(self, arm: str) -> str | None:
        if self.step.axes.shards:
            return "has no shards of weights"
        return "has no scan" if self.step.scans else None

    def job(self, arms: Sequence[str]) -> dict[str, Any]:
        step = self.step
        return {
            "step": {
                "layers": step.layers,
                "checkpoint": step.checkpoints,
                "backward": self.backward,
            },
            "model": torch_pool.model(step.model),
            "operands": [
                [step.axes.part(o.shape, o.spec), o.scale] for o in step.operands
            ],
            "sets": 1,
            "backward": self.backward,
            "profiled": self.profiled,
            **torch_pool.how_often(arms, self.effort),
        }


def add(record: Entry, entries: dict[str, Entry], step: Step) -> None:
    """Puts what PyTorch's arms gave beside that of the others.

    Their operands are their own, so they are compared with one another: what the fused
    operations return with what the collectives do.
    """
    for entry in entries.values():
        if "min_ms" in entry:
            entry["tokens_per_s"] = step.tokens_per_s(entry["min_ms"])
    record["arms"] |= entries
    error = entries.get("torch_async", {}).get("error_versus_nccl")
    if error is not None:
        found = {"error": error, "right": error <= ERROR_AT_MOST}
        record["checks"]["torch_async"] = found
