"""`jhost.calibrate`: what it measures, keeps, and when that holds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jhost
from jhost import __main__, _calibration_cache, _calibration_holds
from jhost._calibrate import measure, timer
from jhost._calibrate.measure import Measuring
from jhost._calibration import Calibration
from jhost._calibration_holds import conditions_here, rates_here
from jhost._commands import doctor
from jhost._commands.findings import Report
from jhost._progress import Progress
from jhost.lowering.cost.fit import (
    BetweenProcesses,
    Matmul,
    Measurements,
    Traffic,
    Transfer,
    fitted,
)
from jhost.lowering.cost.rates import rates_of, rates_to_start_from
from jhost.lowering.ir.statements import CommunicationKind
from jhost.runtime import devices as runtime_devices
from jhost.runtime.compiler_options import PUTS
from jhost.runtime.devices import Devices, assumed, devices_of

MEASURED = Measurements(
    multiprocessors=1,
    matmuls=(Matmul(m=64, n=64, k=64, seconds=1e-5),),
    traffic=(Traffic(bytes=1000, seconds=1e-6), Traffic(bytes=2000, seconds=2e-6)),
    launch=1e-6,
    host=0.0,
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder of this test's own, and nothing that a test before has lowered by."""
    monkeypatch.setenv("JHOST_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    jax.clear_caches()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured."""
    monkeypatch.setattr(Measuring, "run", lambda *_: MEASURED)


def calibration(**conditions: object) -> Calibration:
    here = dataclasses.replace(conditions_here(), **conditions)  # pyright: ignore[reportArgumentType]
    return Calibration(conditions=here, date="2026-01-31", measurements=MEASURED)


class Counted(Progress):
    """Counts the steps."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def step(self, what: str, size: int = 1) -> None:
        self.names += [what] * size

    def say(self, text: str) -> None:
        raise AssertionError(text)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_everything_is_measured(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SIZES", (1 << 20,))
    monkeypatch.setattr(measure, "_SHAPES", ((1, 2, 1),))
    monkeypatch.setattr(timer, "_LONG", 3)
    start, bar = rates_to_start_from("cpu"), Counted()
    effort = {"budget": 1e-3, "scale": 1e-3}
    measuring = Measuring(jax.devices()[:count], start, **effort)
    found = measuring.run(bar)
    assert len(bar.names) == measuring.steps()
    seconds = [each.seconds for each in (*found.matmuls, *found.traffic, *found.moved)]
    assert all(0 < each < math.inf for each in (*seconds, found.launch))
    kinds = {(m.kind, m.devices) for m in found.moved}
    assert len(kinds) == (6 if count > 2 else 0)
    rates = fitted(found, start)
    assert min(rates.matmul, rates.memory, rates.collective.bandwidth) > 0
    assert not rates.permute.beside_compute, "devices of a CPU share its cores"


@pytest.mark.slow
def test_puts_are_measured_where_nccl_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SIZES", (1 << 20, 2 << 20))
    monkeypatch.setattr(measure, "_SHAPES", ((1, 1, 1),))
    monkeypatch.setattr(timer, "_LONG", 3)
    monkeypatch.setattr(measure, "why_no_puts", lambda _: "")
    given: list[object] = []
    compiled = timer.compiled
    monkeypatch.setattr(
        timer,
        "compiled",
        lambda *a: (given.append(a[3] if len(a) > 3 else None), compiled(*a))[1],
    )
    start, bar = rates_to_start_from("NVIDIA H200"), Counted()
    effort = {"budget": 1e-3, "scale": 1e-5}
    measuring = Measuring(jax.devices()[:2], start, **effort)
    found = measuring.run(bar)
    assert len(bar.names) == measuring.steps()
    assert [put.kind for put in found.puts] == ["CollectivePermute"] * 2
    assert sum(name.startswith("put of") for name in bar.names) == 2
    assert given.count(PUTS) == 4, "a short chain and a long one for each size"
    rates = fitted(found, start)
    assert rates.put is not None
    assert start.put is not None
    assert (rates.put.meet, rates.put.network) == (start.put.meet, False)


def moved(host: float) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(kind=kind, devices=2, held=held, seconds=1e-5 + held / 1e11, host=host)
        for kind in ("CollectivePermute", "AllGather", "AllReduce")
        for held in (1 << 20, 16 << 20)
    )


def between(bandwidth: float = 25e9) -> BetweenProcesses:
    """As of 30 us before the first byte."""
    kinds: tuple[CommunicationKind, ...] = ("AllGather", "AllReduce")
    found = [
        Transfer(kind=kind, devices=2, held=n << 20, seconds=1.0, host=1e-5)
        for kind in kinds
        for n in (1, 64)
    ]
    timed = [
        dataclasses.replace(each, seconds=3e-5 + each.received / bandwidth)
        for each in found
    ]
    return BetweenProcesses(moved=tuple(timed), taken=0.08)


def test_the_network_is_as_measured_between_processes() -> None:
    measured = dataclasses.replace(MEASURED, between=between())
    rates = fitted(measured, rates_to_start_from("NVIDIA H200"))
    for reach in ("host", "hosts"):
        link = dataclasses.replace(rates, reach={"dp": reach}).link("AllReduce", ["dp"])
        assert link.bandwidth == pytest.approx(25e9, rel=1e-3)
        assert link.latency == pytest.approx(30e-6, rel=1e-2)
        assert link.taken == 0.08
    assert rates.link("AllReduce", ["dp"]) == rates.collective, "in one process"


def test_a_calibration_between_processes_holds_for_as_many_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And by the same way; one of a single process holds in any job."""
    alone = calibration()
    slow = calibration(processes=2, settings="NCCL_P2P_DISABLE=1")
    slow = dataclasses.replace(
        slow, measurements=dataclasses.replace(MEASURED, between=between())
    )
    assert "8% of its time" in str(slow)
    assert Calibration.from_json(slow.to_json()) == slow
    texts = [alone.to_json(), slow.to_json()]
    monkeypatch.setattr(_calibration_cache, "_shared", texts)
    devices = devices_of(None)
    for here, held in [
        (slow.conditions, slow),
        (dataclasses.replace(slow.conditions, settings=""), alone),
        (dataclasses.replace(slow.conditions, processes=4), alone),
        (alone.conditions, alone),
    ]:
        monkeypatch.setattr(
            _calibration_holds, "conditions_here", lambda here=here: here
        )
        assert _calibration_holds.calibration_here(devices) == held


def test_a_calibration_without_puts_still_holds() -> None:
    """One that was kept before they were measured: permutes are peer copies."""
    conditions = dataclasses.replace(conditions_here(), device_kind="NVIDIA H200")
    before = Calibration(
        conditions=conditions,
        date="2026-01-31",
        measurements=dataclasses.replace(MEASURED, moved=moved(3e-5)),
    )
    fields = json.loads(before.to_json())
    del fields["measurements"]["puts"]
    assert Calibration.from_json(json.dumps(fields)) == before
    assert before.rates.put is None
    assert "put, " not in str(before)


def test_measured_puts_are_in_the_rates_where_they_can_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = "NVIDIA H200"
    conditions = dataclasses.replace(conditions_here(), device_kind=kind)
    found = Calibration(
        conditions=conditions,
        date="2026-01-31",
        measurements=dataclasses.replace(
            MEASURED, moved=moved(3e-5), puts=moved(1e-5)[:2]
        ),
    )
    assert Calibration.from_json(found.to_json()) == found
    monkeypatch.setattr(_calibration_holds, "conditions_here", lambda: conditions)
    _calibration_cache.keep(found)
    there = Devices(platform="gpu", kind=kind, count=2, processes=1)
    without, put = rates_here(there), rates_here(there, puts=True)
    assert without is not None
    assert put is not None
    assert without.put is None
    assert put.put is not None
    assert dataclasses.replace(put, put=None) == without
    assert put.put.host == pytest.approx(1e-5)
    assert "put, on the host" in str(found)


@pytest.mark.usefixtures("quick")
def test_it_holds_from_then_on_also_in_other_processes(cache: Path) -> None:
    here = devices_of(None)
    assert rates_here(here) == rates_of("cpu")
    found = jhost.calibrate(progress=False)
    assert rates_here(here) == found.rates != rates_of("cpu")
    (path,) = cache.glob("calibration-*/*.json")
    assert Calibration.from_json(path.read_text()) == found
    assert str(found) == (
        f"calibration of {jax.device_count()} x cpu, {found.date}\n"
        + "\n".join(str(found).splitlines()[1:])
    )
    assert "not measured, with one device" in str(found)


@pytest.mark.usefixtures("quick")
def test_what_was_lowered_before_is_chosen_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    f = jhost.jit(
        lambda x: jhost.stream(x * 2, axis=0),
        mesh=mesh,
        in_shardings=P("tp"),
        out_shardings=P(),
    )
    used: list[object] = []
    real = _calibration_holds.rates_here
    monkeypatch.setattr(
        "jhost._call.program.rates_here", lambda *d: used.append(real(*d)) or used[-1]
    )
    f(jnp.ones(4))
    before = len(used)
    f(jnp.ones(4))
    assert len(used) == before
    found = jhost.calibrate(progress=False)
    assert f(jnp.ones(4)).tolist() == [2.0] * 4
    assert used[before:]
    assert {r.source for r in used[before:]} == {found.rates.source}  # pyright: ignore


@pytest.mark.usefixtures("quick")
def test_it_may_be_kept_nowhere(cache: Path, tmp_path: Path) -> None:
    jhost.calibrate(keep=False, progress=False)
    assert not cache.exists()
    cache.write_text("a file, and no folder")
    with pytest.warns(UserWarning, match="the calibration is not kept"):
        jhost.calibrate(progress=False)


@pytest.mark.parametrize(
    "change",
    [
        {"device_kind": "another"},
        {"devices": 77},
        {"links": "NV18"},
        {"jax": "0.1"},
        {"nccl": "1.0"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_elsewhere_it_does_not_hold(change: dict[str, object]) -> None:
    _calibration_cache.keep(calibration(**change))
    here = devices_of(None)
    assert rates_here(here) == rates_of("cpu")
    outdated = list(_calibration_holds.outdated(here))
    if "device_kind" in change:
        assert not outdated
    else:
        (name, value), (said,) = next(iter(change.items())), outdated
        assert f"that of 2026-01-31: {name}: {value} -> " in said


def test_it_says_nothing_of_devices_that_are_not_there() -> None:
    _calibration_cache.keep(calibration(device_kind="NVIDIA H200"))
    topology = Devices(platform="gpu", kind="NVIDIA H200", count=4, processes=1)
    assert rates_here(topology) == rates_of("NVIDIA H200")
    _calibration_cache.keep(calibration())
    with assumed("NVIDIA H200"):
        assert rates_here(devices_of(None)) == rates_of("NVIDIA H200")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"jhost_calibration": 99}',
        json.dumps(json.loads(calibration().to_json()) | {"date": "yesterday"}),
    ],
)
def test_a_file_that_is_none_is_ignored_with_a_warning(text: str, cache: Path) -> None:
    _calibration_cache._parsed.cache_clear()  # pyright: ignore[reportPrivateUsage]
    folder = cache / "calibration-2"
    folder.mkdir(parents=True)
    (folder / "broken.json").write_text(text)
    with pytest.warns(UserWarning, match=r"jhost\.calibrate: a file in .* is ignored"):
        assert rates_here(devices_of(None)) == rates_of("cpu")


def test_in_a_job_those_of_process_0_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    here, found = devices_of(None), calibration()
    _calibration_cache.keep(calibration(jax="another"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert rates_here(here) == rates_of("cpu"), "others may have none"
    monkeypatch.setattr(_calibration_cache, "_shared", None)
    _calibration_cache.share([found.to_json()])
    assert rates_here(here) == found.rates


def test_links_are_read_from_what_nvidia_smi_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\t0-15\t0\t\tN/A\n"
        "GPU1\tNV18\t X \tSYS\t0-15\t0\t\tN/A\n"
        "GPU2\tSYS\tSYS\t X \t0-15\t0\t\tN/A\n\nLegend:\n\n  X    = Self\n"
    )
    words = runtime_devices._words_of_links(table)  # pyright: ignore[reportPrivateUsage]
    assert words == {"NV18", "SYS"}
    monkeypatch.setenv("PATH", "")
    assert runtime_devices.links_between_gpus() == ""


@pytest.mark.usefixtures("quick")
def test_the_command_prints_and_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    assert __main__.main(["calibrate", "--json", str(path)]) == 0
    found = Calibration.from_json(path.read_text())
    out = capsys.readouterr().out
    assert out.startswith("Devices of one CPU share its cores: nothing can overlap")
    assert str(found) in out
    report = Report()
    doctor._rates(report, devices_of(None))  # pyright: ignore[reportPrivateUsage]
    assert f"calibrated here on {found.date}, 0 days old" in str(report)
