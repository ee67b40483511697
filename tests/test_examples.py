"""The examples run, and their programs are what the examples say they are."""

from __future__ import annotations

import difflib
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest

from tests.xla_flags import QUICKLY

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

with_flax = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def main_of(name: str) -> Callable[[list[str]], Any]:
    """The example's `main`; flax and optax mix dtypes, jhost does not."""
    for package in ("flax", "optax", "orbax.checkpoint", "matplotlib"):
        pytest.importorskip(package)
    main = runpy.run_path(str(EXAMPLES / name))["main"]

    def standard(argv: list[str]) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return main(argv)

    return standard


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_mlp_runs_in_any_number_of_chunks(
    chunks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLES / "mlp.py"))["main"]
    main(["--chunks", str(chunks), "--rows", "8"])
    out = capsys.readouterr().out
    assert out.startswith("mlp: 1 loop" if chunks > 1 else "mlp: 0 loops")
    assert "AllGather" in out
    assert "gradient: (128, 512)" in out


@pytest.mark.slow
def test_several_processes_give_what_one_gives() -> None:
    # -P: beside the examples may stand what has the name of a package.
    script = str(EXAMPLES / "multi_process.py")
    command = [sys.executable, "-P", script, "--rows", "4", "--width", "16"]
    done = subprocess.run(
        command,
        env=os.environ | {"XLA_FLAGS": QUICKLY},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "p2p pipeline: 4 chunks" in done.stdout
    for line in (
        "process 0: rows 0 to 8 are right",
        "process 1: rows 8 to 16 are right",
    ):
        assert line in done.stdout


# --- adopt -------------------------------------------------------------------------- #


@pytest.mark.slow
@with_flax
def test_an_adopted_model_trains_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    losses: list[list[str]] = []
    for name in ("adopt_before.py", "adopt.py"):
        main_of(name)(["--steps", "3"])
        losses.append(re.findall(r"loss ([\d.]+)", capsys.readouterr().out))
    assert losses[0] == losses[1]
    assert float(losses[0][-1]) < float(losses[0][0])


def test_the_page_shows_the_lines_that_adopting_changes() -> None:
    """Five lines, and an import."""
    before, after = (
        (EXAMPLES / name).read_text().splitlines()
        for name in ("adopt_before.py", "adopt.py")
    )
    diff = list(difflib.unified_diff(before, after, lineterm="", n=0))
    changed = [line for line in diff[2:] if not line.startswith("@@") and line != "+"]
    assert [line[0] for line in changed].count("-") == 5
    assert [line[0] for line in changed].count("+") == 6
    page = (ROOT / "docs" / "flax.md").read_text()
    (shown,) = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    assert shown.splitlines() == changed


# --- train_transformer -------------------------------------------------------------- #

BRIEFLY = ["--steps", "8", "--checkpoint-every", "4", "--out"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training with and without jhost has left."""
    out = tmp_path_factory.mktemp("trained")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        main_of("train_transformer.py")([*BRIEFLY, str(out)])
    return out


def losses_in(out: Path) -> dict[str, list[float]]:
    return json.loads((out / "losses.json").read_text())


@pytest.mark.slow
def test_the_transformer_trains_alike_with_and_without_jhost(trained: Path) -> None:
    losses = losses_in(trained)
    np.testing.assert_allclose(losses["jhost"], losses["jax.jit"], rtol=1e-3)
    assert losses["jhost"][-1] < 6 < losses["jhost"][0]
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")


@with_flax
@pytest.mark.slow
def test_the_transformer_goes_on_from_a_checkpoint(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = main_of("train_transformer.py")
    only = ["--only", "jax.jit", *BRIEFLY, str(tmp_path)]
    main([*only, "--stop-after", "4"])
    assert len(losses_in(tmp_path)["jax.jit"]) == 4
    main([*only, "--resume"])
    whole, parts = (losses_in(out)["jax.jit"] for out in (trained, tmp_path))
    assert len(parts) == 8
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    reports = re.findall(
        r"bits per character, [\d,]+ tokens/s", capsys.readouterr().out
    )
    assert len(reports) == 2


@with_flax
def test_what_is_not_installed_is_named_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = main_of("train_transformer.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"orbax is not installed.*--checkpoint-every"):
        main(["--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"matplotlib is not installed.*--no-picture"):
        main(["--checkpoint-every", "0", "--out", str(tmp_path)])


@with_flax
def test_checkpoints_of_another_training_are_not_mixed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints-jhost"
    folder.mkdir()
    (folder / "100").mkdir()
    with pytest.raises(SystemExit, match="Go on from them with --resume"):
        main_of("train_transformer.py")(["--only", "jhost", "--out", str(tmp_path)])


# --- ring_attention, moe, fsdp_tp --------------------------------------------------- #

Run: TypeAlias = Callable[[str, Sequence[str]], None]
Dumped: TypeAlias = Callable[[], list[str]]
Captured: TypeAlias = pytest.CaptureFixture[str]


@pytest.fixture
def run(beside_examples: None) -> Run:
    """Runs an example."""

    def run(name: str, argv: Sequence[str]) -> None:
        runpy.run_path(str(EXAMPLES / name))["main"](argv)

    return run


@pytest.fixture
def dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dumped:
    """The statements of all programs with loops that an example made, in order."""
    monkeypatch.setenv("JHOST_DUMP", "host_ir")
    monkeypatch.setenv("JHOST_DUMP_DIR", str(tmp_path))

    def read() -> list[str]:
        texts = [path.read_text() for path in sorted(tmp_path.glob("*.host_ir.txt"))]
        return [text.split("\nunit ")[0] for text in texts if "for i in" in text]

    return read


def sends(program: str) -> list[str]:
    """The kinds and axes of all communications, as they stand in the program."""
    found = re.findall(r"(?:= |<- )([A-Z]\w+)\(.* axes=\((.*?)\)\) as c", program)
    return [f"{kind} over {axes}" for kind, axes in found]


@pytest.mark.slow
def test_keys_and_values_go_around_and_scores_stay_in_chunks(
    run: Run, dumped: Dumped, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward; the scores of 512 keys are made 128 at a time."""
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    run("ring_attention.py", [])
    assert capsys.readouterr().out.startswith("attention: 1 loop")
    forward, *_, backward = programs = dumped()
    permute = "CollectivePermute over sp"
    exchanged = 8  # halves of queries, keys, values and results
    assert sends(forward) == [permute] * (exchanged + 2)  # keys and values come
    assert sends(backward).count(permute) == len(sends(backward))
    assert backward.count("shift=3 - i") == 2
    assert backward.count("shift=i + 1") == 2  # and their gradients go
    for program in programs:
        assert not re.search(r"[\[ ]512[@~,\]]", program), "one is as long as all keys"


def test_tokens_go_to_their_experts_and_back_in_one_loop(
    run: Run, dumped: Dumped, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    run("moe.py", [])
    p2p, collective = capsys.readouterr().out.split("moe: 1 loop\n")[1:]
    assert len(re.findall("CollectivePermute .* in 3 chunks", p2p)) == 2
    assert len(re.findall("AllToAll .* in 4 chunks", collective)) == 2
    by_collectives, by_permutes = sorted(set(dumped()), key=lambda p: "Permute" in p)
    assert sends(by_permutes) == ["CollectivePermute over ep"] * 2
    assert sends(by_collectives) == ["AllToAll over ep"] * 2
    # All is in the loop: it is the last thing before the result.
    end = r"Synchronize\(stream\[i.*\n(  Dealloc.*\n)*  return"
    assert re.search(end, by_collectives)


@pytest.mark.slow
@pytest.mark.usefixtures("beside_examples")
@with_flax
def test_experts_learn_as_on_one_device(capsys: Captured) -> None:
    losses: Any = main_of("experts.py")(["--steps", "12"])
    assert losses[-1] < 0.7 * losses[0]
    (off,) = re.findall(r"gradients differ by (\S+)", capsys.readouterr().out)
    assert float(off) < 1e-5


def test_shards_of_weights_come_and_their_gradients_go_in_loops(
    run: Run, dumped: Dumped, capsys: Captured
) -> None:
    run("fsdp_tp.py", [])
    assert capsys.readouterr().out.startswith("block: 1 loop")
    forward, *others = [sends(program) for program in dumped()]
    come, add = "AllGather over tp", "ReduceScatter over tp"
    shard = "CollectivePermute over data"
    assert forward == [come, shard, shard, shard, add]
    # Two layers, each forward and backward; all that moves over data is in loops.
    assert len(others) >= 3
    for sent in others:
        assert shard in sent
        assert set(sent) <= {come, shard, add}


blocks_on_cpu = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="not in this JAX on CPUs"
)


@pytest.mark.parametrize(
    ("product", "pipeline"),
    [
        ("rows", "p2p"),
        ("rows", "collective"),
        pytest.param("blocks", "p2p", marks=blocks_on_cpu),
    ],
)
def test_eight_bits_and_their_scales_are_what_comes(
    run: Run, dumped: Dumped, capsys: Captured, product: str, pipeline: str
) -> None:
    run("fp8.py", ["--product", product, "--pipeline", pipeline])
    out = capsys.readouterr().out
    # A row's scale is the maximum over all devices, between the products.
    assert re.match(r"mlp: [12] loop", out)
    received, wide = re.findall(r"receives ([\d,]+) bytes.* be ([\d,]+)", out)[0]
    assert int(received.replace(",", "")) < 0.85 * int(wide.replace(",", ""))
    (program,) = dumped()
    coming = "CollectivePermute" if pipeline == "p2p" else "AllGather"
    kinds = re.findall(r"(f8\w+)\[[^=]*= " + coming, program)
    scales = ["f8_e8m0fnu"] if product == "blocks" else []  # those of rows are wider
    assert sorted(kinds) == ["f8_e4m3fn", *scales]


@pytest.mark.parametrize(
    ("pipeline", "kinds"),
    [
        ("p2p", ["CollectivePermute", "CollectivePermute"]),
        ("collective", ["AllGather", "ReduceScatter"]),
    ],
)
def test_what_moves_over_either_axis_does_so_in_chunks(
    run: Run, capsys: Captured, pipeline: str, kinds: list[str]
) -> None:
    run("triangle.py", ["--pipeline", pipeline])
    out = capsys.readouterr().out
    moved = re.findall(r"(\w+) of .* over (row|column), .* in 4 chunks beside", out)
    assert {axis: kind for kind, axis in moved} == dict(
        zip(["row", "column"], kinds, strict=True)
    )
    (off,) = re.findall(r"differ by (\S+)", out)
    assert float(off) < 1e-5
