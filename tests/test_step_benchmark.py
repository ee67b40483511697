"""The benchmark of a training step runs, and compares what its arms return."""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import launch, layers, operands, report, torch_profile
from benchmarks.axes import along_tp
from benchmarks.step import (
    __main__ as command,
    arms,
    found,
    measure,
    page,
    programs,
    torch_arms,
)
from benchmarks.timing import CODE_PATH
from tests.benchmark_runs import in_two_processes, numpy_maker


@pytest.fixture(autouse=True)
def drawn_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "maker", numpy_maker)


def run(path: Path, *options: str) -> dict[str, Any]:
    tiny = ["--quick", "--layers", "1", "--no-profile", "--json", str(path)]
    with jax.numpy_dtype_promotion("standard"):  # as JAX's own attention needs it
        command.main([*tiny, *options])
    return json.loads(path.read_text())


@pytest.mark.slow
def test_arms_have_the_same_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scan, a checkpoint and shards of weights, in one case."""
    names = ["plain", "compute", "jhost_p2p"]
    form = ["--forms", "scan-checkpoint", "--mesh", "fsdp=2,tp=2"]
    chosen = ["--arms", ",".join(names), *form]
    found = run(tmp_path / "run.json", *chosen, "--passes", "backward")
    (record,) = found["measurements"]
    assert list(record["arms"]) == names
    for entry in record["arms"].values():
        assert 0 < entry["min_ms"] <= entry["median_ms"]
        assert entry["tokens_per_s"] > 0
        assert entry["temp_bytes"] > 0
    assert list(record["checks"]) == ["plain", "jhost_p2p"]
    assert all(checked["right"] for checked in record["checks"].values())
    assert record["checks"]["jhost_p2p"]["norm"] > 0
    assert "p2p" in record["explain"]["jhost_p2p"]["choices"]
    shown = capsys.readouterr().out
    assert page.title(found, record) in shown
    assert "| plain |" in shown


def test_an_arm_that_fails_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no such program")

    monkeypatch.setattr(arms, "ARMS", {"plain": arms.plain, "jhost": fails})
    monkeypatch.setattr(measure, "ARMS", arms.ARMS)
    monkeypatch.setattr(command, "ARMS", arms.ARMS)
    found = run(tmp_path / "run.json", "--mesh", "tp=2", "--passes", "forward")
    (record,) = found["measurements"]
    assert record["arms"]["jhost"] == {"error": "ValueError: no such program"}
    assert record["arms"]["plain"]["min_ms"] > 0
    assert "- jhost: ValueError: no such program" in page.measured([found])


def test_of_other_arms_a_case_has_a_table_of_its_own() -> None:
    """And of the same ones the last run counts."""
    found = page.stored()[0]
    fewer = copy.deepcopy(found)
    for record in fewer["measurements"]:
        del record["arms"]["gspmd"]
    once, twice, both = (
        page.measured(runs).count("| plain |")
        for runs in ([found], [found, found], [found, fewer])
    )
    assert once == twice
    assert both == 2 * once


def test_pytorch_takes_part_where_it_can() -> None:
    """Told one device's shapes; a scan over layers is nothing that it has."""
    model = programs.sized("8b", length=2048, on_gpu=False)
    written, scan = programs.steps(
        {"8b": model}, {"written-checkpoint": 2, "scan": 2}, 4, along_tp(2)
    )
    task = torch_arms.Task(written, True, CODE_PATH, profiled=True)
    job = task.job(["torch_async"])
    assert job["step"] == {"layers": 2, "checkpoint": True, "backward": True}
    x, _, qkv, *_ = job["operands"]
    assert (x[0], qkv[0]) == ((64, 64), (64, 48))
    assert job["model"]["queries"] == 4
    assert task.reason("torch_async") is None
    scanned = torch_arms.Task(scan, True, CODE_PATH, profiled=True)
    assert scanned.reason("torch_nccl") == "has no scan"


def test_what_pytorch_measured_stands_beside_the_others() -> None:
    (step,) = programs.steps(
        {"8b": layers.MODELS["8b"]}, {"written": 4}, 4, along_tp(2)
    )
    record: dict[str, Any] = {"arms": {"plain": {"min_ms": 40.0}}, "checks": {}}
    entries: dict[str, Any] = {
        "torch_async": {"min_ms": 41.0, "median_ms": 42.0, "error_versus_nccl": 0.3},
        "torch_nccl": {"skipped": "PyTorch is not installed"},
    }
    torch_arms.add(record, entries, step)
    assert record["arms"]["torch_async"]["tokens_per_s"] == 8192 / 0.041
    assert record["checks"]["torch_async"] == {"error": 0.3, "right": False}


def test_the_share_in_which_pytorch_computes_nothing() -> None:
    spans = [
        ("sm90_gemm", 0.0, 4.0),
        ("ncclDevKernel_AllGather", 1.0, 5.0),
        ("Memcpy PtoP (Device -> Device)", 5.0, 6.0),
        ("flash_fwd", 6.0, 8.0),
        ("elementwise_kernel", 7.0, 10.0),
    ]
    assert torch_profile.share(spans) == pytest.approx(0.2)
    assert torch_profile.share([]) is None


def test_a_wrong_gradient_is_found() -> None:
    loss, gradient = jnp.float32(3.0), jnp.arange(8, dtype=jnp.bfloat16)
    first = loss, (gradient,)
    assert measure.compared(first, first)["right"]
    assert not measure.compared((loss, (gradient[::-1],)), first)["right"]
    assert not measure.compared((loss * jnp.nan, (gradient,)), first)["right"]


def test_what_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        ["--mesh", "tp=2,pp=2"],
        ["--mesh", f"tp={2 * jax.device_count()}"],
        ["--mesh", "tp"],
        ["--forms", "unrolled"],
        ["--models", "1b"],
        ["--arms", "torch"],
        ["--mesh", "dp=2,tp=2", "--sequences", "3"],
    ):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert wrong[-1].split(",")[0] in capsys.readouterr().err


def test_the_cases_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--list", "--mesh", "tp=2", "--models", "70b"])
    forms = ["written", "scan", "written-checkpoint", "scan-checkpoint"]
    assert capsys.readouterr().out.split() == [f"70b/{form}" for form in forms]


def test_runs_of_steps_are_no_runs_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h200-step.json").write_text("{}")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert report.stored() == []
    assert page.measured([]) == "No run is stored yet."


# --- Several processes -------------------------------------------------------------- #


QUICKEST = (
    "--quick --no-checks --passes forward --arms jhost_p2p --mesh dp=2,tp=2"
).split()
"""Options of the shortest run on two devices of each of two processes."""


@pytest.mark.slow
def test_processes_measure_together_and_one_writes(tmp_path: Path) -> None:
    options = (*QUICKEST, "--layers", "1", "--no-profile")
    found = in_two_processes("benchmarks.step", tmp_path / "run.json", *options)
    (record,) = found["measurements"]
    assert "dp = 2, tp = 2 in 2 processes" in page.title(found, record)
    assert record["arms"]["jhost_p2p"]["min_ms"] > 0
    assert "p2p" in record["explain"]["jhost_p2p"]["choices"]


@pytest.mark.slow
def test_processes_measure_blocks_together(tmp_path: Path) -> None:
    options = (*QUICKEST, "--cases", "ag_up/8b/2048", "--calls", "program")
    found = in_two_processes("benchmarks", tmp_path / "run.json", *options)
    (record,) = found["measurements"]
    assert record["modes"]["program"]["jhost_p2p"]["min_ms"] > 0
    (group,) = report.groups([found])
    assert group.mesh == "dp = 2, tp = 2 in 2 processes"


def test_when_one_process_fails_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_fails.py").write_text(
        "import os, sys, time\n"
        "fails = os.environ['JHOST_BENCHMARK_PROCESS'] == '1'\n"
        "sys.exit(7) if fails else time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    assert launch.start("one_fails", [], processes=2, devices=2) == 7
    assert time.monotonic() - start < 300
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)\n")
    assert launch.start("hangs", [], processes=2, devices=2, seconds=1.0) == 124
    assert time.monotonic() - start < 300
    with pytest.raises(ValueError, match="4 devices cannot be shared equally by 3"):
        launch.start("one_fails", [], processes=3, devices=4)


def test_part_of_a_stream_is_found_where_the_whole_of_it_loses() -> None:
    """As in both passes of a layer: the MLP's loop loses, and attention's gain."""
    (both,) = (
        each
        for each in found.layers(["8b"], along_tp(4))
        if each.name == "layer/8b/2048, both passes"
    )
    times = found.times(both)
    assert times.found <= found.MOST * times.marked
    assert times.found < times.off
