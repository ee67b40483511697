"""Makes tables of docs/when-it-pays.md, peers.md and benchmarks.md; nothing is run.

    python -m benchmarks.pages

The first are what the cost model predicts, and chooses by, on four H200s; the others
are taken from benchmarks/results: the last, of whole training steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import jhost
from benchmarks import cases, figures, layers, report
from benchmarks.axes import along_tp
from benchmarks.communication import AXIS, Streamed
from benchmarks.step import page as steps, predicted as step_predictions
from jhost._call import program
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.cost.simulate import predict
from jhost.lowering.ir.remarks import Prediction
from jhost.runtime.devices import Devices
from jhost.testing import programs

DOCS = Path(__file__).parents[1] / "docs"
KIND, DEVICES = "NVIDIA H200", 4
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
LAYERS = {
    "ag_qkv": "gather, QKV",
    "ag_gate_up": "gather, gate and up",
    "out_rs": "out, reduce-scatter",
    "down_rs": "down, reduce-scatter",
    "down_ar": "down, all-reduce",
    "swiglu_mlp": "whole MLP",
}

PEERS = {
    "torch_async": "AsyncTP",
    "pallas": "Pallas",
    "xla_windowed": "windowed einsum",
    "recipe": "JAX's recipe",
}
ARMS = {
    "jhost": "jhost",
    **PEERS,
    "plain": "plain JAX",
    "compute": "matmuls alone",
}
GROUPS = tuple((n, of) for of in report.PASSES for n in (DEVICES, 2))


@dataclasses.dataclass(frozen=True)
class Gain:
    """The predictions for one case, without chunks and as jhost chooses."""

    plain: Prediction
    chosen: Prediction

    @property
    def ceiling(self) -> float:
        """What hiding the shorter of computation and communication would give."""
        parts = self.plain.compute, self.plain.communication
        return sum(parts) / max(parts)

    @property
    def speedup(self) -> float:
        return self.plain.total / self.chosen.total

    def __str__(self) -> str:
        return f"{self.speedup:.2f} of {self.ceiling:.2f}"


def gain(case: cases.Case, backward: bool = False) -> Gain:
    """The predictions for `case`, if its devices were H200s.

    They are of its forward, or also of the backward for all operands.
    """

    def layer(*operands: Any) -> Any:
        return case.run(Streamed(), operands)

    f = jhost.jit(
        layer,
        mesh=AbstractMesh((case.axes.tp,), (AXIS,)),
        in_shardings=case.specs,
        out_shardings=case.out_spec,
    )
    there = Devices(platform="gpu", kind=KIND, count=case.axes.devices, processes=1)
    rates = rates_of(KIND)
    assert rates

    def prediction(f: Any) -> Prediction:
        every = tuple(range(len(case.operands)))
        both = jax.grad(lambda *args: jnp.sum(f(*args)), every)
        made = programs(both if backward else f, *case.abstract())
        return sum((predict(each, rates) for each in made), Prediction())

    with mock.patch.object(program, "devices_of", return_value=there):
        return Gain(prediction(f.with_options(pipeline="off")), prediction(f))


def predicted() -> str:
    """A table a model: a row a layer, a column a number of tokens; and two of others.

    These are of nvFuser's own sizes, and of training steps.
    """
    models = [f"### Llama-3 {m.upper()}\n\n{_gains(m)}" for m in layers.MODELS]
    others = [f"{_NVFUSER}\n\n{_own()}", f"{_STEPS}\n\n{step_predictions.table()}"]
    return "\n\n".join([*models, *others])


_NVFUSER = (
    "### nvFuser's own sizes\n\nThey are those of its benchmarks and tests: a layer of "
    "GPT-3, and linear layers with gathered rows (`ag`) or an all-reduced result "
    "(`ar`). A name ends with the number of rows."
)


def _own() -> str:
    """A row a case of nvFuser's, of its forward and of both passes."""
    known = cases.all_cases(along_tp(DEVICES), small=False, models=[])
    rows = (
        [case.name, str(gain(case)), str(gain(case, backward=True))]
        for case in cases.select(known, ["nvfuser_*"])
    )
    return report.table(["case", "forward", "forward and backward"], rows)


_STEPS = (
    "### Training steps\n\nA step computes the loss and all gradients of Llama layers, "
    "for four sequences of 2048 tokens, with cuDNN's attention."
)


def _gains(model: str) -> str:
    known = cases.all_cases(
        along_tp(DEVICES), small=False, models=[model], tokens=TOKENS, peers_own=False
    )
    rows = (
        [title, *map(str, map(gain, cases.select(known, [kind])))]
        for kind, title in LAYERS.items()
    )
    return report.table(["layer", *map(str, TOKENS)], rows)


def measured() -> str:
    """Measurements in programs, in milliseconds, and the rows where jhost is behind."""
    groups = report.groups(report.stored())
    return "\n\n".join(
        f"### {devices} GPUs, {report.PASSES[pass_]}\n\n"
        + _compared(groups[report.Group(KIND, devices, pass_, "program")], pass_)
        for devices, pass_ in GROUPS
    )


def _compared(records: Mapping[str, report.Record], pass_: str) -> str:
    """A sentence for each arm that took part, and a table of the peers' cases."""
    times = {name: _milliseconds(record) for name, record in records.items()}
    beside = {
        arm: {name: ms for name, ms in times.items() if {"jhost", arm} <= ms.keys()}
        for arm in (*PEERS, "plain")
    }
    said = [
        f"- {ARMS[arm]}: {_behind(both, arm)}" for arm, both in beside.items() if both
    ]
    if pass_ == "backward":
        said = [report.cotangents(records) + "\n", *said]
    shown = {name: ms for name, ms in times.items() if PEERS.keys() & ms.keys()}
    return "\n".join(said) + (f"\n\n{_times(shown)}" if shown else "")


def _milliseconds(record: report.Record) -> dict[str, float]:
    arms = record["modes"]["program"]
    return {arm: arms[arm]["min_ms"] for arm in ARMS if "min_ms" in arms.get(arm, {})}


def _behind(times: Mapping[str, Mapping[str, float]], beside: str) -> str:
    """The cases in which another arm is faster, by how much."""
    ratios = {name: ms["jhost"] / ms[beside] for name, ms in times.items()}
    slower = [f"`{name}` ({r:.2f})" for name, r in ratios.items() if r >= 1.005]
    listed = f": {', '.join(slower)}" if slower else ""
    mean = figures.geometric_mean(ratios.values())
    return (
        f"jhost takes longer in {len(slower)} of {len(times)} cases{listed}. The "
        f"geometric mean of jhost's time divided by the other time is {mean:.2f}."
    )


def _times(times: Mapping[str, Mapping[str, float]]) -> str:
    there = [arm for arm in ARMS if any(arm in ms for ms in times.values())]
    rows = (
        [name, *(f"{ms[arm]:.3f}" if arm in ms else "" for arm in there)]
        for name, ms in times.items()
    )
    return report.table(["case", *(ARMS[arm] for arm in there)], rows)


TABLES = {
    "when-it-pays.md": ("predicted", predicted),
    "peers.md": ("measured", measured),
    "benchmarks.md": ("steps", steps.every),
}
"""By page: the name of the place in it, and what makes the table."""


def main() -> None:
    """Writes the tables into the pages."""
    for name, (what, table) in TABLES.items():
        page = DOCS / name
        page.write_text(report.replaced(page.read_text(), table(), what))


if __name__ == "__main__":
    main()
