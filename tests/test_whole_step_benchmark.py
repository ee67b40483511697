"""The benchmark of a whole training step runs, and compares what its arms train."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")  # of the step; it comes with test-ecosystem

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import report
from benchmarks.step import __main__ as step, page as steps, records
from benchmarks.step.whole import arms, command, fsdp2, measure, page, sizes
from benchmarks.timing import CODE_PATH
from tests.benchmark_runs import in_two_processes

pytestmark = pytest.mark.newest  # what we measure with, and not the library

TINY = ["--form", "whole", "--models", "tiny", "--layers", "1"]


@pytest.fixture(autouse=True)
def drawn_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA compiles the random numbers of a model as long as its step."""
    rng = np.random.default_rng(0)

    def normal(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    monkeypatch.setattr(jax.random, "normal", normal)


def run(path: Path, *options: str) -> dict[str, Any]:
    with jax.numpy_dtype_promotion("standard"):  # as JAX's own attention needs it
        step.main([*TINY, "--json", str(path), *options])
    return json.loads(path.read_text())


def test_arms_train_alike_and_have_a_table(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["jit", "marked", "compute", "fsdp2"]
    wanted = ["--arms", ",".join(names), "--mesh", "fsdp=2,tp=2"]
    found = run(tmp_path / "h100-whole.json", *wanted)
    (record,) = found["measurements"]
    assert list(record["arms"]) == names
    entry = record["arms"].pop("fsdp2")
    assert entry == {"skipped": "shards weights over fsdp alone"}
    for entry in record["arms"].values():
        assert 0 < entry["min_ms"] <= entry["median_ms"]
        assert entry["donated_bytes"] > entry["temp_bytes"] / 4
        assert entry["losses"][0] > entry["losses"][-1] > 0
    assert list(record["checks"]) == ["jit", "marked"]
    assert all(checked["right"] for checked in record["checks"].values())
    assert found["link"]["received_gb_per_s"] > 0
    shown = capsys.readouterr().out
    assert page.title(found, record) in shown
    assert "| marked |" in shown
    for module in (report, records):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert report.stored() == []
    assert page.title(found, record) in steps.every()


def test_the_cycle_by_hand_trains_alike(tmp_path: Path) -> None:
    """And says of what it does not take that it does not."""
    wanted = ["--arms", "jit,hand", "--layers", "3", "--mesh", "fsdp=2"]
    option = "xla_embed_ir_in_executable"  # changes nothing
    found = run(tmp_path / "run.json", *wanted, "--xla", f"{option}=True")
    assert found["xla"] == {option: True}
    (record,) = found["measurements"]
    assert record["checks"]["hand"]["right"]
    assert all(each["options"][option] == "True" for each in record["arms"].values())
    for loop, axes in (("scan", "fsdp=2"), ("scan-checkpoint", "tp=2")):
        (case,) = sizes.cases_of(["tiny"], [loop], [1], [2], ["layer"], [axes])
        with pytest.raises(ValueError, match="the cycle by hand"):
            arms.ARMS["hand"].make(case, case.mesh())


def test_no_time_is_left_and_all_is_written(tmp_path: Path) -> None:
    found = run(tmp_path / "run.json", "--time-limit", "0", "--mesh", "tp=2", "dp=2")
    assert found["measurements"] == []
    assert found["not_measured"] == [
        "tiny/scan-checkpoint/1x4 on tp=2",
        "tiny/scan-checkpoint/1x4 on dp=2",
    ]


def test_a_missing_sum_is_found() -> None:
    first = [4.8, 4.7, 4.6], [1.0, 0.5]
    assert measure.compared(first, first)["right"]
    assert not measure.compared(([4.8, 4.7, 4.7], [1.0, 0.5]), first)["right"]
    assert not measure.compared(([4.8, 4.7, 4.6], [1.0, 0.25]), first)["right"]
    assert not measure.compared(([float("nan")] * 3, [1.0, 0.5]), first)["right"]


def test_axes_stand_in_one_order_and_layouts_name_those_there_are() -> None:
    assert sizes.axes_of("tp=2,dp=4") == (("dp", 4), ("tp", 2))
    (case,) = sizes.cases_of(["13b"], ["scan"], [4], [8], ["layer"], ["fsdp=2"])
    assert case.mesh_name == "fsdp=2"
    assert case.with_cudnn().model.attention == "cudnn"
    assert arms.shardings(case)[1][0].params["layers"]["query"] == jax.P(
        None, "fsdp", None
    )


def test_pytorch_is_told_one_devices_share() -> None:
    (case,) = sizes.cases_of(["13b"], ["scan"], [4], [8], ["layer"], ["fsdp=2"])
    job = fsdp2.job(case, CODE_PATH)
    assert job["whole"] == {
        "vocabulary": 32_000,
        "layers": 4,
        "checkpoint": False,
        "sequences": 4,
    }
    assert job["arms"] == ["fsdp2"]


def test_what_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        ["--mesh", "pp=2"],
        ["--mesh", "tp=2", "tp=4"],
        ["--mesh", f"dp={2 * jax.device_count()}", "--sequences", "256"],
        ["--models", "1b"],
        ["--loops", "unrolled"],
        ["--arms", "torch"],
        ["--mesh", "dp=2", "--sequences", "3"],
        ["--slow-link"],
        ["--xla", "xla_gpu_autotune_level"],
    ):
        with pytest.raises(SystemExit):
            command.main(wrong)
        assert wrong[0] in capsys.readouterr().err


@pytest.mark.slow
def test_processes_train_together_and_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    wanted = [*TINY, "--loops", "scan", "--arms", "jhost", "--mesh", "fsdp=2"]
    options = [*wanted, "--slow-link", "--trace", str(tmp_path)]
    found = in_two_processes("benchmarks.step", path, *options)
    (record,) = found["measurements"]
    assert found["environment"]["variables"]["NCCL_P2P_DISABLE"] == "1"
    assert all(checked["right"] for checked in record["checks"].values())
    assert "slow link" in page.title(found, record)
    assert len(list(tmp_path.glob("tiny-*.xplane.pb.gz"))) == 2
