"""The cost model against the times that are stored in benchmarks/results.

Nothing is timed here: what was measured once is compared with what is predicted now.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import jhost
from jhost._calibration import Calibration
from jhost._call import program
from jhost.lowering.cost.rates import rates_of
from jhost.lowering.cost.simulate import predict
from jhost.lowering.explain import explain_program
from jhost.runtime.devices import devices_of
from tests.jhost.derived import programs, vjp

ROOT = Path(__file__).parents[1]

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(ROOT))

from benchmarks import cases, report  # noqa: E402
from benchmarks.axes import along_tp  # noqa: E402
from benchmarks.communication import AXIS, Streamed  # noqa: E402
from benchmarks.step.predicted import as_with_cudnn  # noqa: E402

pytestmark = pytest.mark.newest  # what we measure with, and not the library

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def cudnn() -> Iterator[None]:
    """Attention is cuDNN's, as it was where it was measured."""
    with as_with_cudnn():
        yield


def measured(of: str) -> Iterator[Any]:
    """The last in-program measurement of each case on such devices, of those passes.

    Stages have no stream that is chosen: the schedule orders their permutes.
    """
    groups = report.groups(report.stored())
    for group, records in groups.items():
        kind, devices = group.kind, group.devices
        if group == report.Group(kind, devices, of, "program") and kind in (H200, H100):
            for name, record in records.items():
                if record["kind"] in ("stages", "delayed_stages"):
                    continue
                case = f"{name} on {devices} {kind}"
                yield pytest.param(name, kind, devices, record, id=case)


def case_of(name: str, devices: int) -> cases.Case:
    (case,) = cases.select(cases.all_cases(along_tp(devices), small=False), [name])
    return case


def function(case: cases.Case, mesh: Mesh, **how: Any) -> Any:
    """The layer of a case by jhost."""

    def layer(*operands: Any) -> Any:
        return case.run(Streamed(), operands)

    specs: dict[str, Any] = {
        "in_shardings": case.specs,
        "out_shardings": case.out_spec,
    }
    return jhost.jit(layer, mesh=mesh, **specs, **how)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Devices are as many of that kind."""

    def there(kind: str, count: int) -> None:
        devices = dataclasses.replace(devices_of(None), kind=kind, count=count)
        monkeypatch.setattr(program, "devices_of", lambda mesh: devices)

    return there


def last_stream(case: cases.Case, mesh: Mesh) -> Any:
    """What is chosen for it; without XLA, which has no attention of cuDNN's here."""
    (lowered,) = programs(function(case, mesh), *case.abstract())
    return explain_program(lowered).streams[-1]


@pytest.mark.parametrize(
    ("name", "kind", "devices", "record"), list(measured("forward"))
)
def test_predictions_are_near_and_no_choice_loses(
    name: str,
    kind: str,
    devices: int,
    record: Any,
    make_mesh: Callable[..., Mesh],
    pretend: Callable[[str, int], None],
) -> None:
    pretend(kind, devices)
    stream = last_stream(case_of(name, devices), make_mesh((devices,), (AXIS,)))
    entries = record["modes"]["program"]
    if "min_ms" not in entries["plain"]:
        pytest.skip("there was no time to measure it")
    plain_ms = entries["plain"]["min_ms"]
    (_, predicted), *_ = stream.predicted
    if stream.pipeline == "off":
        assert 1e3 * predicted == pytest.approx(plain_ms, rel=0.15)
        return
    # What is chosen now may have been chosen then, or measured for comparison.
    chosen = "p2p pipeline" in record["explain"]["jhost"]
    p2p = entries.get("jhost" if chosen else "jhost_p2p", {})
    if "min_ms" in p2p:
        assert 1e3 * predicted == pytest.approx(p2p["min_ms"], rel=0.15)
        others = [entries.get(arm, {}) for arm in ("plain", "jhost_off")]
        best_ms = min(other["min_ms"] for other in others if "min_ms" in other)
        assert p2p["min_ms"] <= 1.01 * best_ms


# Four H200s, NCCL 2.32.3, four layers in a program, p2p asked for: milliseconds of one,
# by peer copies and by puts.
BY_KIND = {
    "mlp/8b/8192": (0.866, 0.873),
    "mlp/8b/4096": (0.410, 0.451),
    "mlp/8b/2048": (0.422, 0.343),
    "ag_qkv/8b/8192": (0.289, 0.321),
}


@pytest.mark.parametrize("name", BY_KIND)
def test_predictions_by_puts_are_near_and_the_faster_kind_is_chosen(
    name: str, make_mesh: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = rates_of(H200, puts=True)
    monkeypatch.setattr(program, "rates_here", lambda *_: rates)
    case = case_of(name, 4)
    f = function(case, make_mesh((4,), (cases.AXIS,)), pipeline="p2p")
    (found,) = jhost.explain(f, *case.abstract()).permutes
    copied, put = BY_KIND[name]
    predicted = {kind: 1e3 * each.total for kind, each in found.predicted}
    assert predicted["puts"] == pytest.approx(put, rel=0.1)
    assert predicted["peer copies"] == pytest.approx(copied, rel=0.15)
    assert found.kind == ("puts" if put < copied else "peer copies")


# What `python -m jhost calibrate` measured of two H100s, 2026-11-24.
CALIBRATION = ROOT / "tests" / "targets" / "calibration-2x-h100.json"


@pytest.mark.slow
def test_a_calibration_chooses_as_the_shipped_rates_do(
    make_mesh: Callable[..., Mesh],
    pretend: Callable[[str, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In 95 % of each third stored case; what it predicts differs by 15 % at most."""
    calibrated = Calibration.from_json(CALIBRATION.read_text())
    pretend(H100, 2)
    mesh = make_mesh((2,), (AXIS,))
    stored = [each.values for each in measured("forward")]
    names = [name for name, kind, devices, _ in stored if (kind, devices) == (H200, 2)]
    names = names[::3]
    same = 0
    for name in names:
        case, found = case_of(name, 2), list[Any]()
        for rates in (rates_of(H100), calibrated.rates):
            monkeypatch.setattr(program, "rates_here", lambda *_, r=rates: r)
            found.append(last_stream(case, mesh))
        ((_, shipped), *_), ((_, ours), *_) = (each.predicted for each in found)
        assert ours == pytest.approx(shipped, rel=0.15)
        same += found[0].pipeline == found[1].pipeline
    assert same >= 0.95 * len(names)


# Which arm is what the model predicts for each pipeline.
ARMS = {"off": "plain", "p2p": "jhost_p2p"}


@pytest.mark.parametrize("pipeline", ARMS)
@pytest.mark.parametrize(
    ("name", "kind", "devices", "record"), list(measured("backward"))
)
def test_predictions_of_both_passes_are_near(
    name: str,
    kind: str,
    devices: int,
    record: Any,
    pipeline: Any,
    make_mesh: Callable[..., Mesh],
    pretend: Callable[[str, int], None],
) -> None:
    pretend(kind, devices)
    case = case_of(name, devices)
    mesh = make_mesh((devices,), (AXIS,))
    f = function(case, mesh, pipeline=pipeline)
    entry = record["modes"]["program"].get(ARMS[pipeline], {})
    if "min_ms" not in entry:
        pytest.skip("it was not measured")
    rates = rates_of(kind)
    assert rates is not None
    cotangent = jax.ShapeDtypeStruct(case.cotangent().shape, jnp.bfloat16)
    both = programs(vjp(f), cotangent, *case.abstract())
    predicted = sum(predict(program, rates).total for program in both)
    assert 1e3 * predicted == pytest.approx(entry["min_ms"], rel=0.2)
