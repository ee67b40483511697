"""Runs the benchmarks: every case, every arm, one JSON file.

    python -m benchmarks [--quick] [--cases PATTERNS] [--arms PATTERNS] [--devices LIST]

`--mesh dp=2,tp=2 --processes 2` starts two processes, of two devices each.

`python -m benchmarks.report` makes docs/benchmarks.md from such files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks import (
    arms,
    axes,
    call_overhead,
    cases,
    checks,
    environment,
    figures,
    launch,
    runner,
    timing,
)
from benchmarks.axes import Axes
from benchmarks.case import Case
from benchmarks.layers import EXPERTS, MODELS
from benchmarks.run_file import Run, new_run, separated
from benchmarks.runner import Mode, Plan
from benchmarks.torch_arms import Block, TorchArms
from jhost._progress import Progress

_MODULE = "benchmarks"

PASSES = {"forward": (False,), "backward": (True,), "both": (False, True)}
CALLS: Mapping[str, Sequence[Mode]] = {
    "one": ("once",),
    "program": ("program",),
    "both": ("program", "once"),
}

# What `--quick` measures where nothing else is asked for: every way of communicating.
QUICK_CASES = ("ag_qkv/8b/8192", "down_ar/8b/8192", "mlp/8b/8192")


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the arguments, measures, and says what came of it."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        given = _mesh_given(arguments)
        if given is not None:
            launch.join_or_start(_MODULE, argv, arguments.processes, given.devices)
        on_gpu = jax.default_backend() == "gpu"
        meshes = [given] if given else _meshes_along_tp(arguments.devices)
        names = arms.select(arguments.arms or arms.DEFAULT)
        chosen = {each: _cases(arguments, each, on_gpu) for each in meshes}
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        print("\n".join(case.name for case in next(iter(chosen.values()))))
        return
    plan = Plan(
        arms=names,
        modes=CALLS[arguments.calls],
        effort=_effort(arguments.quick, on_gpu),
        deadline=timing.Deadline(arguments.time_limit),
        checked=not arguments.no_checks,
    )
    run = new_run(arguments.json, plan, on_gpu)
    run.content["call_overhead"] = None
    passes = PASSES[arguments.passes]
    bar = launch.progress_of_all(sum(map(len, chosen.values())) * len(passes))
    if not arguments.cases and not arguments.quick and given is None:
        run.content["call_overhead"] = _call_overhead()
    try:
        for each, list_ in chosen.items():
            _measure_on(each, list_, passes, plan, run, bar)
    finally:
        bar.close()
        run.content["clocks_at_end"] = environment.clocks()
        run.write()
    if jax.process_index() == 0:
        print(_summary(run.content))
        print(f"written: {run.path.name}")


def _measure_on(
    each: Axes,
    chosen: Sequence[Case],
    passes: Sequence[bool],
    plan: Plan,
    run: Run,
    bar: Progress,
) -> None:
    """All cases on a mesh of these axes."""
    mesh = each.mesh()
    names = [name for name in plan.arms if name in arms.TORCH]
    torch = TorchArms(names, each, mesh.devices.flat[0].platform)
    try:
        torch.settle()
        run.content["environment"]["torch_processes"] = torch.versions
        for case in chosen:
            for backward in passes:
                _measure_one(case, mesh, backward, plan, torch, run, bar)
    finally:
        torch.close()


def _measure_one(
    case: Case,
    mesh: Mesh,
    backward: bool,
    plan: Plan,
    torch: TorchArms,
    run: Run,
    bar: Progress,
) -> None:
    what = f"{case.name} on {case.axes}{' with gradients' if backward else ''}"

    def measured() -> dict[str, Any]:
        record = runner.measure(case, mesh, backward, plan)
        block = Block(case, mesh, backward, plan.effort)
        entries = torch.measure(block, plan.deadline)
        for mode in plan.modes:
            record["modes"][mode] |= entries
        runner.add_figures(record)
        return record

    run.measure(what, plan, bar, measured, line)


def line(record: dict[str, Any]) -> str:
    """A record as lines of text, one for each way of calling."""
    texts: list[str] = []
    mesh = ",".join(f"{axis}={size}" for axis, size in record["mesh"].items())
    for mode, entries in record["modes"].items():
        times = figures.minima(entries)
        shown = " ".join(f"{arm} {time:.3f}" for arm, time in times.items())
        own = record["figures"][mode].get("jhost", {})
        if mode == "program":
            own = own | {
                f"predicted_{arm}": ms
                for arm, ms in record.get("predicted", {}).items()
            }
        ratios = " ".join(f"{name} {value:.2f}" for name, value in own.items())
        texts.append(
            f"{record['case']} on {mesh} {record['pass']} {mode}: {shown} | {ratios}"
        )
        texts += [
            f"  {arm}: {entry['error']}"
            for arm, entry in entries.items()
            if "error" in entry
        ]
    texts += [
        f"  {arm}: WRONG {found}"
        for arm, found in record["checks"].items()
        if not checks.passed(found)
    ]
    return "\n".join(texts)


def _summary(content: dict[str, Any]) -> str:
    lines = [f"{len(content['measurements'])} measurements"]
    for mode in ("program", "once"):
        speedups = [
            record["figures"][mode]["jhost"]["speedup"]
            for record in content["measurements"]
            if "speedup" in record["figures"].get(mode, {}).get("jhost", {})
        ]
        mean = figures.geometric_mean(speedups)
        if mean is not None:
            lines.append(
                f"{mode}: speedup of jhost over plain, geometric mean: {mean:.3f}"
            )
    if content["not_measured"]:
        lines.append(f"no time for: {', '.join(content['not_measured'])}")
    return "\n".join(lines)


def _call_overhead() -> list[dict[str, Any]]:
    return [call_overhead.measure(each, 20, 50) for each in call_overhead.cases()]


def _effort(quick: bool, on_gpu: bool) -> timing.Effort:
    if not quick:
        return timing.FULL
    return timing.QUICK if on_gpu else timing.CODE_PATH


def _mesh_given(arguments: argparse.Namespace) -> Axes | None:
    if arguments.mesh is None:
        if arguments.processes > 1:
            raise ValueError("--processes: with --mesh, as --mesh dp=2,tp=2")
        return None
    if arguments.devices:
        raise ValueError("--devices: without --mesh, which says how many there are")
    return axes.parsed(arguments.mesh)


def _meshes_along_tp(wanted: Sequence[int] | None) -> list[Axes]:
    return [axes.along_tp(count) for count in _device_counts(wanted)]


def _device_counts(wanted: Sequence[int] | None) -> list[int]:
    there = jax.device_count()
    if there < 2:
        raise ValueError(
            "there is one device; two are needed (JAX_NUM_CPU_DEVICES=4 makes four of "
            "any CPU)"
        )
    if not wanted:
        return [count for count in (4, 2) if count <= there]
    wrong = [count for count in wanted if not 2 <= count <= there]
    if wrong:
        raise ValueError(f"--devices: {wrong[0]} of {there} devices cannot be used")
    return list(wanted)


def _cases(arguments: argparse.Namespace, given: Axes, on_gpu: bool) -> list[Case]:
    known = (*MODELS, *EXPERTS)
    unknown = [name for name in arguments.models or () if name not in known]
    if unknown:
        raise ValueError(f"no model is named {unknown[0]!r}; there are 8b, 70b")
    patterns = arguments.cases or (QUICK_CASES if arguments.quick else ["*"])
    listed = cases.all_cases(
        given,
        small=not on_gpu,
        models=arguments.models or known,
        tokens=arguments.tokens,
        peers_own=not (arguments.models or arguments.tokens),
    )
    return cases.select(listed, patterns)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    names, numbers = separated(str), separated(int)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer calls, and a few cases by default")
    add("--cases", type=names, help="names or starts of names, as mlp,ag_up/*/8192")
    add("--arms", type=names, help="names with wildcards, as plain,compute,jhost*")
    add("--devices", type=numbers, help="how many, as 4,2")
    add("--mesh", help="tp=4, or rows over dp as well: dp=2,tp=2")
    add("--processes", type=int, default=1, help="that share the mesh; default: 1")
    add("--models", type=names, help="8b, 70b, 8x7b, dsv2")
    add("--tokens", type=numbers, help="8192, 4096, 2048")
    add("--passes", choices=PASSES, default="both")
    add("--calls", choices=CALLS, default="both")
    add("--time-limit", type=float, metavar="SECONDS", help="end in time, cleanly")
    add("--no-checks", action="store_true", help="times only")
    add("--json", type=Path, metavar="FILE", help="default: in benchmarks/results")
    add("--list", action="store_true", help="print the names of the cases, and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
