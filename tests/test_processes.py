"""Programs in several processes, as `jax.distributed` runs them, on CPUs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import pytest

from jhost import distributed, errors
from jhost.runtime.compiler_options import SYMMETRIC_BUFFERS
from tests.run_in_processes import digests, hybrid_runs, pattern_runs
from tests.tables import DOCS
from tests.test_readme import blocks

SCRIPT = Path(__file__).parent / "run_in_processes.py"
LIMIT = 240

Process: TypeAlias = "subprocess.Popen[str]"

ERRORS = list(blocks(DOCS / "errors.md"))
PREAMBLE = ERRORS[0].text


pytestmark = pytest.mark.slow


@contextlib.contextmanager
def started(scenario: str, count: int, devices: int = 2) -> Generator[list[Process]]:
    """Processes of some devices each, that end at the end."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": "",
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
    }
    # -P: beside the script stands tests/jhost, which is not jhost.
    command = [sys.executable, "-P", str(SCRIPT), scenario, str(port), str(count)]
    processes = [
        subprocess.Popen(
            [*command, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def said(
    scenario: str, count: int, devices: int = 2, told: str = ""
) -> list[list[dict[str, Any]]]:
    """What each process said; all of them ended well."""
    with started(scenario, count, devices) as processes:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(told)
            process.stdin.close()
            process.stdin = None
        ends = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, ends
    return [list(spoken(out.splitlines())) for out, _ in ends]


def spoken(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What a process says among lines that gloo prints."""
    return (json.loads(line) for line in lines if line.startswith("{"))


def merged(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: found for line in lines for name, found in line.items()}


# --- Right ------------------------------------------------------------------------ #


def test_patterns_give_the_bits_that_one_process_gives() -> None:
    """Values, and gradients of the larger ones in an outer jit, by either pipeline.

    Of two devices of a process, one sends to the other and one to another process.
    """
    several = together(map(merged, said("patterns", 2)))
    alone = {n: digests(found) for n, found in pattern_runs(jax.devices()[:4])}
    assert len(alone) == (10 + 4) + (11 + 5)
    assert several == alone


def together(found: Iterable[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """The parts of all processes, which agree where two have the same."""
    parts: dict[str, dict[str, str]] = {}
    for process in found:
        for name, own in process.items():
            for part, digest in own.items():
                known = parts.setdefault(name, {}).setdefault(part, digest)
                assert known == digest, (name, part)
    return parts


def test_data_and_tensor_parallelism_give_the_bits_of_one_process() -> None:
    """tp within a process, and over two; weights lie on all devices."""
    mesh = distributed.make_mesh({"dp": 2, "tp": 2}, devices=jax.devices()[:4])
    alone = {name: digests(result) for name, result in hybrid_runs(mesh)}
    assert len(alone) == 4
    for count, devices in ((2, 2), (4, 1)):
        assert together(map(merged, said("hybrid", count, devices))) == alone


def test_processes_calibrate_the_network_between_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And all go by what process 0 found, which its folder keeps."""
    monkeypatch.setenv("JHOST_CACHE_DIR", str(tmp_path))
    (one,), (other,) = said("calibrates", 2, devices=2)
    assert one == other
    assert 1e6 < one["bandwidth"] < 1e12
    assert 0 <= one["latency"] < 1
    assert 0 <= one["taken"] <= 1
    (kept,) = tmp_path.rglob("calibration-*/*.json")
    conditions = json.loads(kept.read_text())["conditions"]
    assert conditions["processes"] == 2


def test_processes_meet_once_for_a_program() -> None:
    found = [merged(lines) for lines in said("meetings", 4)]
    for number, counts in enumerate(found):
        inner = 1 if number < 2 else 0
        assert counts == {
            "explained, lowered, compiled and traced": 0,
            "called": 1,
            "compiled twice": 1,
            "called on half of the devices": 1 + inner,
            "called on its own devices": 1 + inner,
        }


# --- Different programs ------------------------------------------------------------ #


def test_a_process_with_another_statement_is_named_by_all() -> None:
    ends = said("another_statement", 4, devices=1)
    assert all(lines == ends[0] for lines in ends)
    called, jitted, gradient, compiled, last = ends[0]
    usual = "processes 0, 1, 2"
    for line in (called, jitted, gradient, compiled):
        assert line["error"] == "ProcessMismatchError"
        assert f"not all run the mine of {usual}" in line["text"]
        (offender,) = re.findall(r"^  [*] (.*)$", line["text"], re.M)
        theirs, ours = offender.split(f", where {usual} have")
        assert theirs.startswith("process 3, in mine: `")
        # The gradients of the two differ in more than one statement.
        assert line is gradient or ("= tanh(" in theirs and "= sin(" in ours)
    assert last["error"] is None


@pytest.fixture(scope="module")
def differences() -> list[dict[str, Any]]:
    """What two processes say whose programs differ in one way after another."""
    ends = said("differences", 2)
    assert ends[0] == ends[1]
    return ends[0]


def test_parameters_and_options_that_differ_are_named(
    differences: list[dict[str, Any]],
) -> None:
    parameter, option, dump = differences[:3]
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in parameter[
        "text"
    ].replace("<", "").replace(">", "")
    assert "`XLA's options xla_cpu_enable_fast_math=False`" in option["text"]
    assert dump == {"error": None}


def test_what_else_makes_an_executable_is_named(
    differences: list[dict[str, Any]],
) -> None:
    donated, *closed, static, of_an_object = differences[3:]
    assert "not all run the mine of process 0" in donated["text"]
    assert "process 1, in mine: `x is donated`, where process 0 has" in donated["text"]
    for line in closed:
        assert "is closed over`" in line["text"]
    assert "`argument 1 is static: True`, where process" in static["text"]
    assert of_an_object == {"error": None}


def test_another_order_of_programs_is_an_error_in_all() -> None:
    ends = said("another_order", 2)
    assert ends[0] == ends[1]
    assert [line["error"] for line in ends[0]] == ["ProcessMismatchError"] * 2
    assert "in block: `result: f32" in ends[0][0]["text"]


def test_who_does_not_come_is_named() -> None:
    *waiting, last = said("absent", 4, devices=1)
    assert last == []
    for (line,) in waiting:
        assert line["error"] == "ProcessTimeoutError"
        assert "waited 2 s before the first run of block" in line["text"]
        assert "* process 3 has not come" in line["text"]
        assert line["text"].count("* process") == 1


@pytest.mark.parametrize(
    ("name", "preamble", "count", "raising"),
    [
        ("ProcessMismatchError", PREAMBLE, 2, 2),
        ("ProcessTimeoutError", PREAMBLE, 2, 1),
        ("InitializeError", "", 1, 1),
    ],
)
def test_the_first_example_of_the_page_raises_and_the_second_runs(
    name: str, preamble: str, count: int, raising: int
) -> None:
    wrong, right = (block.text for block in ERRORS if block.heading == name)
    for example, wanted in (
        (wrong, [name] * raising + [None] * (count - raising)),
        (right, [None] * count),
    ):
        ends = said("page", count, told=json.dumps([preamble, example]))
        assert [line["error"] for (line,) in ends] == wanted


# --- Deaths ------------------------------------------------------------------------ #


@pytest.mark.parametrize(
    ("count", "victim", "by"),
    [
        (2, 0, signal.SIGKILL),  # which runs the coordination service
        (4, 2, signal.SIGKILL),
        (2, 1, signal.SIGSTOP),
    ],
)
def test_when_a_process_dies_in_a_loop_the_others_end(
    count: int, victim: int, by: signal.Signals
) -> None:
    """After ten seconds without a heartbeat, though collectives wait for ever."""
    with started("loop", count, devices=4 // count) as processes:
        for process in processes:
            assert process.stdout is not None
            lines = itertools.islice(spoken(process.stdout), 3)
            assert list(lines) == [{"ran": True}] * 3
        processes[victim].send_signal(by)
        others = [p for n, p in enumerate(processes) if n != victim]
        ends = [process.communicate(timeout=LIMIT) for process in others]
    for process, (_, err) in zip(others, ends, strict=True):
        assert process.returncode != 0
        assert "another task died" in err or "Connection closed by peer" in err


# --- Initializing ------------------------------------------------------------------ #


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("late", "comes too late: JAX has started its backend"),
        ("twice", "Call it once"),
    ],
)
def test_initialize_is_early_and_once(scenario: str, text: str) -> None:
    ((line,),) = said(scenario, 1)
    assert line["error"] == "InitializeError"
    assert text in line["text"]


def test_initialize_is_too_late_once_there_are_devices() -> None:
    assert jax.devices()
    with pytest.raises(errors.InitializeError, match="before any computation"):
        distributed.initialize("localhost:1234", 2, 0)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e10])
def test_a_timeout_is_above_zero_and_ends(seconds: float) -> None:
    with pytest.raises(errors.OptionError, match=f"program_timeout_seconds={seconds}"):
        distributed.initialize(program_timeout_seconds=seconds)


@pytest.mark.parametrize("seconds", ["a", True, [1]])
def test_a_timeout_is_a_number(seconds: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="takes a number of seconds"):
        distributed.initialize(program_timeout_seconds=seconds)


def test_flags_of_the_user_stand() -> None:
    with_flags = distributed._with_flags  # pyright: ignore[reportPrivateUsage]
    (name,) = SYMMETRIC_BUFFERS
    assert with_flags("", SYMMETRIC_BUFFERS) == f"--{name}=true"
    assert with_flags("--a=1", SYMMETRIC_BUFFERS) == f"--a=1 --{name}=true"
    assert with_flags(f"--{name}=false", SYMMETRIC_BUFFERS) == f"--{name}=false"


def test_xla_takes_the_settings_of_the_process() -> None:
    """An unknown name among them would end the process when JAX starts its backend."""
    (lines,) = said("symmetric_buffers", 1)
    assert lines == [
        {"flags": "--xla_gpu_experimental_enable_nccl_symmetric_buffers=true"}
    ]
