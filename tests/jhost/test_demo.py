"""`python -m jhost demo`: what it prints and writes, and its exit statuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import jhost
from jhost.__main__ import main
from jhost._commands import demo as command
from jhost._commands.block import MlpBlock
from tests import budget

TINY = ["--hidden", "16", "--ffn", "32", "--tokens", "64", "--repeats", "2"]


def demo(*arguments: str) -> int:
    return main(["demo", *TINY, *arguments])


def test_the_demo_prints_the_program_the_explanation_and_the_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo("--devices", "4", "--chunks", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("program mlp on tp=4")
    assert "AllGather" in out
    assert "\n\nmlp: 1 loop\n" in out
    assert "collective pipeline: 2 chunks, as asked [block.py:" in out
    assert "tokens 64, hidden 16, ffn 32, float32, on 4 x " in out
    assert "The results agree" in out
    assert re.search(r"^  plain +\d+\.\d+ +\d+\.\d+\n  jhost +\d+\.\d+ ", out, re.M)


@budget.first_is_quick("dtype", command.DTYPES)
def test_the_figures_are_written_as_json(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "figures.json"
    assert demo("--devices", "2", "--dtype", dtype, "--json", str(path)) == 0
    figures = json.loads(path.read_text())
    assert figures["match"] is True
    assert 0 <= figures["max_error"] <= figures["tolerance"]
    assert (figures["devices"], figures["loops"], figures["chunks"]) == (2, 1, 4)
    assert (figures["tokens"], figures["dtype"]) == (64, dtype)
    for name in ("plain", "jhost"):
        assert 0 < figures[f"{name}_min_ms"] <= figures[f"{name}_ms"]
    assert figures["versions"]["jax"] == jax.__version__
    assert figures["versions"]["jhost"] == jhost.__version__


def test_one_device_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--devices", "1") == 0
    assert "program mlp on tp=1" in capsys.readouterr().out


def test_disagreement_is_an_exit_status_of_1(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    right = command.plain

    def wrong(block: MlpBlock) -> Any:
        function = right(block)
        return lambda *operands: function(*operands) + 1

    monkeypatch.setattr(command, "plain", wrong)
    path = tmp_path / "figures.json"
    assert demo("--json", str(path)) == 1
    assert "THE RESULTS DISAGREE" in capsys.readouterr().out
    assert json.loads(path.read_text())["match"] is False


def test_nan_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "relative_errors", lambda *_: [float("nan")])
    assert demo() == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tokens", "0"], "--tokens: '0' is not a whole number above 0"),
        (["--chunks", "two"], "--chunks: 'two' is not a whole number"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--devices", "4", "--tokens", "30"], "4 does not divide 30"),
        (["--devices", "4", "--ffn", "30"], "w_up of shape (16, 30)"),
        (["--devices", "4", "--chunks", "17"], "17 chunks were asked for"),
        (["--devices", "1000"], "--devices 1000 asks for more devices than the"),
        (["--layers", "2"], "unrecognized arguments: --layers 2"),
    ],
    ids=" ".join,
)
def test_bad_arguments_are_an_exit_status_of_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        demo(*arguments)
    assert raised.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["dance"]], ids=["none", "unknown"])
def test_without_a_command_the_commands_are_listed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage: jhost" in capsys.readouterr().err


@pytest.mark.slow
def test_a_fresh_process_makes_its_own_devices(tmp_path: Path) -> None:
    """Four of the CPU, where nothing else is said and there is no accelerator."""
    unset = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    environment["PYTHONPATH"] = str(Path(jhost.__file__).parents[1])
    path = tmp_path / "figures.json"
    command = [sys.executable, "-W", "error", "-m", "jhost", "demo", *TINY]
    finished = subprocess.run(
        [*command, "--json", str(path)],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""
    assert "program mlp on tp=4" in finished.stdout
    assert json.loads(path.read_text())["devices"] == 4
