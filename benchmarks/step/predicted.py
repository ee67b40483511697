"""What the cost model predicts of training steps on H200s that need not be there."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import jax
from jax.sharding import AbstractMesh, AxisType

from benchmarks import report
from benchmarks.axes import Axes, along_tp
from benchmarks.layers import MODELS
from benchmarks.step.arms import hosted
from benchmarks.step.programs import LAYERS, Step
from jhost._call import program
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.cost.simulate import predict
from jhost.runtime.devices import Devices
from jhost.testing import programs

KIND, SEQUENCES = "NVIDIA H200", 4
CASES = (("8b", "scan"), ("8b", "written"), ("70b", "scan"))
HEAD = ("step", "GPUs", "without chunks, ms", "jhost, ms", "speedup", "forward alone")


def table() -> str:
    """A row a case, on two GPUs and on four, of both passes."""
    with as_with_cudnn():
        return report.table(HEAD, map(_row, _steps()))


def _steps() -> Iterator[Step]:
    for model, form in CASES:
        sizes = dataclasses.replace(MODELS[model], attention="cudnn")
        for devices in (2, 4):
            yield Step(sizes, form, LAYERS[form], SEQUENCES, along_tp(devices))


def _row(step: Step) -> list[str]:
    both, forward = (
        [_milliseconds(step, how, backward) for how in ("off", "auto")]
        for backward in (True, False)
    )
    return [
        f"{step.model.name}, {step.layers} layers {_FORMS[step.form]}",
        str(step.axes.devices),
        *(f"{each:.1f}" for each in both),
        *(f"{off / chosen:.2f}" for off, chosen in (both, forward)),
    ]


_FORMS = {"scan": "in a scan", "written": "written out"}


def _milliseconds(step: Step, how: str, backward: bool) -> float:
    return milliseconds(
        lambda mesh: hosted(how)(step, mesh, backward), step.axes, step.types()
    )


def milliseconds(
    make: Callable[[Any], Any], axes: Axes, types: Sequence[jax.ShapeDtypeStruct]
) -> float:
    """What a call of the function that `make` gives for a mesh takes."""
    sizes = tuple(size for _, size in axes.sizes)
    mesh = AbstractMesh(sizes, axes.names, (AxisType.Auto,) * len(sizes))
    there = Devices(platform="gpu", kind=KIND, count=axes.devices, processes=1)
    rates = rates_of(KIND)
    assert rates is not None
    with mock.patch.object(program, "devices_of", return_value=there):
        made = programs(make(mesh), *types)
    return 1e3 * sum(predict(each, rates).total for each in made)


@contextmanager
def as_with_cudnn() -> Generator[None]:
    """JAX takes this machine for one with a GPU that cuDNN has kernels for.

    By name: what it calls to ask has no public name.
    """
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    answers = {
        "check_cudnn_version": 91300,
        "check_compute_capability": True,
        "is_cuda_compute_capability_equal": False,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(
                mock.patch.object(cudnn, name, lambda *_, answer=answer: answer)
            )
        yield
