"""PyTorch's training step computes what JAX's does; skipped without PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(ROOT))

from benchmarks import torch_pool  # noqa: E402
from benchmarks.axes import along_tp  # noqa: E402
from benchmarks.operands import random_set  # noqa: E402
from benchmarks.step.arms import plain  # noqa: E402
from benchmarks.step.programs import Step, sized  # noqa: E402
from benchmarks.step.torch_arms import Task, add  # noqa: E402
from benchmarks.timing import CODE_PATH  # noqa: E402

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)

# One process: its parts of the operands come in a file, and its results go into one.
# The fused operations do there one after the other what they do at once on GPUs.
WORKER = """
import json, sys
import numpy as np, torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from benchmarks import torch_layers, torch_step
folder, rank, port, job = *sys.argv[1:4], json.loads(sys.argv[4])
rank = int(rank)
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
)
fused = torch.library.Library("symm_mem", "IMPL")
for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
    fused.impl(name, getattr(symmetric, f"_{name}_fallback"), "CPU")
given = np.load(f"{folder}/operands-{rank}.npz")
operands = [torch.tensor(given[name]).requires_grad_() for name in given.files]
for comm in (torch_layers.Collectives(), torch_layers.AsyncTensorParallel()):
    results = torch_step.step(comm, job["model"], job["step"])(operands)
    np.savez(f"{folder}/{type(comm).__name__}-{rank}.npz", *map(np.asarray, results))
dist.destroy_process_group()
"""


def small(form: str) -> Step:
    model = sized("8b", length=2048, on_gpu=False)
    return Step(model, form, layers=2, sequences=2, axes=along_tp(2))


@needs_torch
@pytest.mark.parametrize("form", ["written", "written-checkpoint"])
def test_gradients_are_those_of_jax(form: str, tmp_path: Path) -> None:
    step = small(form)
    mesh = step.axes.mesh()
    given = [x.astype(np.float32) for x in random_set(step.operands, mesh, seed=0)]
    with jax.numpy_dtype_promotion("standard"):  # as JAX's own attention needs it
        loss, gradients = plain(step, mesh, True)(*given)
    for rank in range(2):
        mine = [np.asarray(x.addressable_shards[rank].data) for x in given]
        np.savez(tmp_path / f"operands-{rank}.npz", *mine)
    run(tmp_path, Task(step, True, CODE_PATH, profiled=False))
    for name in ("Collectives", "AsyncTensorParallel"):
        for rank in range(2):
            found = np.load(tmp_path / f"{name}-{rank}.npz")
            wanted = [loss, *gradients]
            for key, whole in zip(found.files, wanted, strict=True):
                part = np.asarray(whole.addressable_shards[rank].data)
                scale = np.max(np.abs(part))
                np.testing.assert_allclose(found[key], part, atol=1e-4 * scale)


def run(folder: Path, task: Task) -> None:
    script = folder / "worker.py"
    script.write_text(WORKER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = json.dumps(task.job(["torch_async"]))
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(rank), port, job],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


@needs_torch
def test_the_processes_measure_a_step() -> None:
    """By collectives; what PyTorch fuses needs a GPU."""
    step = small("written")
    pool = torch_pool.Pool(2, "cpu")
    try:
        answers = pool.run(
            Task(step, True, CODE_PATH, True).job(["torch_nccl", "torch_async"]), 300
        )
    finally:
        pool.close()
    entries = torch_pool.slowest(answers)
    record: dict[str, Any] = {"arms": {}, "checks": {}}
    add(record, entries, step)
    assert record["arms"]["torch_nccl"]["tokens_per_s"] > 0
    assert "needs GPUs" in record["arms"]["torch_async"]["error"]
    assert record["checks"] == {}
