"""What `python -m benchmarks.step --form whole` does: every case, one JSON file."""

from __future__ import annotations

import argparse
import ast
import fnmatch
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import environment, launch, timing
from benchmarks.run_file import Run, new_run, separated
from benchmarks.runner import Plan
from benchmarks.step import records
from benchmarks.step.whole import fsdp2, link, page, sizes
from benchmarks.step.whole.arms import ARMS
from benchmarks.step.whole.measure import measure
from benchmarks.step.whole.sizes import Case
from jhost._progress import Progress

_MODULE = "benchmarks.step"

_BEFORE = "JHOST_BENCHMARK_BEFORE"
"""A variable with JSON: the measurements from before the processes started."""

_GRACE_S = 60.0
"""How long processes may take behind the time limit, for what they were at."""

_SLOW_LINK = {"NCCL_P2P_DISABLE": "1"}
"""NCCL then goes through the host's memory, as slowly as between hosts."""

_GATHERED, _GATHERED_ON_CPUS = 256_000_000, 1_024_000
"""Bytes, that any number of devices up to 8 divides."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the arguments, measures, and prints what came of it."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        cases = _cases(arguments)
        if arguments.list:
            print("\n".join(f"{case.name} on {case.mesh_name}" for case in cases))
            return
        before = _joined_or_started(arguments, argv, cases)
        on_gpu = jax.default_backend() == "gpu"
        cases = [case.with_cudnn() for case in cases] if on_gpu else cases
        meshes = [case.mesh() for case in cases]
    except ValueError as error:
        parser.error(str(error))
    plan = _plan(arguments, on_gpu, before["seconds"])
    run = new_run(arguments.json, plan, on_gpu, suffix=page.SUFFIX)
    size = _GATHERED if on_gpu else _GATHERED_ON_CPUS
    run.content["slow_link"] = arguments.slow_link
    run.content["xla"] = xla = dict(arguments.xla)
    run.content["link"] = link.gathered(cases[0].devices, size)
    bar = launch.progress_of_all(len(cases))
    try:
        for case, mesh in zip(cases, meshes, strict=True):
            peers = before["fsdp2"].get(_key(case), {})
            record_of = functools.partial(
                measure, case, mesh, plan, arguments.trace, xla
            )
            _measure_one(case, record_of, plan, peers, run, bar)
    finally:
        bar.close()
        run.content["clocks_at_end"] = environment.clocks()
        run.write()
    if jax.process_index() == 0:
        print(page.measured([run.content]))
        print(f"written: {run.path.name}")


def _key(case: Case) -> str:
    return f"{case.name} on {case.mesh_name}"


def _measure_one(
    case: Case,
    record_of: Callable[[], Any],
    plan: Plan,
    peers: Mapping[str, Any],
    run: Run,
    bar: Progress,
) -> None:
    what = _key(case)

    def measured() -> dict[str, Any]:
        record = record_of()
        record["arms"] |= peers
        return record

    run.measure(what, plan, bar, measured, lambda r: f"{what}: {records.line(r)}")


def _joined_or_started(
    arguments: argparse.Namespace, argv: Sequence[str] | None, cases: Sequence[Case]
) -> dict[str, Any]:
    """The measurements from before, once this is one of the processes.

    PyTorch's processes come first: JAX, once it has started, holds the GPUs' memory.
    """
    if launch.join():
        return json.loads(os.environ[_BEFORE])
    if arguments.slow_link and arguments.processes == 1:
        raise ValueError("--slow-link: within a process copies do not go through NCCL")
    start, found = time.monotonic(), dict[str, Any]()
    link = _SLOW_LINK if arguments.slow_link else {}
    if fsdp2.NAME in _arms(arguments):
        effort = _effort(arguments, on_gpu=True)
        limit: float | None = arguments.time_limit
        for case, entry in fsdp2.measured(cases, effort, limit, link):
            found[_key(case)] = {fsdp2.NAME: entry}
            print(f"{_key(case)}: {fsdp2.NAME} {entry}", file=sys.stderr)
    before = {"fsdp2": found, "seconds": time.monotonic() - start}
    if arguments.processes == 1:
        return before
    given = sys.argv[1:] if argv is None else argv
    if "whole" not in given:
        given = ["--form", "whole", *given]
    variables = {_BEFORE: json.dumps(before), **link}
    devices = cases[0].devices
    count, seconds = arguments.processes, _most_seconds(arguments)
    sys.exit(launch.start(_MODULE, given, count, devices, variables, seconds))


def _most_seconds(arguments: argparse.Namespace) -> float | None:
    """When processes are ended that have not ended in time by themselves.

    They look at the time between two arms; one that hangs in a collective never does.
    """
    limit: float | None = arguments.time_limit
    return None if limit is None else limit + _GRACE_S


# --- Arguments ---------------------------------------------------------------------- #


def _cases(arguments: argparse.Namespace) -> list[Case]:
    _arms(arguments)
    found = sizes.cases_of(
        arguments.models,
        arguments.loops,
        arguments.layers,
        arguments.sequences,
        arguments.cast,
        arguments.mesh,
    )
    if len({case.devices for case in found}) > 1:
        raise ValueError("--mesh: all meshes of a run have as many devices")
    return found


def _arms(arguments: argparse.Namespace) -> list[str]:
    known = (*ARMS, fsdp2.NAME)
    for pattern in arguments.arms:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"--arms: {pattern!r} is none of {', '.join(known)}")
    patterns: list[str] = arguments.arms
    return [a for a in known if any(fnmatch.fnmatchcase(a, p) for p in patterns)]


def _option(text: str) -> tuple[str, Any]:
    """An option of XLA, as in `xla_gpu_autotune_level=0`."""
    name, given, value = text.partition("=")
    if not given:
        raise ValueError(text)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _effort(arguments: argparse.Namespace, *, on_gpu: bool) -> timing.Effort:
    if not on_gpu:
        return timing.Effort(1, 2, 1, lead_in=1, instances=1, settling_s=0)
    return timing.Effort(
        warmups=2,
        blocks=arguments.blocks,
        calls=arguments.steps,
        lead_in=arguments.lead_in,
        instances=1,
    )


def _plan(arguments: argparse.Namespace, on_gpu: bool, spent_s: float) -> Plan:
    limit: float | None = arguments.time_limit
    return Plan(
        arms=_arms(arguments),
        modes=(),
        effort=_effort(arguments, on_gpu=on_gpu),
        deadline=timing.Deadline(None if limit is None else limit - spent_s),
        checked=True,
        profiled=arguments.profile,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step --form whole",
        description=(__doc__ or "").splitlines()[0],
        epilog="On CPUs no time means anything; take --models tiny there.",
    )
    names, numbers, add = separated(str), separated(int), parser.add_argument
    add("--form", choices=["whole"], default="whole", help="what this is about")
    add("--models", type=names, default=["13b"], help="tiny, 8b, 13b, 70b; default 13b")
    add("--loops", type=names, default=["scan-checkpoint"], help=", ".join(sizes.LOOPS))
    add("--cast", type=names, default=["layer"], help="of masters: layer, before")
    add("--mesh", nargs="+", default=["tp=2"], help="tp=2 fsdp=2; default: tp=2")
    add("--processes", type=int, default=1, help="that share the mesh; default: 1")
    add("--slow-link", action="store_true", help="through the host's memory")
    add("--layers", type=numbers, default=[4], help="4,8; default: 4")
    add("--sequences", type=numbers, default=[4], help="in a step; default: 4")
    add("--xla", type=separated(_option), default=[], help="options for all arms: a=1")
    add("--arms", type=names, default=["*"], help="names with wildcards; default: all")
    add("--blocks", type=int, default=5, help="of each arm, in turns; default: 5")
    add("--steps", type=int, default=8, help="in a block; default: 8")
    add("--lead-in", type=int, default=4, help="untimed steps before it; default: 4")
    add("--time-limit", type=float, metavar="SECONDS", help="end in time, cleanly")
    add("--profile", action="store_true", help="also the share when nothing computes")
    add("--trace", type=Path, metavar="FOLDER", help="of two steps of each arm")
    add("--json", type=Path, metavar="FILE", help="default: in benchmarks/results")
    add("--list", action="store_true", help="print the names of the cases, and end")
    return parser
