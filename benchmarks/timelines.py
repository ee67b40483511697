"""Pictures of a layer, or of a step, before and after jhost: what each queue ran.

    python -m benchmarks.timelines --case mlp/8b/8192 --out docs/overlap.svg
    python -m benchmarks.timelines --step 8b/scan --mesh tp=2 --out step.svg

All panels have one scale.  There is one for each pipeline (`off` is the program without
chunks), or for each arm of a step.  They show the first device alone, because all do
the same.  The command prints each report, and may save Perfetto traces beside the
picture.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import jhost
from benchmarks import axes
from benchmarks.axes import Axes
from benchmarks.case import Case
from benchmarks.cases import all_cases, select
from benchmarks.communication import Streamed
from benchmarks.operands import random_set
from benchmarks.step.arms import ARMS
from benchmarks.step.measure import recorded
from benchmarks.step.programs import LAYERS, Step, sized, steps
from jhost.runtime.profile.picture import save_picture
from jhost.runtime.profile.report import overlap_report

TITLES = {"off": "without chunks", "auto": "jhost", "plain": "one collective each"}


def profiled(case: Case, mesh: Mesh, pipeline: Any) -> jhost.OverlapReport:
    """The report of a layer with that pipeline."""

    def layer(*operands: jax.Array) -> jax.Array:
        return case.run(Streamed(), operands)

    layer.__name__ = case.kind
    function = jhost.jit(
        layer,
        mesh=mesh,
        in_shardings=case.specs,
        out_shardings=case.out_spec,
        pipeline=pipeline,
    )
    return jhost.profile(function, *random_set(case.operands, mesh, seed=0))


def profiled_step(step: Step, mesh: Mesh, arm: str) -> jhost.OverlapReport:
    """The report of a step, with its gradients, by that arm."""
    given = random_set(step.operands, mesh, seed=0)
    function = ARMS[arm](step, mesh, True)
    if arm.startswith("jhost"):
        return dataclasses.replace(jhost.profile(function, *given), name=step.name)
    compiled = function.lower(*step.types()).compile()

    def call() -> Any:
        return compiled(*given)

    jax.block_until_ready([call(), call()])  # the first runs are not like the others
    return overlap_report(
        recorded(compiled, call, step.name),
        mesh=str(step.axes),
        device_kind=mesh.devices.flat[0].device_kind,
        prediction=None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        found = _axes(options)
        mesh = found.mesh()
        panels = _panels(options, found, mesh)
    except ValueError as error:
        parser.error(str(error))
    reports: dict[str, jhost.OverlapReport] = {}
    for name, report in panels.items():
        reports[name] = report()
        print(f"{name}: {reports[name]}\n")
    save_picture(
        [
            (f"{TITLES.get(name, name)}: {report.title}", report.timeline.only([0]))
            for name, report in reports.items()
        ],
        options.out,
    )
    if options.traces:
        for name, report in reports.items():
            report.save(options.out.with_name(f"{options.out.stem}-{name}.json"))


def _axes(options: argparse.Namespace) -> Axes:
    if options.mesh:
        return axes.parsed(options.mesh)
    return axes.along_tp(options.devices or jax.device_count())


def _panels(
    options: argparse.Namespace, found: Axes, mesh: Mesh
) -> Mapping[str, Callable[[], jhost.OverlapReport]]:
    """What makes the report of each panel."""
    if not options.step:
        (case,) = select(all_cases(found, small=options.small), [options.case])
        names = options.pipelines.split(",")
        return {name: lambda name=name: profiled(case, mesh, name) for name in names}
    step, arms = _step(options, found), options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        raise ValueError(f"--arms: {min(unknown)!r} is none of {', '.join(ARMS)}")
    return {arm: lambda arm=arm: profiled_step(step, mesh, arm) for arm in arms}


def _step(options: argparse.Namespace, found: Axes) -> Step:
    model, _, form = options.step.partition("/")
    if form not in LAYERS:
        raise ValueError(f"--step: model/form, a form of {', '.join(LAYERS)}")
    size = sized(model, 2048, on_gpu=not options.small)
    count = options.layers or LAYERS[form]
    (step,) = steps({model: size}, {form: count}, sequences=4, axes=found)
    return step


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Draws a layer, or a step, before and after."
    )
    parser.add_argument("--case", default="mlp/8b/8192", help="a name of the list")
    parser.add_argument("--pipelines", default="off,auto", help="a panel each")
    parser.add_argument("--step", help="instead of a case: model/form, as 8b/scan")
    parser.add_argument("--arms", default="plain,jhost", help="of a step, a panel each")
    parser.add_argument("--layers", type=int, help="of a step; default: as it has")
    parser.add_argument("--devices", type=int, help="on the first N; by default all")
    parser.add_argument("--mesh", help="instead: tp=2 or dp=2,tp=2")
    parser.add_argument("--out", type=Path, required=True, help="a .png or .svg file")
    parser.add_argument("--traces", action="store_true", help="save traces as well")
    parser.add_argument("--small", action="store_true", help="a 64th, for a CPU")
    return parser


if __name__ == "__main__":
    main()
