"""One process of the PyTorch arms: a device, a rank, jobs over pipes.

    python -m benchmarks.torch_worker RANK SIZE PORT cuda|cpu

Reads one JSON line a job from standard input, and answers each with one line.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO, TypeAlias

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

from benchmarks import torch_layers, torch_profile, torch_step, torch_whole

Job: TypeAlias = dict[str, Any]
Device: TypeAlias = Any  # torch.device; type checkers need not have PyTorch
Tensor: TypeAlias = Any


def main() -> None:
    """Joins the group, says so, and works until there are no more jobs."""
    rank, size, port, device = sys.argv[1:]
    answers = _answers()
    try:
        _join(int(rank), int(size), int(port), device)
    except Exception as error:
        _say(answers, {"error": _text(error)})
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None
    _say(answers, {"torch": torch.__version__, "nccl": nccl})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            _say(answers, {"arms": _run(job, torch.device(device))})
        except Exception as error:
            _say(answers, {"error": _text(error)})
    dist.destroy_process_group()


def _answers() -> TextIO:
    """The pipe that standard output was; what libraries print goes elsewhere."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _join(rank: int, size: int, port: int, device: str) -> None:
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        device_id=torch.device(device, rank) if cuda else None,
    )
    dist.all_reduce(torch.ones(1, device=device))


def _run(job: Job, device: Device) -> dict[str, Any]:
    """The figures of each arm, by this rank's clock."""
    sets = [_operands(job, device) for _ in range(job["sets"])]
    found: dict[str, Any] = {}
    calls: dict[str, Callable[[int], Any]] = {}
    for arm in job["arms"]:
        try:
            calls[arm] = _call(arm, job, sets, device)
            found[arm] = _first(calls[arm], device)
            if "whole" in job:
                found[arm]["losses"] = [float(calls[arm](0)[0]) for _ in range(4)]
        except Exception as error:
            calls.pop(arm, None)
            found[arm] = {"error": _text(error)}
    for arm, blocks_ms, host_us in _blocks(calls, job, device):
        found[arm].setdefault("blocks_ms", []).append(blocks_ms)
        found[arm].setdefault("host_us", []).append(host_us)
    if {"torch_async", "torch_nccl"} <= calls.keys():
        pair = calls["torch_async"](0), calls["torch_nccl"](0)
        found["torch_async"]["error_versus_nccl"] = _relative_error(*pair)
        del pair
    if job["profiled"] and device.type == "cuda":
        for arm, call in calls.items():
            found[arm]["without_computation"] = _share(call)
    del calls, sets
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _operands(job: Job, device: Device) -> list[Tensor]:
    made = [
        (torch.randn(shape, device=device) * scale).to(torch.bfloat16)
        for shape, scale in job["operands"]
    ]
    return [each.requires_grad_(job["backward"]) for each in made]


def _call(
    arm: str, job: Job, sets: list[list[Tensor]], device: Device
) -> Callable[[int], Any]:
    if "whole" in job:
        return torch_whole.step(job["model"], job["whole"], device)
    if arm == "torch_compute":
        shape = job["gathered"]
        placed = None if shape is None else _placed(shape, device)
        comm = torch_layers.InPlace(placed, job["layer"] in ("layer", "gelu_layer"))
    elif arm == "torch_async":
        comm = _symmetric(device)
    else:
        comm = torch_layers.Collectives()
    if "step" in job:
        function = torch_step.step(comm, job["model"], job["step"])
    else:
        layer = torch_layers.LAYERS[job["layer"]]
        function = functools.partial(layer, comm, job["model"])
    return lambda number: function(sets[number % len(sets)])


def _placed(shape: list[int], device: Device) -> Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


def _symmetric(device: Device) -> torch_layers.AsyncTensorParallel:
    """The fused operations; refused where they could use NVLink multicast.

    A shared host's GPUs can be lost for others by a program that ends in the middle
    of it.
    """
    if device.type != "cuda":
        raise NotImplementedError("symmetric memory needs GPUs")
    symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
    memory = symmetric._SymmetricMemory
    kind = symmetric.DeviceType.CUDA
    if memory.has_multicast_support(kind, torch.cuda.current_device()):
        raise RuntimeError("PyTorch sees multicast, which has to be off")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # older versions need it
        symmetric.enable_symm_mem_for_group(dist.group.WORLD.group_name)
    return torch_layers.AsyncTensorParallel()


def _first(call: Callable[[int], Any], device: Device) -> dict[str, Any]:
    """The first call's time, and its memory: in all, and that of temporaries."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    result = call(0)
    _synchronize(device)
    figures: dict[str, Any] = {"first_call_s": time.perf_counter() - start}
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        given = sum(each.nbytes for each in _leaves(result))
        figures |= {"allocated_bytes": peak, "temp_bytes": peak - before - given}
    return figures


def _share(call: Callable[[int], Any]) -> float | None:
    """Of the time in which nothing computes; None where the profiler fails."""
    try:
        return torch_profile.without_computation(call)
    except Exception as error:
        warnings.warn(f"no profile: {_text(error)}", stacklevel=1)
        return None


def _blocks(
    calls: dict[str, Callable[[int], Any]], job: Job, device: Device
) -> Iterator[tuple[str, float, float]]:
    """Blocks of the arms in turns: milliseconds and host microseconds a call."""
    for call in calls.values():
        for number in range(job["warmups"]):
            call(number)
    count = job["calls"]
    for _ in range(job["blocks"]):
        for arm, call in calls.items():
            for number in range(job["lead_in"]):
                call(number)
            _synchronize(device)
            dist.barrier()
            _synchronize(device)
            start = time.perf_counter()
            for number in range(count):
                call(number)
            issued = time.perf_counter()
            _synchronize(device)
            end = time.perf_counter()
            yield arm, 1e3 * (end - start) / count, 1e6 * (issued - start) / count


def _synchronize(device: Device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _leaves(result: Tensor | list[Tensor]) -> list[Tensor]:
    return result if isinstance(result, list) else [result]


def _relative_error(result: Any, reference: Any) -> float:
    """The largest of all results."""
    pairs = zip(_leaves(result), _leaves(reference), strict=True)
    return max(
        float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs
    )


if __name__ == "__main__":
    main()
