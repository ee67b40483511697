"""`python -m jhost doctor`, `explain` and `bench`: what they say, and exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import pytest

import jhost
from jhost.__main__ import main
from jhost._commands import bench, doctor, findings, links
from jhost._commands.findings import Report
from jhost.runtime.devices import Devices, all_devices

ROOT = Path(__file__).parents[2]

Problems: TypeAlias = Callable[[str, Any], list[str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("JHOST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor copies between the devices, whose rates are no matter here."""
    monkeypatch.setattr(links, "_LINK_BYTES", 1 << 20)


# --- doctor ------------------------------------------------------------------------- #


def test_the_doctor_finds_this_machine_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for line in (
        f"  jax                  {jax.__version__}",
        f"  jhost                {jhost.__version__}",
        f"  count                {jax.device_count()}",
        "  collective           works",
        "  p2p                  works",
    ):
        assert f"\n{line}\n" in out
    assert "puts" not in out, "no word of what only GPUs have"
    assert " 0 GB/s" not in out
    assert out.endswith("0 problems found\n")


def test_the_doctor_speaks_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    monkeypatch.setattr(doctor, "_tried", lambda *_: "works")  # tried for the text
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert report["facts"]["devices"]["count"] == jax.device_count()
    assert report["facts"]["cache"] == {"folder": str(cache), "tunings": 0}
    assert len(report["facts"]["links"]) == jax.local_device_count() - 1


@pytest.fixture
def problems(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[str, Any], list[str]]:
    """`problems(name, value)`: what the doctor finds wrong with `name` replaced."""

    # The pipelines work, as one of the tests above finds; to compile them takes most
    # of the time.
    if "a_pipeline" not in request.node.name:
        monkeypatch.setattr(doctor, "_tried", lambda *_: "works")

    def found(name: str, value: Any) -> list[str]:
        monkeypatch.setattr(name, value)
        assert main(["doctor", "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        return [problem["what"] for problem in report["problems"]]

    return found


def test_a_jax_that_is_too_old_is_a_problem(problems: Problems) -> None:
    (what,) = problems("jax.__version_info__", (0, 4, 30))
    assert "works with JAX from 0.10 to below 0.13" in what


def test_the_versions_are_those_of_the_package() -> None:
    low, high = (".".join(map(str, version)) for version in findings.JAX)
    assert f'"jax>={low},<{high}"' in (ROOT / "pyproject.toml").read_text()


def test_gpus_that_jax_does_not_use_are_a_problem(
    problems: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (what,) = problems("shutil.which", lambda _: "/usr/bin/nvidia-smi")
    assert "has an NVIDIA driver, but JAX runs on the CPU" in what


def test_no_devices_are_a_problem(problems: Problems) -> None:
    def none(_: Any) -> Any:
        raise RuntimeError("no backend")

    (what,) = problems("jhost._commands.doctor.devices_here", none)
    assert what == "JAX finds no devices: no backend"


def test_options_that_xla_refuses_are_a_problem(problems: Problems) -> None:
    wanted = {"xla_no_such_option": True}
    (what,) = problems("jhost._commands.links.wanted_options", lambda _: wanted)
    assert what.startswith("this XLA does not take xla_no_such_option")


def test_a_pipeline_that_fails_is_a_problem(problems: Problems) -> None:
    found = problems("jhost._commands.doctor.beyond_tolerance", lambda *_: ["far"])
    assert found == [
        "the collective pipeline fails on these devices: far",
        "the p2p pipeline fails on these devices: far",
    ]


def test_slow_links_between_gpus_are_a_problem(
    problems: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = doctor.devices_of

    def gpus(mesh: Any) -> Any:
        return dataclasses.replace(right(mesh), platform="gpu")

    monkeypatch.setattr(links, "_SLOW_LINK", float("inf"))
    (what,) = problems("jhost._commands.doctor.devices_of", gpus)
    assert what.startswith("copies between GPUs are slow: 0 -> 1, 0 -> 2")


def test_the_doctor_says_whether_nccl_puts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = doctor.devices_of
    gpus = {"platform": "gpu", "kind": "NVIDIA H200"}
    monkeypatch.setattr(doctor, "_tried", lambda *_: "works")
    monkeypatch.setattr(links, "_SLOW_LINK", 0.0)
    monkeypatch.setattr(
        doctor, "devices_of", lambda mesh: dataclasses.replace(right(mesh), **gpus)
    )
    monkeypatch.setattr(doctor, "why_no_puts", lambda _: "NCCL 2.28.9 is too old")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "\n  puts                 none: NCCL 2.28.9 is too old\n" in out
    monkeypatch.setattr(doctor, "why_no_puts", lambda _: "")
    monkeypatch.setattr(doctor, "nccl_version", lambda: "2.32.3")
    assert doctor._puts(all_devices()) == "by NCCL 2.32.3"  # pyright: ignore[reportPrivateUsage]


def test_a_cache_that_cannot_be_written_is_a_problem(problems: Problems) -> None:
    (what,) = problems("os.access", lambda *_: False)
    assert what.endswith("cannot be written, so jhost.tune measures every time")


@pytest.mark.parametrize(
    ("reach", "found"),
    [
        ({"dp": "process", "tp": "process"}, []),
        ({"dp": "host", "tp": "process"}, []),
        ({"dp": "hosts", "tp": "hosts"}, []),
        ({"dp": "process", "tp": "host"}, ["in several processes of a host"]),
        ({"dp": "process", "tp": "hosts"}, ["on several hosts"]),
    ],
    ids=str,
)
def test_the_last_axis_lies_across_processes_only_where_it_has_to(
    reach: Any, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Devices(platform="gpu", kind="x", count=4, processes=2, reach=reach)
    monkeypatch.setattr(links, "devices_of", lambda _: there)
    report = Report()
    links.examine_mesh(report, jax.make_mesh((2, 2), ("dp", "tp")))
    assert list(report.facts["mesh"]) == ["dp", "tp"]
    assert [problem.what for problem in report.problems] == [
        f"the devices along tp are {where} without need" for where in found
    ]
    for problem in report.problems:
        assert "make_mesh({'dp': 2, 'tp': 2})" in problem.advice


def test_the_doctor_looks_at_a_mesh_of_the_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "examined", Report)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "meshes_of_mine.py").write_text(
        "import jax\n\n\ndef mesh():\n    return jax.make_mesh((4, 2), ('dp', 'tp'))\n"
    )
    assert main(["doctor", "--mesh", "meshes_of_mine:mesh"]) == 0
    assert "  tp                   2 devices in one process" in capsys.readouterr().out
    for name, said in (("jax", "is no jax.sharding.Mesh"), ("axes", "has no 'axes'")):
        with pytest.raises(SystemExit, match="2"):
            main(["doctor", "--mesh", f"meshes_of_mine:{name}"])
        assert said in capsys.readouterr().err


# --- explain ------------------------------------------------------------------------ #

MODULE = """
import jax
from jax.sharding import AxisType, PartitionSpec as P
import jhost

def plain(x, up, down):
    return jhost.stream(jax.nn.relu(x @ up) @ down, axis=0)

NUMBER = 3

def number():
    return NUMBER

def step(x, up, down):
    return jax.grad(lambda up: mlp(x, up, down).sum())(up)

mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
mlp = jhost.jit(
    plain,
    mesh=mesh,
    in_shardings=(P("tp"), P(None, "tp"), P("tp")),
    out_shardings=P("tp"),
)

def arguments():
    kinds = ((16, 8), (8, 16), (16, 8))
    return tuple(jax.ShapeDtypeStruct(kind, "float32") for kind in kinds)

ARGUMENTS = arguments()
"""

SHAPES = ["--shape", "16x8", "8x16", "16x8"]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with jhost functions, in the current folder."""
    (tmp_path / "a_model_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "a_model_of_mine", raising=False)
    return "a_model_of_mine"


def test_a_function_is_explained(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--pipeline", "collective", "--chunks", "2", "--host-ir"]
    assert main(["explain", f"{module}:mlp", *SHAPES, *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("program plain on tp=4\n  x: f32[4@tp, 8]\n")
    assert "\n\nplain: 1 loop\n" in out
    assert "collective pipeline: 2 chunks, as asked [a_model_of_mine.py:7" in out


def test_an_explanation_is_saved_as_a_page(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    explain = ["explain", f"{module}:mlp", *SHAPES, "--save"]
    assert main([*explain, "plan.html"]) == 0
    title, *_ = capsys.readouterr().out.splitlines()
    assert title in Path("plan.html").read_text()
    for wrong, said in (
        ("plan.pdf", "does not end in .html"),
        ("no/x.html", "no file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*explain, wrong])
        assert said in capsys.readouterr().err


def test_a_function_around_jhost_functions_is_explained(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{module}:step", *SHAPES]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step: ")
    assert "plain (forward)" in out
    assert "plain (backward)" in out
    assert main(["explain", f"{module}:step", *SHAPES, "--host-ir"]) == 0
    assert "program plain_backward on tp=4" in capsys.readouterr().out
    assert main(["explain", f"{module}:plain", *SHAPES]) == 1
    assert "calls no jhost function" in capsys.readouterr().err


def test_the_mesh_may_be_larger_than_the_machine(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ["--shape", "8192x4096:bf16", "4096x14336:bf16", "14336x4096:bf16"]
    mesh = ["--mesh", "tp=64", "--pipeline", "p2p"]
    assert main(["explain", f"{module}:mlp", *shapes, *mesh]) == 0
    assert "p2p pipeline: 64 chunks" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["arguments", "ARGUMENTS"])
def test_arguments_may_come_from_a_function_or_be_a_tuple(
    name: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["explain", f"{module}:mlp", "--arguments", f"{module}:{name}"]
    assert main(command) == 0
    assert "plain: 0 loops" in capsys.readouterr().out


def test_what_is_predicted_may_be_for_devices_that_are_not_there(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ["--shape", "8192x4096:bf16", "4096x14336:bf16", "14336x4096:bf16"]
    command = ["explain", f"{module}:mlp", *shapes, "--devices", "4", "--device"]
    assert main([*command, "NVIDIA H200"]) == 0
    out = capsys.readouterr().out
    assert "p2p with a chunk a device, predicted" in out
    assert "on 4 x NVIDIA H200, and" in out
    assert main([*command, "A100-SXM4-80GB", "--detail"]) == 0
    out = capsys.readouterr().out
    assert "estimated from data sheets to take" in out
    assert "collective_permute_mode='COLLECTIVES_PEER_MEMORY'" in out


def test_kinds_of_devices_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "--device", "list"])
    kinds = capsys.readouterr().out.splitlines()
    assert "NVIDIA H200" in kinds
    assert "cpu" not in kinds


def test_explain_without_shapes_names_the_option(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", f"{module}:mlp"])
    said = capsys.readouterr().err
    assert f"{module}:mlp takes x, up, down: give the type of each by --shape" in said
    assert "--arguments MODULE:NAME" in said


def test_a_function_is_tuned(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--pipeline", "off", "--no-cache", "--json", "tuning.json"]
    assert main(["tune", f"{module}:mlp", *SHAPES, *options]) == 0
    assert "plain: nothing to tune; no mark leaves" in capsys.readouterr().out
    assert jhost.Tuning.from_json(Path("tuning.json").read_text()).function == "plain"
    with pytest.raises(SystemExit, match="2"):
        main(["tune", f"{module}:plain", *SHAPES])
    assert "is not made by jhost.jit" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["tune", f"{module}:mlp", *SHAPES, "--mesh", "tp=4096"])
    assert "JAX_NUM_CPU_DEVICES=4096" in capsys.readouterr().err


def test_a_function_is_profiled(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["profile", f"{module}:mlp", *SHAPES, "--pipeline", "off", "--save"]
    assert main([*command, "report.html"]) == 0
    title, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith("plain on tp=4, cpu: ")
    assert Path("report.html").exists()
    assert main([*command, "report.pdf"]) == 1
    assert "ends in '.pdf'" in capsys.readouterr().err


def test_what_jhost_refuses_is_an_exit_status_of_1(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", f"{module}:mlp", "--shape", "15x8", "8x16", "16x8"]) == 1
    assert "4 does not divide 15" in capsys.readouterr().err
    assert main(["explain", f"{module}:mlp", "--shape", "16x8"]) == 1
    assert "missing" in capsys.readouterr().err


def test_a_reader_that_is_gone_is_an_exit_status_of_1(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)  # as by `jhost explain ... | head -1`
    with open(write, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        shapes = ["--shape", "16x8", "8x16", "16x8"]
        assert main(["explain", f"{module}:mlp", *shapes]) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["MODULE:mlp", "--shape", "8by8"], "'8by8' is no shape; write 8192x4096"),
        (
            ["MODULE:mlp", "--shape", "8:bf17"],
            "unknown dtype 'bf17'; the",
        ),
        (["MODULE:mlp", "--mesh", "tp"], "'tp' is no mesh; write dp=2,tp=4"),
        (["MODULE:mlp", "--mesh", "tp=0"], "'tp=0' is no mesh"),
        (["MODULE"], "is no name in a module; write module:name"),
        (["MODULE:nothing"], "the module MODULE has no 'nothing'"),
        (["no_such_module:f"], "there is no module 'no_such_module'"),
        (["MODULE:NUMBER"], "MODULE:NUMBER is no function"),
        (["../m:f"], "'../m' is no module's name; write it with dots"),
        (["MODULE:mlp", "--arguments", "MODULE:NUMBER"], "MODULE:NUMBER is no tuple"),
        (["MODULE:mlp", "--arguments", "MODULE:number"], "MODULE:number is no tuple"),
        (["MODULE:mlp", "--chunks", "0"], "'0' is not a whole number above 0"),
        (["MODULE:mlp", "--chunks", "many"], "'many' is not a whole number above 0"),
        (["MODULE:mlp", "--pipeline", "ring"], "invalid choice: 'ring'"),
        (["MODULE:mlp", "--device", "abacus"], "'abacus': no kind has that name"),
        (
            ["MODULE:mlp", "--device", "H100"],
            "'H100': several kinds have it in their names; there are NVIDIA H100 80GB",
        ),
        (
            ["MODULE:plain", "--chunks", "2"],
            "MODULE:plain is no jhost function: leave out --chunks",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_arguments_of_explain_are_an_exit_status_of_2(
    module: str,
    arguments: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["explain", *(each.replace("MODULE", module) for each in arguments)])
    assert raised.value.code == 2
    assert text.replace("MODULE", module) in capsys.readouterr().err


EXPLAIN = [sys.executable, "-m", "jhost", "explain"]


def test_a_module_that_needs_more_devices_gets_a_hint(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (tmp_path / f"{module}.py").read_text()
    (tmp_path / f"{module}.py").write_text(text.replace("(4,)", "(4096,)"))
    with pytest.raises(SystemExit) as raised:
        main(["explain", f"{module}:mlp", *SHAPES])
    assert raised.value.code == 2
    assert "JAX_NUM_CPU_DEVICES=" in capsys.readouterr().err


@pytest.mark.slow
def test_explain_makes_the_devices_that_a_module_asks_for(module: str) -> None:
    """Also beside a smaller `--mesh`; in a fresh process, from the module's folder."""
    unset = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment["PYTHONPATH"] = str(Path(jhost.__file__).parents[1])
    finished = subprocess.run(
        [*EXPLAIN, f"{module}:mlp", *SHAPES, "--mesh", "tp=2"],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("plain: 0 loops\n")


# --- The version -------------------------------------------------------------------- #


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"jhost {jhost.__version__}\n"


# --- bench -------------------------------------------------------------------------- #

SMALL = ["--devices", "2", "--rounds", "1", "--tokens", "8", "16"]


@pytest.mark.slow
def test_the_bench_compares_plain_jhost_and_the_limit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    assert main(["bench", *SMALL, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("hidden 256, ffn 1024, float32, on 2 x ")
    figures = json.loads(path.read_text())
    assert [row["tokens"] for row in figures["rows"]] == [8, 16]
    for row in figures["rows"]:
        assert set(row["median"]) == {"plain", "jhost", "compute"}
        for name, median in row["median"].items():
            assert 0 < row["minimum"][name] <= median
        assert f"{row['tokens']:>8}{1e3 * row['median']['plain']:11.3f}" in out
    assert figures["environment"]["devices"] == 2


def test_results_that_disagree_are_an_exit_status_of_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "beyond_tolerance", lambda *_: ["far"])
    assert main(["bench", *SMALL[:-1]]) == 1
    assert "THE RESULTS DISAGREE: far" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--devices", "1000"], "asks for more devices than the"),
        (["--devices", "2", "--tokens", "7"], "2 does not divide 7"),
        (["--rounds", "0"], "'0' is not a whole number above 0"),
        (["--json", "no/such/folder.json"], "is no file that can be written"),
        (["--json", "."], "'.' is no file that can be written"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_arguments_of_bench_are_an_exit_status_of_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["bench", *arguments])
    assert raised.value.code == 2
    assert text in capsys.readouterr().err


def test_what_is_hidden_is_a_part_of_what_was_exposed() -> None:
    def row(
        plain: float, by_jhost: float, compute: float, choice: str = "p2p"
    ) -> bench.Row:
        times = {"plain": plain, "jhost": by_jhost, "compute": compute}
        return bench.Row(
            tokens=8,
            hidden=8,
            ffn=8,
            dtype="float32",
            median=times,
            minimum=times,
            choice=choice,
            problems=(),
        )

    assert row(2.0, 1.25, 1.0).hidden_share == 0.75
    assert row(1.0, 1.0, 0.99).hidden_share is None
    assert row(2.0, 1.8, 1.0, "not pipelined").hidden_share is None
    slower = str(row(1.0, 1.5, 0.5))
    assert " slower " in slower
    assert "%" not in slower
