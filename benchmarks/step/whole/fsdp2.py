"""PyTorch's FSDP2 on the same step, in processes of its own."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import torch_pool
from benchmarks.runner import Entry
from benchmarks.step.whole.sizes import Case
from benchmarks.timing import Deadline, Effort
from benchmarks.torch_pool import Pool, PoolError

NAME = "fsdp2"

MOST_SECONDS = 240.0
"""For one case: compiling its blocks takes most of them."""


def measured(
    cases: Sequence[Case],
    effort: Effort,
    limit: float | None,
    variables: Mapping[str, str],
) -> Iterator[tuple[Case, Entry]]:
    """Times of each case, or why there are none."""
    deadline = Deadline(limit)
    pool: Pool | None = None
    try:
        for case in cases:
            if reason := _reason(case):
                yield case, {"skipped": reason}
            elif deadline.left() <= 0:
                yield case, {"skipped": "no time left"}
            else:
                pool = pool or Pool(case.devices, variables=variables)
                yield case, _measured(pool, case, effort, deadline)
    finally:
        if pool is not None:
            pool.close()


def _reason(case: Case) -> str | None:
    """Why it cannot train a case, if so."""
    if [axis for axis, size in case.axes if size > 1] != ["fsdp"]:
        return "shards weights over fsdp alone"
    if shutil.which("nvidia-smi") is None:
        return "needs GPUs"
    return torch_pool.reason_without()


def _measured(pool: Pool, case: Case, effort: Effort, deadline: Deadline) -> Entry:
    try:
        seconds = min(MOST_SECONDS, deadline.left())
        answers = pool.run(job(case, effort), seconds)
    except PoolError as error:
        return {"error": f"PyTorch: {error}"}
    entry = torch_pool.slowest(answers)[NAME]
    if "min_ms" in entry:
        entry["tokens_per_s"] = 1e3 * case.tokens / entry["min_ms"]
    return entry | {"versions": pool.versions}


def job(case: Case, effort: Effort) -> dict[str, Any]:
    """What the processes are told: layers are written out, if need be checkpoints."""
    return {
        "whole": {
            "vocabulary": case.vocabulary,
            "layers": case.layers,
            "checkpoint": case.checkpoints,
            "sequences": case.sequences // case.devices,
        },
        "model": dataclasses.asdict(case.model),
        "operands": [],
        "sets": 1,
        "backward": False,
        "profiled": False,
        **torch_pool.how_often([NAME], effort),
    }
