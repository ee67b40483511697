"""`python -m jhost doctor`: what jhost finds here, and what to do about problems."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
from typing import Any

import jax
from jax.sharding import Mesh

from jhost import errors
from jhost._cache_folder import folder
from jhost._calibration_holds import age_text, calibration_here, outdated, rates_here
from jhost._commands.block import MlpBlock, block_on, devices_here, hosted, plain
from jhost._commands.findings import JAX, Report
from jhost._commands.links import examine_links, examine_mesh, examine_options
from jhost._commands.modules import NotThereError, made
from jhost._compare import beyond_tolerance
from jhost._packages import installed
from jhost._version import __version__
from jhost.lowering.ir.statements import CommunicationKind
from jhost.runtime.devices import Devices, all_devices, devices_of
from jhost.runtime.launch import one_gpu_each
from jhost.runtime.nccl import nccl_version, why_no_puts
from jhost.runtime.problem import Problem

_PACKAGES = (
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "numpy",
    "chex",
    "tqdm",
    "matplotlib",
    "flax",
)


def add_command(commands: Any) -> None:
    """Adds `doctor` to the commands of `python -m jhost`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="say what jhost finds on this machine, and what to do about problems",
        description="Looks at versions, devices, the links between them, the options "
        "that this XLA takes, and which pipelines work. Exits with 1 if something is "
        "wrong.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument(
        "--mesh",
        metavar="MODULE:NAME",
        help="a jax.sharding.Mesh, or a function that makes one; the command then says "
        "which of its axes lie across processes",
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        mesh = arguments.mesh and _mesh(arguments.mesh)
    except NotThereError as error:
        parser.error(str(error))
    report = examined()
    if mesh:
        examine_mesh(report, mesh)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report), indent=2, default=str))
    else:
        print(report)
    return 1 if report.problems else 0


def _mesh(name: str) -> Mesh:
    """The mesh of that name; its module may start the processes of a job."""
    found = made(name)
    if not isinstance(found, Mesh):
        raise NotThereError(f"{name} is no jax.sharding.Mesh, but {found!r}")
    return found


def examined() -> Report:
    """Everything that can be said of this machine, in the order of dependence."""
    report = Report()
    _versions(report)
    devices = _devices(report)
    if devices is None:
        return report
    mesh = all_devices()
    here = devices_of(mesh)
    _launch(report)
    examine_links(report, devices, here)
    examine_options(report, mesh)
    _pipelines(report, devices, here)
    _rates(report, here)
    _cache(report)
    return report


# --- Versions and devices ------------------------------------------------------- #


def _versions(report: Report) -> None:
    facts: dict[str, Any] = {
        "jhost": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
    }
    report.facts["versions"] = facts | installed(_PACKAGES)
    low, high = (".".join(map(str, version)) for version in JAX)
    if not JAX[0] <= jax.__version_info__[:2] < JAX[1]:
        report.problems.append(
            Problem(
                f"jhost works with JAX from {low} to below {high}, and this is "
                f"{jax.__version__}",
                f"pip install 'jax>={low},<{high}'",
            )
        )


def _devices(report: Report) -> list[Any] | None:
    try:
        devices = devices_here(None)
    except RuntimeError as error:
        report.problems.append(
            Problem(
                f"JAX finds no devices: {error}",
                "see whether JAX_PLATFORMS names a backend that is installed; "
                "JAX_PLATFORMS=cpu works everywhere",
            )
        )
        return None
    first = devices[0]
    report.facts["devices"] = {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
    }
    if first.platform == "cpu":
        _on_cpu(report)
    if len(devices) == 1:
        report.notes.append(
            "there is one device: nothing is communicated, and nothing can overlap"
        )
    return devices


def _on_cpu(report: Report) -> None:
    """GPUs that JAX does not use are a problem, unless the user wants it so."""
    if shutil.which("nvidia-smi") is None or os.environ.get("JAX_PLATFORMS"):
        report.notes.append(
            "devices of one CPU share its cores: jhost works there, for tests, and "
            "nothing overlaps"
        )
        return
    report.problems.append(
        Problem(
            "this machine has an NVIDIA driver, but JAX runs on the CPU",
            "pip install 'jax[cuda13]', and see that nvidia-smi lists the GPUs",
        )
    )


def _launch(report: Report) -> None:
    """How the processes of a job were started, where this is one of them."""
    if slow := one_gpu_each(os.environ):
        report.problems.append(slow)


# --- Pipelines ------------------------------------------------------------------ #


def _pipelines(report: Report, devices: list[Any], here: Devices) -> None:
    """Try whether a small block is right by each pipeline."""
    # Any number of devices divides it, and it compiles in seconds.
    block = block_on(
        devices, hidden=64, ffn=16 * len(devices), tokens=64 * len(devices)
    )
    facts = {name: _tried(block, name) for name in ("collective", "p2p")}
    report.facts["pipelines"] = dict(facts)
    for name, outcome in facts.items():
        if outcome != "works":
            report.problems.append(
                Problem(
                    f"the {name} pipeline fails on these devices: {outcome}",
                    "report it, with the output of `python -m jhost doctor --json`",
                )
            )
    report.facts["pipelines"]["auto"] = _auto(here)
    if here.platform == "gpu" and here.count > 1:
        report.facts["pipelines"]["puts"] = _puts(all_devices())
    if here.platform == "gpu" and not here.copied and here.count > 1:
        report.notes.append(
            "the GPUs belong to several processes: permutes are kernels, not copies by "
            "a copy engine. One process for each host, with all its GPUs, overlaps more"
        )


def _tried(block: MlpBlock, pipeline: str) -> str:
    operands = block.random_arguments()
    try:
        given = hosted(block, pipeline=pipeline)(*operands)
        problems = beyond_tolerance(given, plain(block)(*operands))
    # A driver or a library that does not work is what this looks for: it goes on.
    except (errors.JhostError, jax.errors.JaxRuntimeError) as error:
        return errors.first_line(error)
    return "; ".join(problems) or "works"


def _auto(here: Devices) -> str:
    """What `pipeline="auto"` does on such devices."""
    rates = rates_here(here)
    if here.count == 1:
        return "pipelines nothing: there is one device"
    if rates is None:
        return "pipelines nothing: these devices are not known; calibrate or tune"
    kinds: dict[str, CommunicationKind] = {
        "p2p": "CollectivePermute",
        "collective": "AllGather",
    }
    beside = [
        name
        for name, kind in kinds.items()
        # Along one axis copies may run beside work, and along another, between
        # processes, they do not.
        if any(rates.link(kind, [axis]).beside_compute for axis in here.reach)
    ]
    if not beside:
        return "pipelines nothing: no transfer runs beside computation here"
    how = ", if 10 % is gained" if rates.estimated else ""
    return f"chooses by prediction{how}; {' and '.join(beside)} can overlap"


def _puts(mesh: Mesh) -> str:
    """Whether permutes can be one-sided, so that no thread of the host waits."""
    why_not = why_no_puts(mesh)
    return f"none: {why_not}" if why_not else f"by NCCL {nccl_version()}"


def _rates(report: Report, here: Devices) -> None:
    """Which rates predictions go by, and what a calibration would do."""
    rates, calibration = rates_here(here), calibration_here(here)
    source = rates.source if rates else "none: nothing was measured on such devices"
    age = f", {age_text(calibration.date)}" if calibration else ""
    report.facts["rates"] = {"matmuls and links": source + age}
    if here.platform != "gpu":
        return
    report.notes += [f"a calibration does not hold, {why}" for why in outdated(here)]
    # Rates that jhost ships were measured on such devices, and will do.
    if calibration is None and (rates is None or rates.estimated):
        report.notes.append(
            "`python -m jhost calibrate` measures these devices in one to two minutes, "
            "and predictions then use what it measured"
        )


# --- Files ---------------------------------------------------------------------- #


def _cache(report: Report) -> None:
    where = folder()
    there = where
    # The first tuning makes the folder.  Until then the one above it counts.
    while not there.exists():
        there = there.parent
    kept = len(list(where.glob("tuning-*/*.json")))
    report.facts["cache"] = {"folder": str(where), "tunings": kept}
    if not os.access(there, os.W_OK):
        report.problems.append(
            Problem(
                f"{where} cannot be written, so jhost.tune measures every time",
                "set JHOST_CACHE_DIR to a folder that can",
            )
        )
