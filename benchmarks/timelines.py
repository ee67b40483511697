"""Pictures of a layer before and after jhost: what each stream ran, to one scale.

    python -m benchmarks.timelines --case mlp/8b/8192 --out docs/overlap.svg

One panel a pipeline, `off` for the program without chunks; the first device alone, as
all do the same.  Prints each report, and may save Perfetto traces beside the picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jhost
from benchmarks.axes import along_tp
from benchmarks.case import Case
from benchmarks.cases import all_cases, select
from benchmarks.communication import AXIS, Streamed
from benchmarks.operands import random_set
from jhost.runtime.profile.picture import save_picture

TITLES = {"off": "without chunks", "auto": "jhost"}


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


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    devices = jax.devices()[: options.devices]
    mesh = Mesh(np.array(devices), (AXIS,), axis_types=(AxisType.Auto,))
    axes = along_tp(len(devices))
    (case,) = select(all_cases(axes, small=options.small), [options.case])
    reports: dict[str, jhost.OverlapReport] = {}
    for pipeline in options.pipelines.split(","):
        reports[pipeline] = profiled(case, mesh, pipeline)
        print(f"{pipeline}: {reports[pipeline]}\n")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Draws a layer before and after.")
    parser.add_argument("--case", default="mlp/8b/8192", help="a name of the list")
    parser.add_argument("--pipelines", default="off,auto", help="a panel each")
    parser.add_argument("--devices", type=int, help="on the first N; by default all")
    parser.add_argument("--out", type=Path, required=True, help="a .png or .svg file")
    parser.add_argument("--traces", action="store_true", help="save traces as well")
    parser.add_argument("--small", action="store_true", help="a 64th, for a CPU")
    return parser


if __name__ == "__main__":
    main()
