"""The processes of the PyTorch arms: started once for a mesh, fed with cases.

A job that takes too long ends them, and the arms' records say so; nothing waits for a
process that hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jax.sharding import Mesh, NamedSharding

from benchmarks.case import Case
from benchmarks.layers import Model
from benchmarks.operands import set_count
from benchmarks.timing import Effort

_ROOT = Path(__file__).parents[1]

# NVLink multicast stays off, whatever the environment says: see `torch_worker`.
_NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


class PoolError(Exception):
    """The processes failed, hang, or did not start; the text says which."""


class Pool:
    """One process a device, with `variables` in its environment."""

    def __init__(
        self,
        devices: int,
        device: str = "cuda",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.devices = devices
        self.versions: dict[str, Any] = {}
        self._broken: str | None = None
        self._ready = False
        self._log: IO[str] = tempfile.TemporaryFile("w+")
        port = str(_free_port())
        self._processes = [
            _start(rank, devices, port, device, self._log, variables or {})
            for rank in range(devices)
        ]
        self._readers = [_Reader(process) for process in self._processes]

    def ready(self, timeout: float) -> None:
        """Waits until all processes have joined.

        Raises:
            PoolError: they have not.
        """
        if not self._ready:
            self.versions = self._answers(timeout)[0]
            self._ready = True

    def run(self, job: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """What each process answers to a job.

        Raises:
            PoolError: one does not, or has failed.
        """
        self.ready(timeout)
        text = json.dumps(job) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(text)
                process.stdin.flush()
            except OSError as error:
                raise self._break(f"a process has ended: {error}") from error
        return [answer["arms"] for answer in self._answers(timeout)]

    def close(self) -> None:
        """Ends the processes: by asking, then by force."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.close()
        self._log.close()

    def _answers(self, timeout: float) -> list[dict[str, Any]]:
        if self._broken is not None:
            raise PoolError(self._broken)
        end = time.monotonic() + timeout
        answers = [self._answer(reader.lines, end) for reader in self._readers]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise self._break(errors[0])
        return answers

    def _answer(self, lines: queue.Queue[str | None], end: float) -> dict[str, Any]:
        try:
            line = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise self._break("no answer in time") from None
        if line is None:
            raise self._break(f"a process has ended: {self._last_words()}")
        return json.loads(line)

    def _break(self, reason: str) -> PoolError:
        """Ranks that have not heard of another's failure wait for it: end them all."""
        self._broken = reason
        for process in self._processes:
            process.kill()
        return PoolError(reason)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1][:300] if lines else "no message"


def _start(
    rank: int,
    size: int,
    port: str,
    device: str,
    log: IO[str],
    variables: Mapping[str, str],
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "benchmarks.torch_worker",
            str(rank),
            str(size),
            port,
            device,
        ],
        cwd=_ROOT,
        env=os.environ | variables | _NO_MULTICAST,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )


class _Reader:
    """The lines of a process, read by a thread: a queue can be waited for in time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._output = process.stdout
        self.lines: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._output:
            self.lines.put(line)
        self.lines.put(None)  # the end of its output

    def close(self) -> None:
        """Of a process that has ended."""
        self._thread.join()
        self._output.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def reason_without() -> str | None:
    """Why there can be no pool here, if so."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    return None


def job(case: Case, mesh: Mesh, arms: Sequence[str], effort: Effort) -> dict[str, Any]:
    """What the processes are told of a case: one device's shapes."""
    gathered = [shape for kind, shape in case.moved(False) if kind == "gather"]
    return {
        "layer": case.layer.__name__,
        "model": model(case.model),
        "operands": [
            [NamedSharding(mesh, o.spec).shard_shape(o.shape), o.scale]
            for o in case.operands
        ],
        "gathered": gathered[0] if gathered else None,
        "sets": set_count(case.operands, mesh),
        "backward": False,
        "profiled": False,
        **how_often(arms, effort),
    }


def how_often(arms: Sequence[str], effort: Effort) -> dict[str, Any]:
    """The part of a job that says who takes turns, and how many calls they make."""
    return {
        "arms": list(arms),
        "warmups": effort.warmups,
        "blocks": effort.blocks,
        "calls": effort.calls * effort.instances,
        "lead_in": effort.lead_in * effort.instances,
    }


def model(sizes: Model) -> dict[str, Any]:
    """The sizes of a layer, as the processes want them."""
    queries = sizes.queries if sizes.kv_heads else 0
    return dataclasses.asdict(sizes) | {"queries": queries}


def slowest(answers: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of each arm: a block's time is that of its slowest process."""
    return {arm: _slowest([answer[arm] for answer in answers]) for arm in answers[0]}


def _slowest(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failed = [rank for rank in ranks if "error" in rank]
    if failed:
        return {"error": failed[0]["error"]}
    blocks_ms = [
        max(times) for times in zip(*(r["blocks_ms"] for r in ranks), strict=True)
    ]
    host_us = [max(times) for times in zip(*(r["host_us"] for r in ranks), strict=True)]
    rest = {
        name: _joined(name, [rank[name] for rank in ranks])
        for name in ranks[0]
        if name not in ("blocks_ms", "host_us")
    }
    return rest | {
        "blocks_ms": blocks_ms,
        "min_ms": min(blocks_ms),
        "median_ms": statistics.median(blocks_ms),
        "host_us": min(host_us),
    }


def _joined(name: str, values: Sequence[Any]) -> Any:
    """The largest, and of shares of the time the mean, where there are any."""
    if name != "without_computation":
        return max(values)
    return None if None in values else statistics.fmean(values)
