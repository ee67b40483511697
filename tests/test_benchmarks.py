"""The benchmarks run; their times are not asserted."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jhost.lowering.explanation import Explanation
from jhost.lowering.ir.remarks import StreamReport
from tests import budget
from tests.benchmark_runs import numpy_maker
from tests.lowering.rules.reference_attention import as_with_cudnn

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"

# Last, so that `jhost` stays the one that is installed.
sys.path.append(str(ROOT))

from benchmarks import (  # noqa: E402
    __main__ as command,
    arms,
    cases,
    checks,
    figures,
    kernels,
    operands,
    plots,
    ragged,
    report,
    runner,
    targets,
    timelines,
    timing,
    torch_pool,
)
from benchmarks.arms.base import tied  # noqa: E402
from benchmarks.axes import Axes, along_tp  # noqa: E402
from benchmarks.communication import Whole  # noqa: E402

MAKER = operands.maker


@pytest.fixture(autouse=True)
def drawn_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "maker", numpy_maker)


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / name))


def case(name: str, axes: Axes = along_tp(2)) -> cases.Case:  # noqa: B008
    (found,) = cases.select(cases.all_cases(axes, small=True), [name])
    return found


@pytest.fixture
def mesh(make_mesh: Callable[..., Mesh]) -> Mesh:
    return make_mesh((2,), ("tp",))


@pytest.fixture
def grid(make_mesh: Callable[..., Mesh]) -> Mesh:
    return make_mesh((2, 2), ("dp", "tp"))


def plan(*names: str, modes: tuple[runner.Mode, ...] = ("program",)) -> runner.Plan:
    return runner.Plan(
        arms=arms.select(names),
        modes=modes,
        effort=timing.CODE_PATH,
        deadline=timing.Deadline(None),
        checked=True,
    )


# --- The command ------------------------------------------------------------------


def test_a_run_measures_checks_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    wanted = ["--cases", "ag_qkv/8b/2048,down_ar/8b/2048", "--passes", "forward"]
    chosen = ["--arms", "plain,compute,communication,jhost,jhost_p2p,recipe,pallas"]
    command.main(["--quick", "--devices", "2", *wanted, *chosen, "--json", str(path)])
    run = json.loads(path.read_text())
    assert not run["claims"]
    assert run["environment"]["versions"]["jax"] == jax.__version__
    assert [r["case"] for r in run["measurements"]] == wanted[1].split(",")
    gathers, reduces = run["measurements"]
    for mode in ("program", "once"):
        entry = gathers["modes"][mode]["jhost_p2p"]
        assert 0 < entry["min_ms"] <= entry["median_ms"]
        assert entry["host_us"] > 0
        own = gathers["figures"][mode]["jhost"]
        assert {"speedup", "to_the_limit", "efficiency", "ceiling"} <= own.keys()
        assert gathers["modes"][mode]["pallas"] == {"skipped": "needs GPUs"}
        assert "all-reduce" in reduces["modes"][mode]["recipe"]["skipped"]
    assert gathers["modes"]["program"]["plain"]["peak_bytes"] > 0
    assert "p2p pipeline" in gathers["explain"]["jhost_p2p"]
    assert all(checks.passed(found) for found in gathers["checks"].values())
    assert gathers["checks"].keys() == {"plain", "jhost", "jhost_p2p", "recipe"}
    out = capsys.readouterr().out
    assert "ag_qkv/8b/2048 on tp=2 forward program: plain" in out
    assert "2 measurements" in out


def test_a_run_out_of_time_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    wanted = ["--cases", "out_rs/8b/2048", "--passes", "both", "--devices", "2"]
    command.main([*wanted, "--quick", "--time-limit", "0", "--json", str(path)])
    run = json.loads(path.read_text())
    assert run["measurements"] == []
    assert run["not_measured"] == [
        "out_rs/8b/2048 on tp=2",
        "out_rs/8b/2048 on tp=2 with gradients",
    ]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--cases", "nothing"], "no case is named 'nothing'; there are ag_qkv"),
        (["--arms", "nobody"], "no arm is named 'nobody'; there are plain"),
        (["--models", "405b"], "no model is named '405b'"),
        (["--devices", "64"], "64 of 8 devices cannot be used"),
        (["--devices", "4", "--mesh", "tp=4"], "without --mesh"),
        (["--mesh", "pp=4"], "tp, and dp if wanted, but not pp=4"),
        (["--processes", "2"], "with --mesh, as --mesh dp=2,tp=2"),
        (["--tokens", "many"], "invalid list value: 'many'"),
        (["--passes", "sideways"], "invalid choice: 'sideways'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert fragment in capsys.readouterr().err


def test_the_list_of_cases_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--list", "--devices", "4"])
    names = capsys.readouterr().out.split()
    assert len(names) == 10 * 2 * 3 + 2 * 3 + 2 * 2 * 3 + 2 + 4 + 4
    assert names[0] == "ag_qkv/8b/8192"
    assert names[-1] == "pallas_ag/k4096/4096"


# --- Cases and arms ---------------------------------------------------------------


EXPERTS = "experts/8x7b/2048"  # the others differ in sizes
STAGES = tuple(f"{kind}/8b/2048" for kind in cases.STAGES)
# One weight of what `ag_gate_up` has two of; what `out_rs` does, of other sizes.
PARTS = {"ag_up", "down_rs"}
NAMES = [f"{kind}/8b/2048" for kind in cases.KINDS if kind not in PARTS]


# Of each communication one, and of what its arms share with others no second.
BY_EVERY_ARM = {"ag_qkv/8b/2048", "swiglu_mlp/8b/2048", EXPERTS, STAGES[0]}


@budget.first_is_quick("name", [*NAMES, EXPERTS, *STAGES])
def test_every_arm_and_every_case_is_computed(name: str, mesh: Mesh) -> None:
    """In one instance, by arms that a CPU can run: results equal the plain ones."""
    chosen = case(name)
    every = ("jhost_collective", "recipe", "xla") if name in BY_EVERY_ARM else ()
    wanted = plan("plain", "jhost", *every, modes=("once",))
    record = runner.measure(chosen, mesh, False, wanted)
    entries = record["modes"]["once"]
    timed = {arm for arm, entry in entries.items() if "min_ms" in entry}
    without_recipe = chosen.kind in ("experts", *cases.STAGES)
    assert timed == entries.keys() - ({"recipe"} if without_recipe else set())
    for arm, found in record["checks"].items():
        # How a peer rounds its sums is its own affair.
        own = arm.startswith("jhost") or arm == "plain"
        assert checks.passed(found if own else found | {"no_worse": True}), (arm, found)
    exact = {f["integers_equal_plain"] for f in record["checks"].values()}
    assert exact == {True if chosen.exact_integers else None}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("swiglu_mlp/8b/2048", marks=pytest.mark.slow),
        pytest.param(EXPERTS, marks=pytest.mark.slow),
        # Stages that do not wait differ in less.
        pytest.param(STAGES[-1], marks=pytest.mark.slow),
    ],
)
def test_gradients_are_checked_as_well(name: str, mesh: Mesh) -> None:
    chosen = case(name)
    # In a program there are four of each, which XLA takes four times as long for.
    mode: runner.Mode = "program" if name.startswith("swiglu") else "once"
    wanted = plan("plain", "compute", "communication", "jhost_p2p", modes=(mode,))
    record = runner.measure(chosen, mesh, True, wanted)
    assert record["cotangent"] == "after the result"
    assert all("min_ms" in e for e in record["modes"][mode].values())
    for found in record["checks"].values():
        assert checks.passed(found)
        assert len(found["errors"]) == 1 + len(chosen.operands)


GRID = Axes((("dp", 2), ("tp", 2)))


@pytest.mark.parametrize(
    "name",
    [
        "down_ar/8b/2048",
        pytest.param(EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_rows_may_be_split_over_another_axis(name: str, grid: Mesh) -> None:
    """Each group has all weights, whose gradients are summed over the groups."""
    chosen = case(name, GRID)
    names = ["plain", "compute", "communication", "jhost", "xla"]
    record = runner.measure(chosen, grid, True, plan(*names, modes=("once",)))
    assert all("min_ms" in e for e in record["modes"]["once"].values()), record
    assert record["mesh"] == {"dp": 2, "tp": 2}
    for arm, found in record["checks"].items():
        assert checks.passed(found | {"no_worse": True}), (arm, found)
    weights = sum(o.name not in ("x", "h") for o in chosen.operands)
    kinds = [kind for kind, _ in chosen.moved(True)]
    assert kinds.count("sum") == weights


def test_a_case_over_two_axes_counts_its_work_and_its_bytes() -> None:
    (mlp,) = cases.select(cases.all_cases(GRID, small=False), ["mlp/8b/8192"])
    assert mlp.flops(False) == 2 * 2 * 8192 * 4096 * 14336 // 4
    forward = 2 * 2 * (8192 // 2) * 4096 // 2
    assert mlp.bytes_moved(False) == forward
    weights = 2 * 4096 * 14336 // 2  # of a device, both
    assert mlp.bytes_moved(True) == 2 * forward + 2 * 2 * weights // 2
    names = [each.name for each in cases.all_cases(GRID, small=False)]
    assert "attention/8b/4096" in names
    assert "attention/8b/2048" not in names  # one sequence


# --- Keys that go around ----------------------------------------------------------


@pytest.mark.slow
def test_every_arm_attends_to_keys_that_go_around(
    make_mesh: Callable[..., Mesh],
) -> None:
    """All arms that a CPU can run, with gradients, on fewer rows and heads."""
    listed = case("ring_attention/8b/32768", along_tp(4))
    fewer = [
        dataclasses.replace(o, shape=(64, o.shape[1] // 4, 8)) for o in listed.operands
    ]
    chosen = dataclasses.replace(listed, operands=tuple(fewer))
    mesh = make_mesh((4,), ("tp",))
    names = ["plain", "compute", "communication", "jhost_p2p", "ring", "ring_zigzag"]
    wanted = plan(*names, "recipe", "xla", modes=("once",))
    with jax.numpy_dtype_promotion("standard"):  # as JAX's own attention needs it
        record = runner.measure(chosen, mesh, True, wanted)
    entries = record["modes"]["once"]
    timed = {arm for arm, entry in entries.items() if "min_ms" in entry}
    assert timed == entries.keys() - {"recipe"}, entries
    assert record["checks"].keys() == timed - {"compute", "communication"}
    for arm, checked in record["checks"].items():
        assert checks.passed(checked), (arm, checked)
        assert max(checked["errors"]) < 0.01, (arm, checked)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kernels_give_what_they_do_written_out(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of half of the keys, with the results and logarithms of all."""
    as_with_cudnn(monkeypatch)
    rng = np.random.default_rng(0)
    q, k, v, g = (
        jax.device_put(rng.standard_normal((16, heads, 8)).astype(jnp.bfloat16))
        for heads in (4, 2, 2, 4)
    )
    own, other = kernels.kernels(""), kernels.kernels("cudnn")
    found = own.attend(q, k, v, False)
    for one, two in (
        (own.attend(q, k, v, causal), other.attend(q, k, v, causal)),
        (
            own.gradients(q, k, v, found, g, causal),
            other.gradients(q, k, v, found, g, causal),
        ),
    ):
        chex.assert_trees_all_equal_shapes_and_dtypes(one, two)
        for a, b in zip(one, two, strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, atol=2e-2 * np.max(np.abs(a)))


def test_attention_counts_its_work_and_its_bytes() -> None:
    (ring,) = cases.select(
        cases.all_cases(along_tp(4), small=False), ["ring_attention/8b/131072"]
    )
    matmul = 2 * 131072**2 // 2 * 32 * 128  # causal
    assert ring.flops(False) == 2 * matmul // 4
    assert ring.flops(True) == 7 * matmul // 4
    assert ring.bytes_moved(False) == 2 * 2 * 131072 * 8 * 128 * 3 // 4
    assert ring.bytes_moved(True) == 2 * ring.bytes_moved(False)


def test_an_arm_that_fails_does_not_stop_the_others(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(arms.ARMS, "recipe", broken)
    record = runner.measure(
        case("out_rs/8b/2048"), mesh, False, plan("plain", "recipe")
    )
    entries = record["modes"]["program"]
    assert entries["recipe"] == {"error": "RuntimeError: no such kernel"}
    assert "min_ms" in entries["plain"]


def test_a_wrong_result_is_found(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> Any:
        (built,) = plain(*args)
        return [built.__class__(lambda *xs: built.instance(*xs) * 2, built.operands)]

    plain = arms.ARMS["plain"]
    monkeypatch.setitem(arms.ARMS, "xla", wrong)
    record = runner.measure(case("out_rs/8b/2048"), mesh, False, plan("plain", "xla"))
    found = record["checks"]["xla"]
    assert not checks.passed(found)
    assert (found["repeats"], found["no_worse"]) == (True, False)
    assert not found["integers_equal_plain"]


def test_who_repeats_itself_no_less_than_plain_is_right() -> None:
    def outcome(random: float, again: float) -> checks.Outcome:
        return checks.Outcome(jnp.float32(random), jnp.float32(again), None)

    steady, drifting = outcome(1.0, 1.0), outcome(1.0, 1.1)
    answers = {
        (own is steady, plain is steady): checks.check(own, plain, None)["repeats"]
        for own in (steady, drifting)
        for plain in (steady, drifting)
    }
    assert answers == {
        (True, True): True,
        (True, False): True,
        (False, True): False,
        (False, False): None,
    }
    assert checks.check(drifting, None, None)["repeats"] is False


def test_blocks_take_turns_and_each_is_led_in_by_its_own_calls() -> None:
    made: list[str] = []
    effort = timing.Effort(warmups=1, blocks=2, calls=2, lead_in=3, settling_s=1e-9)

    def broken(number: int) -> None:
        raise RuntimeError

    def calls(name: str) -> timing.Call:
        return lambda _: made.append(name)

    times = timing.measure(
        {"a": calls("a"), "x": broken, "i": calls("i"), "b": calls("b")},
        effort,
        instances=1,
        deadline=timing.Deadline(None),
        on_error=lambda name, error: made.append(name),
        idle=("i", "not called"),
    )
    settled = "axib" + "aaaa"
    assert "".join(made) == settled + 2 * ("aaaaa" + "bbbbb") + 2 * "iiiii"
    assert [len(times[name].blocks_ms) for name in "abi"] == [2, 2, 2]


def test_instances_of_a_program_stay_apart() -> None:
    x = jnp.ones((2, 2))
    text = jax.jit(tied(jnp.sin)).lower((x,), (x,), (x,)).as_text()
    assert text.count("optimization_barrier") == 2
    assert text.count("stablehlo.sine") == 3


def test_a_case_counts_its_work_and_its_bytes() -> None:
    (mlp,) = cases.select(cases.all_cases(along_tp(4), small=False), ["mlp/8b/8192"])
    assert mlp.flops(False) == 2 * 2 * 8192 * 4096 * 14336 // 4
    assert mlp.flops(True) == 3 * mlp.flops(False)
    assert mlp.bytes_moved(False) == 2 * 2 * 8192 * 4096 * 3 // 4
    assert mlp.moved(True) == (*mlp.moved(False), *mlp.moved(False))


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize(
    ("name", "room", "width"), [("8x7b", 80, 4096), ("dsv2", 30, 5120)]
)
def test_experts_count_their_work_and_their_bytes(
    name: str, room: int, width: int, devices: int
) -> None:
    """Of tokens that go to several experts, and a quarter more of empty places."""
    whole = cases.all_cases(along_tp(devices), small=False)
    (experts,) = cases.select(whole, [f"experts/{name}/8192"])
    count, ffn = experts.model.experts, experts.model.ffn
    places = 8192 // cases.GROUP * count * room
    assert experts.operands[0].shape == (8192 // cases.GROUP, count, room, width)
    assert experts.flops(False) == 3 * 2 * places * width * ffn // devices
    one_way = 2 * places * width // devices * (devices - 1) // devices
    assert experts.bytes_moved(False) == 2 * one_way
    assert experts.bytes_moved(True) == 4 * one_way


def test_a_layer_of_gpt_counts_its_matmuls_and_its_bytes() -> None:
    listed = cases.all_cases(along_tp(2), small=False)
    (gpt,) = cases.select(listed, ["nvfuser_layer"])
    rows, hidden = gpt.operands[0].shape
    scores = 2 * 2 * rows * rows * hidden
    assert gpt.flops(False) == (2 * rows * 12 * hidden**2 + scores) // 2
    assert gpt.bytes_moved(False) == 4 * 2 * rows * hidden // 2


def test_attention_is_causal() -> None:
    """The first rows of a sequence do not depend on the last."""
    chosen = case("attention/8b/2048")
    x, *weights = (
        np.random.default_rng(n).standard_normal(o.shape).astype(np.float32)
        for n, o in enumerate(chosen.operands)
    )
    run = jax.jit(lambda *xs: chosen.run(Whole(), xs))
    whole = run(x, *weights)
    # A copy: on the CPU the first call may still be reading x's memory.
    other = np.concatenate([x[:-1], np.zeros_like(x[-1:])])
    changed = run(other, *weights)
    np.testing.assert_allclose(whole[:-1], changed[:-1], atol=1e-6)
    assert not np.allclose(whole[-1], changed[-1])


def test_random_operands_have_their_scales_and_their_places(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "maker", MAKER)
    each = case("down_ar/8b/2048").operands
    found, other = (operands.random_set(each, mesh, seed) for seed in (0, 1))
    for operand, x in zip(each, found, strict=True):
        assert (x.shape, x.dtype) == (operand.shape, jnp.bfloat16)
        assert x.sharding == NamedSharding(mesh, operand.spec)
        assert np.std(x.astype(np.float32)) == pytest.approx(operand.scale, rel=0.1)
    assert not checks.same(found, other)


def test_integer_operands_are_few_enough_to_add_exactly(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operands, "maker", MAKER)
    chosen = case("mlp/8b/2048")
    x, up, _ = operands.integer_set(chosen.operands, mesh, 0)
    assert set(np.unique(np.asarray(x, np.float32))) == {-128.0, 128.0}
    assert np.asarray(up != 0).sum(0).mean() == pytest.approx(4, rel=0.3)
    again = operands.integer_set(chosen.operands, mesh, 0)
    assert checks.same((x, up), again[:2])


def test_all_arms_stand_in_the_readme() -> None:
    text = (BENCHMARKS / "README.md").read_text()
    shown = [name for name in arms.NAMES if not name.startswith("jhost_s")]
    assert [name for name in shown if f"`{name}`" not in text] == []


# --- PyTorch's processes, without PyTorch --------------------------------------------


def test_processes_that_do_not_start_are_reported_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_pool.sys, "executable", "/bin/false")
    pool = torch_pool.Pool(2, "cpu")
    with pytest.raises(torch_pool.PoolError, match="has ended"):
        pool.ready(60)
    with pytest.raises(torch_pool.PoolError, match="has ended"):
        pool.run({}, 60)
    pool.close()


def test_a_process_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = tmp_path / "asleep"
    asleep.write_text("#!/bin/sh\nexec sleep 600\n")
    asleep.chmod(0o755)
    monkeypatch.setattr(torch_pool.sys, "executable", str(asleep))
    pool = torch_pool.Pool(1, "cpu")
    with pytest.raises(torch_pool.PoolError, match="no answer in time"):
        pool.ready(0.2)
    pool.close()


def test_a_block_takes_as_long_as_its_slowest_process() -> None:
    ranks: list[dict[str, Any]] = [
        {"torch_nccl": {"blocks_ms": [1.0, 4.0], "host_us": [5.0, 7.0]}},
        {"torch_nccl": {"blocks_ms": [2.0, 3.0], "host_us": [6.0, 6.0]}},
    ]
    entry = torch_pool.slowest(ranks)["torch_nccl"]
    assert entry["blocks_ms"] == [2.0, 4.0]
    assert (entry["min_ms"], entry["median_ms"], entry["host_us"]) == (2.0, 3.0, 6.0)
    for rank, share in zip(ranks, (0.1, 0.2), strict=True):
        rank["torch_nccl"] |= {"without_computation": share, "first_call_s": share}
    entry = torch_pool.slowest(ranks)["torch_nccl"]
    assert entry["without_computation"] == pytest.approx(0.15)
    assert entry["first_call_s"] == 0.2


# --- Figures, targets, the report -----------------------------------------------------


def test_figures_of_a_case() -> None:
    times = {
        "plain": 1.2,
        "jhost": 0.8,
        "compute": 0.75,
        "communication": 0.25,
        "torch_async": 0.9,
        "xla": 1.3,
        "xla_windowed": 1.0,
    }
    found = figures.figures(times)
    assert found["speedup"] == pytest.approx(1.5)
    assert found["ceiling"] == pytest.approx(4 / 3)
    assert found["over_compute"] == found["to_the_limit"] == pytest.approx(0.8 / 0.75)
    assert found["efficiency"] == pytest.approx(0.8)
    assert found["versus_async_tp"] == pytest.approx(1.125)
    assert found["versus_xla"] == pytest.approx(1.25)  # its best
    assert "versus_pallas" not in found


def test_the_ceiling_is_highest_where_both_take_the_same_time() -> None:
    assert figures.ceiling(1.0, 1.0) == 2.0
    assert figures.ceiling(1.0, 0.5) == figures.ceiling(0.5, 1.0) == 1.5


def test_the_geometric_mean() -> None:
    assert figures.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert figures.geometric_mean([]) is None


def test_targets_are_judged_by_what_was_measured() -> None:
    wanted = targets.target("mlp/8b/8192", 4)
    assert wanted is not None
    assert targets.misses(wanted, {"speedup": 1.4, "over_compute": 1.1}) == []
    missed = targets.misses(wanted, {"speedup": 1.3, "versus_async_tp": 1.0})
    assert missed == ["speedup 1.30 < 1.35", "versus async tp 1.00 < 1.05"]
    assert targets.target("mlp/8b/8192", 2) is targets.TWO_DEVICES
    assert targets.target("mlp/8b/8192", 8) is None
    assert targets.target("ag_gate_up/8b/8192", 4) is None


def test_every_target_names_a_case() -> None:
    listed = cases.all_cases(along_tp(4), small=False)
    for each in targets.TARGETS:
        assert cases.select(listed, [each.pattern])


STORED = {
    "claims": True,
    "started": "2026-01-02T03:04:05+00:00",
    "environment": {"device_kind": "NVIDIA H200", "versions": {"jax": "0.11.2"}},
    "effort": {"blocks": 5, "calls": 20},
    "not_measured": ["layer/8b/8192 on 4"],
    "measurements": [
        {
            "case": name,
            "devices": 4,
            "pass": "forward",
            "clocks": [{"clocks.sm": "1980 MHz"}, {"clocks.sm": "1755 MHz"}],
            "modes": {
                "program": {
                    "plain": {"min_ms": plain, "median_ms": plain, "peak_bytes": 9e6},
                    "jhost": {"min_ms": 1.0, "median_ms": 1.1, "peak_bytes": 8e6},
                    "pallas": {"error": "ValueError: no tile"},
                }
            },
            "checks": {"jhost": {**dict.fromkeys(answers, True), answers[-1]: right}},
            "predicted": {"jhost": 0.9},
            "figures": {"program": {"jhost": {"speedup": plain, "ceiling": 1.6}}},
        }
        for answers in [("repeats", "integers_equal_plain", "no_worse")]
        for name, plain, right in [
            ("mlp/8b/8192", 1.44, True),
            ("down_ar/8b/8192", 0.81, False),
        ]
    ],
}


def test_the_report_of_a_stored_run() -> None:
    text = report.measured([STORED])
    assert "## 4 x NVIDIA H200, forward, in program" in text
    mean = math.sqrt(1.44 * 0.81)
    assert f"is **{mean:.3f}**, over 2 cases. jhost is slower than plain in 1." in text
    assert "| mlp/8b/8192 | 1.44 | 1.60 | yes |" in text
    assert "| down_ar/8b/8192 | 0.81 | 1.60 | no: jhost |" in text
    assert "| mlp/8b/8192 | 1.440 / 1.440 | 1.000 / 1.100 |" in text
    assert "| mlp/8b/8192 | 0.900 / 1.000 (-10%) |  |" in text
    assert "| mlp/8b/8192 | met |" in text
    assert "| down_ar/8b/8192 | speedup 0.81 < 1.12 |" in text
    assert "| mlp/8b/8192 | 9 / 8 |" in text
    assert "SM clocks 1755 to 1980 MHz" in text
    assert "no time was left for layer/8b/8192 on 4" in text
    assert "- mlp/8b/8192, pallas: ValueError: no tile" in text


def test_predictions_are_those_of_the_last_choice() -> None:
    report_of = functools.partial(
        StreamReport,
        stream="s0",
        axis=0,
        pipeline="p2p",
        chunks=4,
        extent=8,
        reason="",
        lines=(),
    )
    explained = functools.partial(
        Explanation, name="f", loops=1, layouts=(), communications=(), notes=()
    )
    one = report_of(predicted=(("p2p", 2e-3), ("not pipelined", 3e-3)))
    two = report_of(predicted=(("p2p", 1e-3), ("not pipelined", 2e-3)))
    found = runner.predicted_ms("jhost", explained(streams=(one,)))
    assert found == {"jhost": 2.0, "plain": 3.0}
    assert runner.predicted_ms("jhost", explained(streams=(one, two))) == {"jhost": 1.0}
    assert runner.predicted_ms("jhost", explained(streams=(report_of(),))) == {}


def test_other_meshes_have_tables_of_their_own() -> None:
    grid = json.loads(json.dumps(STORED))
    grid["environment"]["processes"] = 2
    for record in grid["measurements"]:
        record["mesh"] = {"dp": 2, "tp": 2}
    text = report.measured([STORED, grid])
    assert text.count("## 4 x NVIDIA H200, forward, in program") == 1
    where = "dp = 2, tp = 2 in 2 processes"
    assert text.count(f"## 4 x NVIDIA H200 ({where}), forward, in program") == 1
    assert text.count("Targets:") == 1


def test_the_last_run_of_a_case_counts() -> None:
    later = json.loads(json.dumps(STORED))
    later["measurements"] = later["measurements"][:1]
    later["measurements"][0]["figures"]["program"]["jhost"]["speedup"] = 1.5
    text = report.measured([STORED, later])
    assert "| mlp/8b/8192 | 1.50 | 1.60 | yes |" in text
    assert "over 2 cases" in text


def test_the_report_says_since_when_a_cotangent_was_there() -> None:
    run = json.loads(json.dumps(STORED))
    old, new = run["measurements"]
    for record in (old, new):
        record["pass"] = "backward"
    text = report.measured([run])
    assert "The cotangent was an argument. So XLA" in text
    new["cotangent"] = "after the result"
    text = report.measured([run])
    assert "The cotangent was an argument in mlp/8b/8192. So XLA" in text
    old["cotangent"] = "after the result"
    assert "The cotangent waits for the forward's result" in report.measured([run])


def test_the_report_replaces_what_is_between_its_marks(tmp_path: Path) -> None:
    page, stored = tmp_path / "benchmarks.md", tmp_path / "run.json"
    stored.write_text(json.dumps(STORED | {"claims": False}))
    page.write_text(report.PAGE.read_text())
    arguments = [str(stored), "--page", str(page), "--no-plots"]
    report.main(arguments)
    once = page.read_text()
    report.main(arguments)
    assert page.read_text() == once
    assert "Their times say nothing." in once
    assert "How to read the tables" in once


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page, stored = tmp_path / "page.md", tmp_path / "run.json"
    page.write_text("nothing")
    stored.write_text(json.dumps(STORED))
    with pytest.raises(ValueError, match="begin: measured"):
        report.main([str(stored), "--page", str(page), "--no-plots"])


@pytest.mark.newest
def test_a_plot_is_drawn_and_stays_the_same(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[str] = []
    for name in ("a.svg", "b.svg"):
        plots.speedups({"mlp": (1.3, 1.5), "out_rs": (0.9, None)}, tmp_path / name)
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1]
    assert "<svg" in drawn[0]


@pytest.mark.newest
def test_a_plot_speaks_of_a_ceiling_only_where_it_draws_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with_it, without = tmp_path / "with.svg", tmp_path / "without.svg"
    plots.speedups({"mlp": (1.3, 1.5), "out_rs": (0.9, None)}, with_it)
    plots.speedups({"mlp": (1.3, None)}, without)
    assert "the mark is the ceiling" in with_it.read_text()
    assert "ceiling" not in without.read_text()


@pytest.mark.newest
def test_timelines_before_and_after_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "mlp.svg"
    wanted = ["--small", "--devices", "2", "--pipelines", "off,p2p", "--traces"]
    timelines.main([*wanted, "--out", str(out)])
    assert "<svg" in out.read_text()
    assert (tmp_path / "mlp-off.json").exists()
    shown = capsys.readouterr().out
    assert "off: mlp on tp=2" in shown
    assert "p2p: mlp on tp=2" in shown


@pytest.mark.newest
def test_a_step_before_and_after_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "step.svg"
    wanted = ["--step", "8b/scan", "--mesh", "tp=2", "--small", "--layers", "1"]
    with jax.numpy_dtype_promotion("standard"):  # as JAX's own attention needs it
        timelines.main([*wanted, "--arms", "plain,jhost_p2p", "--out", str(out)])
    assert "<svg" in out.read_text()
    shown = capsys.readouterr().out
    assert "plain: 8b/scan on tp=2" in shown
    assert "jhost_p2p: 8b/scan on tp=2" in shown


@pytest.mark.parametrize(
    ("wanted", "fragment"),
    [
        (["--step", "8b/loop"], "a form of written, scan"),
        (["--step", "8b/scan", "--arms", "nobody"], "'nobody' is none of plain"),
        (["--mesh", "tp=99"], "takes 99 devices"),
    ],
)
def test_a_picture_of_nothing_is_refused(
    wanted: list[str], fragment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        timelines.main([*wanted, "--out", "none.svg", "--small"])
    assert fragment in capsys.readouterr().err


# --- What a call costs ----------------------------------------------------------------


def test_the_overhead_of_a_call_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    main = script("call_overhead.py")["main"]
    main(["--blocks", "2", "--calls", "3", "--json", str(path)])
    found = json.loads(path.read_text())
    table = capsys.readouterr().out
    assert len(found["rows"]) == 5
    for row in found["rows"]:
        assert row["case"] in table
        for name in ("plain", "jhost"):
            assert 0 < row["minimum_us"][name] <= row["median_us"][name]
        more = row["minimum_us"]["jhost"] - row["minimum_us"]["plain"]
        assert row["within_limit"] == (more <= found["limit_us"])


def test_products_of_rows_in_groups_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    ragged.main(["--quick", "--json", str(path)])
    rows, table = json.loads(path.read_text())["rows"], capsys.readouterr().out
    assert [row["pass"] for row in rows] == ["forward", "both"]
    for row in rows:
        assert row["times"].keys() == {"jhost", "jax", "equal"}
        assert f"| {row['case']} | {row['pass']} |" in table
    with pytest.raises(SystemExit):
        ragged.main(["--cases", "none"])
    assert "no cases ['none']" in capsys.readouterr().err


def test_the_time_of_lowering_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    main = script("lowering_time.py")["main"]
    main(["--layers", "1,2", "--runs", "1", "--json", str(path)])
    found, table = json.loads(path.read_text()), capsys.readouterr().out
    assert len(found["seconds"]) == 4
    for name, times in found["seconds"].items():
        assert name in table
        assert len(times) == 2
        assert all(seconds > 0 for seconds in times)
