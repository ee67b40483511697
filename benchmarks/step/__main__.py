"""Runs the benchmark of a training step: every form, every arm, one JSON file.

    python -m benchmarks.step [--mesh tp=2] [--models 8b] [--forms written,scan]

`--mesh dp=2,tp=2 --processes 2` starts two processes, of two devices each.  Over dp
weights are copied, over fsdp each device has a shard of them.

`python -m benchmarks.pages` makes a section of docs/benchmarks.md from such files.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks import axes, environment, launch, timing
from benchmarks.layers import MODELS
from benchmarks.run_file import Run, new_run, separated
from benchmarks.runner import Plan
from benchmarks.step import page, records
from benchmarks.step.arms import ARMS
from benchmarks.step.measure import measure
from benchmarks.step.programs import LAYERS, Step, sized, steps
from benchmarks.step.torch_arms import TORCH, Task, add
from benchmarks.torch_arms import TorchArms
from jhost._progress import Progress

_MODULE = "benchmarks.step"

PASSES = {"forward": (False,), "backward": (True,), "both": (True, False)}

FULL = timing.Effort(warmups=2, blocks=5, calls=8, lead_in=4, instances=1)
_FORM = "whole: embedding to optimizer; its options: --form whole --help"

QUICK = timing.Effort(warmups=1, blocks=3, calls=5, lead_in=3, instances=1)
CODE_PATH = timing.Effort(
    warmups=1, blocks=2, calls=1, lead_in=1, instances=1, settling_s=0
)
"""Fewer calls than for a layer: one takes tens of milliseconds."""


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the arguments, measures, and prints what came of it."""
    if _form(argv) == "whole":
        # Only where it is asked for: it needs optax.
        from benchmarks.step.whole import command

        return command.main(argv)
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        where = axes.parsed(arguments.mesh, ("dp", axes.FSDP))
        launch.join_or_start(_MODULE, argv, arguments.processes, where.devices)
        on_gpu = jax.default_backend() == "gpu"
        mesh = where.mesh()
        chosen = _steps(arguments, where, on_gpu)
        plan = _plan(arguments, on_gpu)
    except ValueError as error:
        parser.error(str(error))
    if arguments.list:
        print("\n".join(step.name for step in chosen))
        return
    run = new_run(arguments.json, plan, on_gpu, suffix="-step")
    _measure(chosen, PASSES[arguments.passes], mesh, plan, run)
    if jax.process_index() == 0:
        print(page.measured([run.content]))
        print(f"written: {run.path.name}")


def _measure(
    chosen: Sequence[Step], passes: Sequence[bool], mesh: Mesh, plan: Plan, run: Run
) -> None:
    bar = launch.progress_of_all(len(chosen) * len(passes))
    names = [name for name in plan.arms if name in TORCH]
    torch = TorchArms(names, chosen[0].axes, mesh.devices.flat[0].platform)
    try:
        torch.settle()
        run.content["environment"]["torch_processes"] = torch.versions
        for step in chosen:
            for backward in passes:
                _measure_one(step, mesh, backward, plan, torch, run, bar)
    finally:
        torch.close()
        bar.close()
        run.content["clocks_at_end"] = environment.clocks()
        run.write()


def _measure_one(
    step: Step,
    mesh: Mesh,
    backward: bool,
    plan: Plan,
    torch: TorchArms,
    run: Run,
    bar: Progress,
) -> None:
    what = f"{step.name} on {step.axes}{' with gradients' if backward else ''}"

    def measured() -> dict[str, Any]:
        record = measure(step, mesh, backward, plan)
        task = Task(step, backward, plan.effort, plan.profiled)
        add(record, torch.measure(task, plan.deadline), step)
        return record

    run.measure(what, plan, bar, measured, lambda r: f"{what}: {records.line(r)}")


def _steps(arguments: argparse.Namespace, where: axes.Axes, on_gpu: bool) -> list[Step]:
    quick: bool = arguments.quick
    chosen = arguments.models or (["8b"] if quick else MODELS)
    forms = arguments.forms or (["scan"] if quick else LAYERS)
    for option, given, known in (("models", chosen, MODELS), ("forms", forms, LAYERS)):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"--{option}: {unknown[0]!r} is none of {', '.join(known)}"
            )
    models = {name: sized(name, arguments.length, on_gpu) for name in chosen}
    layers = {
        form: arguments.layers or (2 if quick and not on_gpu else LAYERS[form])
        for form in forms
    }
    return steps(models, layers, arguments.sequences, where)


def _plan(arguments: argparse.Namespace, on_gpu: bool) -> Plan:
    known = (*ARMS, *TORCH)
    for pattern in arguments.arms:
        if not fnmatch.filter(known, pattern):
            raise ValueError(f"--arms: {pattern!r} is none of {', '.join(known)}")
    patterns: list[str] = arguments.arms
    return Plan(
        arms=[a for a in known if any(fnmatch.fnmatchcase(a, p) for p in patterns)],
        modes=(),
        effort=CODE_PATH if not on_gpu else QUICK if arguments.quick else FULL,
        deadline=timing.Deadline(arguments.time_limit),
        checked=not arguments.no_checks,
        profiled=not arguments.no_profile,
    )


def _form(argv: Sequence[str] | None) -> str:
    """Which step: of layers alone, or a user's whole one, with options of its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--form", default="layers")
    return parser.parse_known_args(argv)[0].form


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=(__doc__ or "").splitlines()[0],
        epilog="On CPUs every size is a 64th, and no time means anything.",
    )
    names, add = separated(str), parser.add_argument
    add("--form", choices=["layers", "whole"], default="layers", help=_FORM)
    add("--quick", action="store_true", help="fewer calls, and one case by default")
    add("--models", type=names, help="8b, 70b; default: both, quick: 8b")
    add("--forms", type=names, help=f"{', '.join(LAYERS)}; default: all, quick: scan")
    add("--passes", choices=PASSES, default="both")
    add("--mesh", default="tp=4", help="tp=2, dp=2,tp=2 or fsdp=2,tp=1; default: tp=4")
    add("--processes", type=int, default=1, help="that share the mesh; default: 1")
    add("--layers", type=int, help="default: 4 written out, 6 in a scan")
    add("--sequences", type=int, default=4, help="in a step; default: 4")
    add("--length", type=int, default=2048, help="tokens of a sequence; default: 2048")
    add("--arms", type=names, default=["*"], help="names with wildcards: plain,jhost*")
    add("--time-limit", type=float, metavar="SECONDS", help="end in time, cleanly")
    add("--no-checks", action="store_true", help="times only")
    add("--no-profile", action="store_true", help="not when nothing computes")
    add("--json", type=Path, metavar="FILE", help="default: in benchmarks/results")
    add("--list", action="store_true", help="print the names of the cases, and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
